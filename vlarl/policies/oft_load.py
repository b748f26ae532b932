"""From an OpenVLA-OFT checkpoint to a policy: the network is built, filled and proved."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from pathlib import Path

import torch

from vlarl import noise
from vlarl.assets import store
from vlarl.models.openvla_oft import checkpoint
from vlarl.models.openvla_oft.config import read_net_config
from vlarl.models.openvla_oft.net import OftNet, check_bidirectional
from vlarl.models.openvla_oft.processing import ImageFrontEnd, Prompts, read_normalisation
from vlarl.policies.oft_policy import OftPolicy
from vlarl.policies.openvla_oft import (
    L1,
    PROPRIO,
    OftConfig,
    codecs,
    has_l1_head,
    proprio_file,
    resolve_settings,
    spec,
)

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(
    cfg: OftConfig, *, device: torch.device, needs_value: bool, train: bool = True
) -> OftPolicy:
    """Build the network and fill it from the checkpoint.

    train: False loads for inference only, which also admits checkpoints with an L1 regression head.
    Raises ConfigError, CorruptFile, AssetMissing; RunFailed when attention turns out not to be
    bidirectional.
    """
    folder = store.resolve(cfg.checkpoint)
    l1 = has_l1_head(folder, train=train)
    config = read_net_config(folder)
    settings = resolve_settings(cfg, folder)
    codec, state_codec, key = codecs(folder, settings)
    settings = replace(settings, unnorm_key=key, action_format=codec.action_format)
    prompts = Prompts.from_folder(folder)
    mean, std = read_normalisation(folder, config.image_size)
    policy_spec = spec(cfg, needs_value=needs_value)
    with torch.device("meta"):
        net = OftNet(
            config,
            num_slots=settings.chunk * codec.width,
            stop_id=prompts.stop if settings.stop_token else None,
            value_width=policy_spec.value_width,
            state_dims=policy_spec.state_dims,
            l1_dims=codec.width if l1 else 0,
            rope_bf16=settings.rope_bf16,
            value_detach=cfg.value_detach,
        )
    checkpoint.load_weights(net, folder, device=device, dtype=_DTYPES[cfg.dtype])
    proprio = proprio_file(folder, settings, train=train)
    _load_heads(net, folder, proprio, device=device, dtype=_DTYPES[cfg.dtype])
    net.eval()
    attention = check_bidirectional(net)
    if cfg.freeze_vision:
        net.vision_backbone.requires_grad_(False)
    if cfg.lora is not None:
        importlib.import_module("vlarl.policies.oft_lora").add_adapters(net, cfg)
    return OftPolicy(
        spec=policy_spec,
        module=net,
        images=ImageFrontEnd(
            image_size=config.image_size,
            mean=mean,
            std=std,
            resize=settings.resize,
            centre_crop=settings.centre_crop,
            jpeg=settings.jpeg,
        ),
        prompts=prompts,
        codec=codec,
        state_codec=state_codec,
        settings=settings,
        lora_scale=cfg.lora.alpha / cfg.lora.rank if cfg.lora else None,
        source=folder,
        self_tests={"attention": attention},
    )


def _load_heads(
    net: OftNet, folder: Path, proprio: Path | None, *, device: torch.device, dtype: torch.dtype
) -> None:
    """The heads that live in files of their own; fresh ones where there is no file. proprio: the
    state projector's.
    """
    if net.value_head is not None:
        head = net.value_head.to_empty(device="cpu")
        path = folder / checkpoint.VALUE_HEAD
        if path.exists():
            state = checkpoint.read_safetensors(path)
            checkpoint.load_head(
                head, {n.removeprefix("value_head."): t for n, t in state.items()}, path
            )
        else:
            head.reset(noise.stream("value_head"))
        head.to(device)
    if net.proprio_projector is not None:
        projector = net.proprio_projector.to_empty(device="cpu")
        if proprio is not None:
            checkpoint.load_head(projector, checkpoint.read_component(proprio), proprio)
        else:
            projector.reset(noise.stream("proprio_projector"))
            log.warning("%s has no %s file; starting with a fresh one", folder, PROPRIO)
        projector.to(device=device, dtype=dtype)
    if net.l1_head is not None:
        path = checkpoint.component(folder, L1)
        assert path is not None
        l1_head = net.l1_head.to_empty(device="cpu")
        checkpoint.load_head(l1_head, checkpoint.read_component(path), path)
        l1_head.to(device=device, dtype=dtype)
