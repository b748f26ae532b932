"""What the JSON files of an OpenVLA-OFT checkpoint say: sizes, statistics, and how it was trained.

Layout of the released checkpoints: moojink/openvla-oft@213c5ff prismatic/extern/hf. The JSON is
parsed here, since `AutoConfig` would run code from the checkpoint. Differences: two keys of our own
inside `config.json`, both ignored by other loaders: `vlarl.towers` (sizes of vision towers that
timm does not know) and `vlarl.settings` (`Settings`).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vlarl.errors import AssetMissing, ConfigError, CorruptFile

PATCH = 14
NUM_BINS = 256

Resize = Literal["lanczos", "bicubic"]
Jpeg = Literal["off", "pil"]
Normalisation = Literal["q99", "bounds"]
ActionFormat = Literal["delta_xyz", "delta_xyz_axisangle", "metaworld_7d"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Sizes of one vision transformer as stored, dead parts included.

    depth: stored blocks; only the first depth - 1 are run. mlp: hidden width of the block MLPs.
    """

    dim: int
    depth: int
    heads: int
    mlp: int
    cls_token: bool
    registers: int
    layer_scale: bool
    attn_pool: bool


KNOWN_TOWERS: Mapping[str, TowerSize] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerSize(
        dim=1024,
        depth=24,
        heads=16,
        mlp=4096,
        cls_token=True,
        registers=4,
        layer_scale=True,
        attn_pool=False,
    ),
    "vit_so400m_patch14_siglip_224": TowerSize(
        dim=1152,
        depth=27,
        heads=16,
        mlp=4304,
        cls_token=False,
        registers=0,
        layer_scale=False,
        attn_pool=True,
    ),
}

# A released `text_config` holds only what differs from these. Note rms_norm_eps: not Meta's 1e-5.
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetConfig:
    """Sizes of the whole network.

    towers: DINOv2-like, SigLIP-like. image_size: pixels, a multiple of 14. first_action_id:
    vocabulary id of the first of the 256 action tokens, which are the last ids before the padding
    rows of the embedding table.
    """

    towers: tuple[TowerSize, TowerSize]
    image_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    vocab_size: int
    first_action_id: int
    pad_id: int

    @property
    def num_patches(self) -> int:
        """Patch tokens per image."""
        return (self.image_size // PATCH) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a checkpoint was trained, hence how it has to be run. Defaults are those of the published
    SFT checkpoints.

    unnorm_key: data set whose statistics to use; None = the only one. action_format: None = by
    action width.
    """

    chunk: int = 8
    resize: Resize = "lanczos"
    centre_crop: bool = True
    jpeg: Jpeg = "pil"
    stop_token: bool = True
    rope_bf16: bool = False
    num_images: int = 1
    use_proprio: bool = False
    normalisation: Normalisation = "q99"
    unnorm_key: str | None = None
    action_format: ActionFormat | None = None


@contextmanager
def laid_out(path: Path) -> Generator[None]:
    """Inside, values of a JSON file of the wrong kind end in CorruptFile."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptFile(
            f"{path} is not as an OpenVLA-OFT checkpoint has it ({type(error).__name__}: {error}); "
            "download it again"
        ) from error


def download(folder: Path) -> str:
    """The command that gets a checkpoint's files."""
    return f"hf download OWNER/{folder.resolve().name} --local-dir {folder}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises AssetMissing when there is no such file, CorruptFile when it does not hold a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AssetMissing(
            f"no '{path.name}' in {path.parent}; an OpenVLA-OFT checkpoint has one",
            fix=download(path.parent),
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise CorruptFile(f"{path} is not valid JSON ({err}); download it again") from None
    if not isinstance(data, dict):
        raise CorruptFile(f"{path} holds a {type(data).__name__}, expected a JSON object")
    return data


def read_net_config(folder: Path) -> NetConfig:
    """Sizes from `config.json`, with the fallbacks the released checkpoints rely on.

    Raises ConfigError when the file describes another architecture, CorruptFile when it makes no
    sense.
    """
    path = folder / "config.json"
    with laid_out(path):
        return _net_config(read_json(path), path)


