"""What the JSON files of an OpenVLA-OFT checkpoint say: sizes, statistics, and how it was trained.

Layout of the released checkpoints: moojink/openvla-oft@213c5ff prismatic/extern/hf. The JSON is
parsed here, since `AutoConfig` would run code from the checkpoint. Differences: two keys of our own
inside `config.json`, both ignored by other loaders: `vlarl.towers` (sizes of vision towers that
timm does not know) and `vlarl.settings` (`Settings`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from typing_extensions import Self

from vlarl.config.explain import explain
from vlarl.config.schema import Bool, Int
from vlarl.errors import AssetMissing, ConfigError, CorruptFile

PATCH = 14
NUM_BINS = 256

Resize = Literal["lanczos", "bicubic"]
Jpeg = Literal["off", "pil"]
Normalisation = Literal["q99", "bounds"]
ActionFormat = Literal["delta_xyz", "delta_xyz_axisangle", "metaworld_7d"]

Width = Annotated[Int, Field(ge=1, le=2**17)]
Count = Annotated[Int, Field(ge=1, le=1024)]
Chunk = Annotated[Int, Field(ge=1, le=1000)]
Views = Annotated[Int, Field(ge=1, le=64)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
# The upper bounds are ones no network comes near: a slip in a file must not ask for a terabyte.


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Sizes of one vision transformer as stored, dead parts included.

    depth: stored blocks; only the first depth - 1 are run. mlp: hidden width of the block MLPs.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    dim: Width
    depth: Annotated[Count, Field(ge=2)]
    heads: Count
    mlp: Width
    cls_token: Bool
    registers: Annotated[Int, Field(ge=0, le=64)]
    layer_scale: Bool
    attn_pool: Bool


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

    chunk: Chunk = 8
    resize: Resize = "lanczos"
    centre_crop: Bool = True
    jpeg: Jpeg = "pil"
    stop_token: Bool = True
    rope_bf16: Bool = False
    num_images: Views = 1
    use_proprio: Bool = False
    normalisation: Normalisation = "q99"
    unnorm_key: str | None = None
    action_format: ActionFormat | None = None


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
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as err:
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
    return _net_config(read_json(path), path)


class _TextConfig(BaseModel):
    """A released `text_config` holds only what differs from these. Note rms_norm_eps: not Meta's
    1e-5.
    """

    vocab_size: Annotated[Int, Field(ge=NUM_BINS, le=2**24)] = 32000
    hidden_size: Width = 4096
    intermediate_size: Width = 11008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    rms_norm_eps: Annotated[Positive, Field(lt=1)] = 1e-6
    rope_theta: Positive = 10000.0
    max_position_embeddings: Annotated[Int, Field(ge=1, le=2**20)] = 2048

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        size, heads = self.hidden_size, self.num_attention_heads
        if size % (2 * heads):
            raise ValueError(
                f"hidden_size is {size}, expected an even width for each of the "
                f"num_attention_heads, {heads}"
            )
        if heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {heads}, expected a multiple of "
                f"num_key_value_heads, {self.num_kv_heads}"
            )
        return self


class _Ours(BaseModel):
    """The key `vlarl`."""

    towers: dict[str, TowerSize] = {}
    settings: Settings | None = None


class _ConfigFile(BaseModel):
    """What is read of config.json; the rest is ignored."""

    text_config: _TextConfig = _TextConfig()
    image_sizes: list[Annotated[Int, Field(ge=PATCH, le=4096)]] = [224, 224]
    timm_model_ids: list[str] = list(KNOWN_TOWERS)
    pad_to_multiple_of: Annotated[Int, Field(ge=0)] = 64
    pad_token_id: Annotated[Int, Field(ge=0)] = 32000
    norm_stats: dict[str, Any] | None = None
    vlarl: _Ours = _Ours()

    @model_validator(mode="after")
    def _check(self) -> Self:
        vocabulary = self.text_config.vocab_size
        if vocabulary < self.pad_to_multiple_of + NUM_BINS or vocabulary <= self.pad_token_id:
            raise ValueError(
                f"text_config.vocab_size is {vocabulary}, too few for {NUM_BINS} action tokens, "
                f"pad_to_multiple_of {self.pad_to_multiple_of} and pad_token_id {self.pad_token_id}"
            )
        return self


def _parse(raw: Mapping[str, Any], path: Path) -> _ConfigFile:
    """Raises ConfigError for another architecture, CorruptFile with every value that is wrong."""
    for key, expected in (("model_type", "openvla"), ("use_fused_vision_backbone", True)):
        if raw.get(key, expected) != expected or "model_type" not in raw:
            raise ConfigError(
                f"{path}: {key} is {raw.get(key)!r}, expected {expected!r}; "
                "not an OpenVLA checkpoint with two fused vision towers"
            )
    if raw.get("n_action_bins", NUM_BINS) != NUM_BINS:
        raise ConfigError(f"{path}: n_action_bins is {raw['n_action_bins']}, expected {NUM_BINS}")
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("rope_scaling"):
        raise ConfigError(f"{path}: text_config.rope_scaling is set; only plain RoPE is supported")
    try:
        return _ConfigFile.model_validate(raw)
    except ValidationError as error:
        problems = explain(error, _ConfigFile, raw, {})
        raise CorruptFile(
            f"{path} is not as an OpenVLA-OFT checkpoint has it: {'; '.join(problems)}; restore it "
            f"or download it again: {download(path.parent)}"
        ) from None


def _net_config(raw: Mapping[str, Any], path: Path) -> NetConfig:
    file = _parse(raw, path)
    text = file.text_config
    return NetConfig(
        towers=_towers(file, path),
        image_size=_square(file.image_sizes, path),
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_kv_heads,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=text.rope_theta,
        max_positions=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        first_action_id=text.vocab_size - file.pad_to_multiple_of - NUM_BINS,
        pad_id=file.pad_token_id,
    )


def _square(sizes: list[int], path: Path) -> int:
    """The one image size of both towers."""
    if len(set(sizes)) != 1 or sizes[0] % PATCH:
        raise ConfigError(
            f"{path}: image_sizes is {sizes}, expected equal multiples of {PATCH}, e.g. [224, 224]"
        )
    return sizes[0]


def _towers(file: _ConfigFile, path: Path) -> tuple[TowerSize, TowerSize]:
    known, ids = {**KNOWN_TOWERS, **file.vlarl.towers}, file.timm_model_ids
    if len(ids) != 2 or any(name not in known for name in ids):
        raise ConfigError(
            f"{path}: timm_model_ids is {ids}; expected two of {', '.join(sorted(known))} "
            "(sizes of others go into vlarl.towers)"
        )
    for name in ids:
        if known[name].dim % known[name].heads:
            raise CorruptFile(
                f"{path}: vlarl.towers.{name}: dim is {known[name].dim}, expected a multiple of "
                f"heads, {known[name].heads}"
            )
    return known[ids[0]], known[ids[1]]


RELEASED = _net_config(
    {"model_type": "openvla", "text_config": {"vocab_size": 32064}}, Path("config.json")
)
"""Sizes of the released 7B checkpoints."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings a checkpoint of ours carries; empty for a released one."""
    path = folder / "config.json"
    raw = read_json(path)
    ours = raw.get("vlarl")
    settings = ours.get("settings") if isinstance(ours, dict) else None
    if isinstance(settings, dict):
        unknown = set(settings) - {f.name for f in fields(Settings)}
        if unknown:
            raise ConfigError(
                f"{path}: unknown vlarl.settings {sorted(unknown)}; was it written by a newer "
                "version?"
            )
    _parse(raw, path)
    return dict(settings or {})


def with_settings(raw: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The content of `config.json` with our settings replaced."""
    return {**raw, "vlarl": {**raw.get("vlarl", {}), "settings": asdict(settings)}}
