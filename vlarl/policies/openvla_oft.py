"""The OpenVLA-OFT plug-in: discrete action tokens, all of a chunk from one forward pass.

Config, spec and checks. What needs the network's libraries is in `oft_load` and `oft_policy`: they
take seconds to import, and whoever only asks for a section or a spec does not wait for them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from vlarl.assets import store
from vlarl.config.schema import Bool, Float, Int, PolicySection, Section
from vlarl.errors import AssetMissing, ConfigError
from vlarl.models.openvla_oft import checkpoint
from vlarl.models.openvla_oft.action_tokens import FORMATS, ActionCodec, StateCodec, model_width
from vlarl.models.openvla_oft.config import (
    RELEASED,
    ActionFormat,
    Chunk,
    Jpeg,
    NetConfig,
    Normalisation,
    Resize,
    Settings,
    Views,
    download,
    read_json,
    read_net_config,
    read_settings,
)
from vlarl.models.openvla_oft.footprint import Use
from vlarl.models.openvla_oft.footprint import footprint as network_footprint
from vlarl.models.openvla_oft.layout import l1_tensors, proprio_tensors
from vlarl.models.openvla_oft.processing import Prompts, read_normalisation
from vlarl.models.openvla_oft.statistics import FILE, laid_out, read_statistics, resolve_key
from vlarl.models.value_head import ValueHead
from vlarl.specs import ActionSpec, Footprint, PolicySpec

if TYPE_CHECKING:
    from vlarl.policies.oft_policy import OftPolicy

log = logging.getLogger(__name__)

_COMPAT: Mapping[str, Mapping[str, Any]] = {
    "oft": {"resize": "lanczos", "centre_crop": True, "jpeg": "pil", "stop_token": True},
    "rlinf": {"resize": "bicubic", "centre_crop": False, "jpeg": "off", "stop_token": False},
}
L1 = "action_head"
"""Component file of an L1 regression head."""
PROPRIO = "proprio_projector"
"""Component file of the state projector."""


class LoraSection(Section):
    """Low-rank adapters (peft). Everything else but the value head is frozen; `save` merges
    them.
    """

    rank: Annotated[Int, Field(ge=1)] = 32
    """Rank of the adapters."""
    alpha: Annotated[Float, Field(gt=0)] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
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
    chunk: Chunk | None = None
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
    num_images: Views | None = None
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


def resolve_settings(cfg: OftConfig, folder: Path | None) -> Settings:
    """A field that is set wins, then `compat`, then what the checkpoint says, then the published
    recipe. folder: None when the checkpoint is not here.
    """
    explicit = {
        name: getattr(cfg, name) for name in asdict(Settings()) if getattr(cfg, name) is not None
    }
    compat = _COMPAT[cfg.compat] if cfg.compat else {}
    stored = {} if folder is None else read_settings(folder)
    return Settings(**{**stored, **compat, **explicit})


def codecs(folder: Path, settings: Settings) -> tuple[ActionCodec, StateCodec | None, str]:
    """What the statistics say about actions and states, and whose they are."""
    with laid_out(folder / FILE):
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
    codec, state, key = codecs(folder, settings)
    is_l1 = checkpoint.component(folder, L1) is not None
    return PolicySpec(
        name=cfg.name,
        action=codec.spec,
        chunk=settings.chunk,
        cameras=settings.num_images,
        state_dims=state.width if state else 0,
        value_width=_value_width(cfg, settings) if needs_value else 0,
        head="l1" if is_l1 else "tokens",
        samples=not is_l1,
        trained_on=tuple(sorted(read_statistics(folder))),
        dataset="" if cfg.unnorm_key else key,
        dataset_is_known=read_settings(folder).get("unnorm_key") is None,
    )


def _value_width(cfg: OftConfig, settings: Settings) -> int:
    return 1 if cfg.value == "chunk" else settings.chunk


def declared(cfg: OftConfig, *, needs_value: bool, action: ActionSpec) -> PolicySpec:
    """What the config alone says, for a checkpoint that is not on this machine.

    action: taken for granted where `action_format` is not set. What only the checkpoint knows, the
    width of the state, is left out.
    """
    settings = resolve_settings(cfg, None)
    return PolicySpec(
        name=cfg.name,
        action=FORMATS[settings.action_format] if settings.action_format else action,
        chunk=settings.chunk,
        cameras=settings.num_images,
        state_dims=0,
        value_width=_value_width(cfg, settings) if needs_value else 0,
        head="tokens",
        trained_on=(cfg.unnorm_key,) if cfg.unnorm_key else (),
    )


def footprint(cfg: OftConfig, spec: PolicySpec, *, compute: int) -> Footprint:
    """What the network takes; the sizes of the released 7B when the checkpoint is not here.

    compute: bytes of a number in forwards.
    """
    folder: Path | None = None
    config: NetConfig = RELEASED
    with contextlib.suppress(AssetMissing):
        folder = store.resolve(cfg.checkpoint)
        config = read_net_config(folder)
    settings = resolve_settings(cfg, folder)
    width = model_width(settings.action_format) if settings.action_format else spec.action.dims
    use = Use(
        num_slots=settings.chunk * width,
        num_images=spec.cameras,
        state_dims=spec.state_dims,
        value_width=spec.value_width,
        stop_token=settings.stop_token,
        held=4 if cfg.dtype == "fp32" else 2,
        compute=compute,
        freeze_vision=cfg.freeze_vision,
        lora_rank=cfg.lora.rank if cfg.lora else 0,
        targets=cfg.lora.targets if cfg.lora else (),
    )
    found = network_footprint(config, use)
    assumed = () if folder else ("the network of the released 7B checkpoints",)
    return replace(found, assumes=(*assumed, *found.assumes))


def recognises(folder: Path) -> bool:
    """Whether a folder looks like an OpenVLA checkpoint."""
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("model_type") == "openvla"


def check(cfg: OftConfig, *, needs_value: bool, train: bool = True) -> None:
    """Find what `load` would refuse, without building the network: by small files and headers.

    Raises as `load` does.
    """
    folder = store.resolve(cfg.checkpoint)
    has_l1_head(folder, train=train)
    config = read_net_config(folder)
    checkpoint.check_weights(config, folder)
    settings = resolve_settings(cfg, folder)
    declares = spec(cfg, needs_value=needs_value)
    _check_components(folder, settings, config, declares.state_dims, train=train)
    Prompts.from_folder(folder)
    read_normalisation(folder, config.image_size)
    path = folder / checkpoint.VALUE_HEAD
    if needs_value and path.exists():
        with torch.device("meta"):
            head = ValueHead(config.hidden_size, declares.value_width)
        stored = checkpoint.header(path)
        got = {name.removeprefix("value_head."): shape for name, shape in stored.items()}
        checkpoint.check_head(checkpoint.shapes_of(head.state_dict()), got, path)
    for doubt in _doubts(folder, settings):
        log.warning("%s", doubt)


def _check_components(
    folder: Path, settings: Settings, net: NetConfig, state_dims: int, *, train: bool
) -> None:
    """The heads in torch files of their own, by names and shapes."""
    wanted = []
    proprio = proprio_file(folder, settings, train=train)
    if proprio is not None:
        wanted.append((proprio, proprio_tensors(state_dims, net.hidden_size)))
    l1 = checkpoint.component(folder, L1)
    if l1 is not None:
        codec, _, _ = codecs(folder, settings)
        wanted.append((l1, l1_tensors(codec.width, net.hidden_size)))
    for path, shapes in wanted:
        checkpoint.check_head(shapes, checkpoint.shapes_of(checkpoint.read_component(path)), path)


def _doubts(folder: Path, settings: Settings) -> list[str]:
    """Settings with which the network runs but was not trained, as sentences."""
    found = []
    trained = read_settings(folder).get("chunk", settings.chunk)
    if settings.chunk != trained:
        found.append(
            f"policy.chunk is {settings.chunk}, but {folder} was trained with {trained}: it never "
            f"learned to act in chunks of {settings.chunk}"
        )
    unused = None if settings.use_proprio else checkpoint.component(folder, PROPRIO)
    if unused is not None:
        found.append(
            f"{folder} has a state projector, {unused.name}, and policy.use_proprio is false: it "
            "acts without the state; to feed it, set policy.use_proprio=true"
        )
    return found


def load(
    cfg: OftConfig, *, device: torch.device, needs_value: bool, train: bool = True
) -> OftPolicy:
    """Build the network and fill it from the checkpoint.

    train: False loads for inference only, which also admits checkpoints with an L1 regression head.
    Raises ConfigError, CorruptFile, AssetMissing; RunFailed when attention turns out not to be
    bidirectional.
    """
    loader = importlib.import_module("vlarl.policies.oft_load")
    return loader.load(cfg, device=device, needs_value=needs_value, train=train)


def proprio_file(folder: Path, settings: Settings, *, train: bool) -> Path | None:
    """The file of the state projector; None without one, and when training starts a fresh one.

    AssetMissing when there is none to evaluate with.
    """
    path = checkpoint.component(folder, PROPRIO) if settings.use_proprio else None
    if settings.use_proprio and path is None and not train:
        raise AssetMissing(
            f"{folder} has no {PROPRIO}--*.pt, and policy.use_proprio wants one; without it the "
            "policy would act on random numbers",
            fix=download(folder),
        )
    return path


def has_l1_head(folder: Path, *, train: bool) -> bool:
    """Whether the checkpoint has an L1 head. Refuses kinds whose action tokens were never
    trained.
    """
    for name, what in (
        ("noisy_action_projector", "a diffusion head"),
        ("vision_backbone", "FiLM layers in the vision towers"),
    ):
        if checkpoint.component(folder, name):
            raise ConfigError(f"{folder} has {what} ({name}--*.pt), which is not supported")
    path = checkpoint.component(folder, L1)
    if path and train:
        raise ConfigError(
            f"{folder} was trained with an L1 regression head ({path.name}): its action tokens "
            "never learned anything, so there is nothing to sample and no log-probability to "
            "improve. Evaluate it, or train from a checkpoint with discrete action tokens"
        )
    return path is not None