def _net_config(raw: Mapping[str, Any], path: Path) -> NetConfig:
    for key, expected in (("model_type", "openvla"), ("use_fused_vision_backbone", True)):
        if raw.get(key, expected) != expected or "model_type" not in raw:
            raise ConfigError(
                f"{path}: {key} is {raw.get(key)!r}, expected {expected!r}; "
                "not an OpenVLA checkpoint with two fused vision towers"
            )
    if raw.get("n_action_bins", NUM_BINS) != NUM_BINS:
        raise ConfigError(f"{path}: n_action_bins is {raw['n_action_bins']}, expected {NUM_BINS}")
    text = {**_LLAMA_DEFAULTS, **raw.get("text_config", {})}
    if text.get("rope_scaling"):
        raise ConfigError(f"{path}: text_config.rope_scaling is set; only plain RoPE is supported")
    vocab_size = int(text["vocab_size"])
    image_size = _square(raw.get("image_sizes", [224, 224]), path)
    towers = _towers(raw, path)
    return NetConfig(
        towers=towers,
        image_size=image_size,
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"] or text["num_attention_heads"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_theta=text["rope_theta"],
        max_positions=text["max_position_embeddings"],
        vocab_size=vocab_size,
        first_action_id=vocab_size - int(raw.get("pad_to_multiple_of", 64)) - NUM_BINS,
        pad_id=raw.get("pad_token_id", 32000),
    )


def _square(sizes: list[int], path: Path) -> int:
    """The one image size of both towers."""
    if len(set(sizes)) != 1 or sizes[0] % PATCH:
        raise ConfigError(
            f"{path}: image_sizes is {sizes}, expected equal multiples of {PATCH}, e.g. [224, 224]"
        )
    return sizes[0]


def _towers(raw: Mapping[str, Any], path: Path) -> tuple[TowerSize, TowerSize]:
    own = {name: TowerSize(**size) for name, size in raw.get("vlarl", {}).get("towers", {}).items()}
    known = {**KNOWN_TOWERS, **own}
    ids = raw.get("timm_model_ids", list(KNOWN_TOWERS))
    unknown = [name for name in ids if name not in known]
    if unknown or len(ids) != 2:
        raise ConfigError(
            f"{path}: timm_model_ids is {ids}; expected two of {', '.join(sorted(known))} "
            "(sizes of others go into vlarl.towers)"
        )
    return known[ids[0]], known[ids[1]]


RELEASED = _net_config(
    {"model_type": "openvla", "text_config": {"vocab_size": 32064}}, Path("config.json")
)
"""Sizes of the released 7B checkpoints."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings a checkpoint of ours carries; empty for a released one."""
    path = folder / "config.json"
    with laid_out(path):
        settings = dict(read_json(path).get("vlarl", {}).get("settings", {}))
    unknown = set(settings) - {f.name for f in fields(Settings)}
    if unknown:
        raise ConfigError(
            f"{path}: unknown vlarl.settings {sorted(unknown)}; was it written by a newer version?"
        )
    return settings


def with_settings(raw: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The content of `config.json` with our settings replaced."""
    return {**raw, "vlarl": {**raw.get("vlarl", {}), "settings": asdict(settings)}}


def read_statistics(folder: Path) -> dict[str, dict[str, Any]]:
    """Data set -> {"action": {q01, q99, min, max, mask, ...}, "proprio": {...}}.

    `norm_stats` of config.json, updated with dataset_statistics.json when there is one.
    """
    statistics = dict(read_json(folder / "config.json").get("norm_stats") or {})
    path = folder / "dataset_statistics.json"
    if path.exists():
        statistics.update(read_json(path))
    if not statistics:
        raise ConfigError(f"{folder}: no action statistics in config.json or {path.name}")
    return statistics


def resolve_key(statistics: Mapping[str, Any], key: str | None) -> str:
    """The data set to use: `key`, else `key`_no_noops; without a key the only one there is.

    Raises ConfigError listing what is there.
    """
    there = ", ".join(sorted(statistics))
    if key is None:
        if len(statistics) == 1:
            return next(iter(statistics))
        raise ConfigError(
            "policy.unnorm_key: the checkpoint has statistics of several data sets; "
            f"choose one of: {there}"
        )
    for name in (key, f"{key}_no_noops"):
        if name in statistics:
            return name
    raise ConfigError(
        f"policy.unnorm_key: the checkpoint has no statistics of '{key}'; there are: {there}"
    )
