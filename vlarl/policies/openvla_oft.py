"""The OpenVLA-OFT plug-in: discrete action tokens, all of a chunk from one forward pass.

Config, spec and loading; the policy itself is in `oft_policy`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from pydantic import Field
from torch import nn

from vlarl import noise
from vlarl.assets import store
from vlarl.config.schema import Bool, Int, PolicySection, Section
from vlarl.errors import ConfigError
from vlarl.models.openvla_oft import checkpoint
from vlarl.models.openvla_oft.action_tokens import ActionCodec, StateCodec
from vlarl.models.openvla_oft.config import (
    ActionFormat,
    Jpeg,
    Normalisation,
    Resize,
    Settings,
    laid_out,
    read_json,
    read_net_config,
    read_settings,
    read_statistics,
    resolve_key,
)
from vlarl.models.openvla_oft.net import (
    OftNet,
    check_bidirectional,
)
from vlarl.models.openvla_oft.processing import ImageFrontEnd, Prompts, read_normalisation
from vlarl.policies.oft_policy import OftPolicy
from vlarl.specs import PolicySpec

log = logging.getLogger(__name__)

_COMPAT: Mapping[str, Mapping[str, Any]] = {
    "oft": {"resize": "lanczos", "centre_crop": True, "jpeg": "pil", "stop_token": True},
    "rlinf": {"resize": "bicubic", "centre_crop": False, "jpeg": "off", "stop_token": False},
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PROPRIO = "proprio_projector"
_L1 = "action_head"


class LoraSection(Section):
    """Low-rank adapters (peft). Everything else but the value head is frozen; `save` merges
    them.
    """

    rank: Annotated[Int, Field(ge=1)] = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, in `sft_loss` only: reinforcement learning has to score what
    acted."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last names of the linear layers that get one: those of the language model above; `qkv`,
    `proj`, `fc1`, `fc2` of the vision towers; `fc1`, `fc2`, `fc3` of the projector; `action_rows`
    for the head."""


class OftConfig(PolicySection):
    """OpenVLA-OFT. Where a field is none, the checkpoint's own settings count, then those of the
    published recipe.
    """

    name: Literal["openvla_oft"] = "openvla_oft"
    """Registered name of the policy."""
    unnorm_key: str | None = None
    """Data set whose statistics un-normalise the actions; `KEY_no_noops` is tried as well. None:
    the checkpoint's choice, or the only one there is."""
    chunk: Annotated[Int, Field(ge=1)] | None = None
    """Actions per decision. Released checkpoints do not store it; 8 unless set."""
    compat: Literal["oft", "rlinf"] | None = None
    """Preset of the four fields below. oft: JPEG round trip, Lanczos, 0.9 centre crop, stop token,
    as in supervised training. rlinf: bicubic, no crop, no JPEG, no stop token, as RLinf runs the
    same checkpoints."""
    resize: Resize | None = None
    """Resampling from the frame to the model's size."""
    centre_crop: Bool | None = None
    """Keep the central 90 % of the area and scale it back."""
    jpeg: Jpeg | None = None
    """Send frames that need resizing through JPEG first: 2-3 ms per 256 px frame on one core."""
    stop_token: Bool | None = None
    """Put `</s>` behind the action slots."""
    rope_bf16: Bool | None = None
    """Round the RoPE frequencies to bfloat16, as casting the module does in RLinf. Off unless
    set."""
    num_images: Annotated[Int, Field(ge=1)] | None = None
    """Camera views per decision, in the env's order; 1 unless set."""
    use_proprio: Bool | None = None
    """Feed the robot state as one token; needs a proprio projector in the checkpoint, or starts a
    fresh one."""
    normalisation: Normalisation | None = None
    """Statistics that span [-1, 1]: q99 (1 % and 99 % quantiles) or bounds (minimum and maximum).
    q99 unless set."""
    action_format: ActionFormat | None = None
    """Meaning of the numbers: by width unless set. metaworld_7d: RLinf's MetaWorld checkpoints,
    whose numbers 0, 1, 2, 6 are the env's four."""
    value: Literal["chunk", "action"] = "chunk"
    """Value head: one number per decision, or one per action of the chunk."""
    value_detach: Bool = False
    """Keep the value loss from reaching the backbone."""
    freeze_vision: Bool = False
    """Do not train the vision towers."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of all weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type the weights are held in. The value head, adapters, log-probs and values stay float32."""


Config = OftConfig


def resolve_settings(cfg: OftConfig, folder: Path) -> Settings:
    """A field that is set wins, then `compat`, then what the checkpoint says, then the published
    recipe.
    """
    explicit = {
        name: getattr(cfg, name) for name in asdict(Settings()) if getattr(cfg, name) is not None
    }
    compat = _COMPAT[cfg.compat] if cfg.compat else {}
    return Settings(**{**read_settings(folder), **compat, **explicit})


def _codecs(folder: Path, settings: Settings) -> tuple[ActionCodec, StateCodec | None, str]:
    """What the statistics say about actions and states, and whose they are."""
    with laid_out(folder / "dataset_statistics.json"):
        statistics = read_statistics(folder)
        codec, key = _codec(statistics, settings)
        return codec, _state_codec(statistics, key, settings), key


def _codec(statistics: Mapping[str, Any], settings: Settings) -> tuple[ActionCodec, str]:
    key = resolve_key(statistics, settings.unnorm_key)
    if not isinstance(statistics[key], dict) or "action" not in statistics[key]:
        raise ConfigError(f"dataset_statistics.json: '{key}' has no action statistics")
    codec = ActionCodec(
        statistics[key]["action"],
        normalisation=settings.normalisation,
        action_format=settings.action_format,
    )
    return codec, key


def _state_codec(statistics: Mapping[str, Any], key: str, settings: Settings) -> StateCodec | None:
    if not settings.use_proprio:
        return None
    if "proprio" not in statistics[key]:
        raise ConfigError(
            f"policy.use_proprio: the statistics of '{key}' have no proprio entry; set it to false"
        )
    return StateCodec(statistics[key]["proprio"], normalisation=settings.normalisation)


def spec(cfg: OftConfig, *, needs_value: bool = False) -> PolicySpec:
    """What the checkpoint needs and emits, from its small JSON files alone."""
    folder = store.resolve(cfg.checkpoint)
    read_net_config(folder)
    settings = resolve_settings(cfg, folder)
    codec, state, _ = _codecs(folder, settings)
    width = 0 if not needs_value else 1 if cfg.value == "chunk" else settings.chunk
    return PolicySpec(
        name=cfg.name,
        action=codec.spec,
        chunk=settings.chunk,
        cameras=settings.num_images,
        state_dims=state.width if state else 0,
        value_width=width,
        trained_on=tuple(sorted(read_statistics(folder))),
    )


def recognises(folder: Path) -> bool:
    """Whether a folder looks like an OpenVLA checkpoint."""
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("model_type") == "openvla"


def load(
    cfg: OftConfig, *, device: torch.device, needs_value: bool, train: bool = True
) -> OftPolicy:
    """Build the network and fill it from the checkpoint.

    train: False loads for inference only, which also admits checkpoints with an L1 regression head.
    Raises ConfigError, CorruptFile, AssetMissing; RunFailed when attention turns out not to be
    bidirectional.
    """
    folder = store.resolve(cfg.checkpoint)
    l1 = _check_components(folder, train=train)
    config = read_net_config(folder)
    settings = resolve_settings(cfg, folder)
    codec, state_codec, key = _codecs(folder, settings)
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
    _load_heads(net, folder, device=device, dtype=_DTYPES[cfg.dtype])
    net.eval()
    check_bidirectional(net)
    _choose_trained(net, cfg)
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
    )


def _check_components(folder: Path, *, train: bool) -> bool:
    """Whether the checkpoint has an L1 head. Refuses kinds whose action tokens were never
    trained.
    """
    for name, what in (
        ("noisy_action_projector", "a diffusion head"),
        ("vision_backbone", "FiLM layers in the vision towers"),
    ):
        if checkpoint.component(folder, name):
            raise ConfigError(f"{folder} has {what} ({name}--*.pt), which is not supported")
    path = checkpoint.component(folder, _L1)
    if path and train:
        raise ConfigError(
            f"{folder} was trained with an L1 regression head ({path.name}): its action tokens "
            "never learned anything, so there is nothing to sample and no log-probability to "
            "improve. Evaluate it, or train from a checkpoint with discrete action tokens"
        )
    return path is not None


def _load_heads(net: OftNet, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
    """The heads that live in files of their own; fresh ones where there is no file."""
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
        path = checkpoint.component(folder, _PROPRIO)
        if path:
            checkpoint.load_head(projector, checkpoint.read_component(path), path)
        else:
            projector.reset(noise.stream("proprio_projector"))
            log.warning("%s has no %s file; starting with a fresh one", folder, _PROPRIO)
        projector.to(device=device, dtype=dtype)
    if net.l1_head is not None:
        path = checkpoint.component(folder, _L1)
        assert path is not None
        l1_head = net.l1_head.to_empty(device="cpu")
        checkpoint.load_head(l1_head, checkpoint.read_component(path), path)
        l1_head.to(device=device, dtype=dtype)
        log.warning("%s has an L1 head: temperature has no effect", folder)


def _choose_trained(net: OftNet, cfg: OftConfig) -> None:
    """Insert adapters and set requires_grad."""
    if cfg.freeze_vision:
        net.vision_backbone.requires_grad_(False)
    if cfg.lora is None:
        return
    lora = cfg.lora
    targets = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear)
        and name.rsplit(".", 1)[-1] in lora.targets
        and not (cfg.freeze_vision and name.startswith("vision_backbone."))
        and not name.startswith(("value_head.", "proprio_projector.", "l1_head."))
    ]
    unused = set(lora.targets) - {name.rsplit(".", 1)[-1] for name in targets}
    if unused:
        there = {
            n.rsplit(".", 1)[-1]
            for n, m in net.named_modules()
            if isinstance(m, nn.Linear) and not n.startswith("value_head.")
        }
        raise ConfigError(
            f"policy.lora.targets: no linear layer to adapt is called {', '.join(sorted(unused))}; "
            f"there are: {', '.join(sorted(there))}"
        )
    keep = [net.value_head, net.proprio_projector]
    net.requires_grad_(False)
    inject_adapter_in_model(
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # ty: ignore[invalid-argument-type] floats work as well
            lora_dropout=lora.dropout,
            target_modules=targets,
        ),
        net,
    )
    _draw_adapters(net, lora.rank)
    for head in keep:
        if head is not None:
            head.requires_grad_(True)
    net.eval()


def _draw_adapters(net: OftNet, rank: int) -> None:
    """A ~ N(0, 1 / rank^2) as peft's "gaussian", but from a seed of our own; B stays 0."""
    generator = torch.Generator().manual_seed(noise.stream("lora"))
    with torch.no_grad():
        for name, param in net.named_parameters():
            if ".lora_A." in name:
                param.copy_(torch.randn(param.shape, generator=generator) / rank)
