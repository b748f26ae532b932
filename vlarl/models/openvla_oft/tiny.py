"""Fresh, randomly initialised checkpoints of the real classes and the released layout, small enough
for a CPU.

Differences from a released checkpoint are sizes only: tower sizes are in `vlarl.towers` of
config.json, the vocabulary is a BPE trained on the given prompts. The rule for action tokens is the
released one: the last 256 ids before padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from vlarl.models.openvla_oft.action_tokens import choose_format
from vlarl.models.openvla_oft.checkpoint import write_folder, write_json, write_sharded
from vlarl.models.openvla_oft.config import (
    NUM_BINS,
    Settings,
    TowerSize,
    read_net_config,
    with_settings,
)
from vlarl.models.openvla_oft.layout import stored_tensors
from vlarl.models.openvla_oft.processing import BOS, EOS, SPACE, TEMPLATE

TOWER_IDS = ("vlarl_tiny_dinov2", "vlarl_tiny_siglip")
_PAD_ROWS = 8
# bfloat16-rounded, as in the released checkpoints.
_MEAN = ([0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5])
_STD = ([0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5])


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny network; the defaults make about 1 M parameters.

    vision_depth counts the run blocks. max_vocab: upper bound of the text vocabulary.
    """

    hidden: int = 128
    mlp: int = 256
    layers: int = 3
    heads: int = 4
    vision_dim: int = 64
    vision_depth: int = 2
    vision_heads: int = 4
    vision_mlp: int = 192
    max_vocab: int = 768


def train_tokenizer(instructions: Sequence[str], max_vocab: int) -> Tokenizer:
    """A Llama-style BPE on the prompts of these instructions: the template is two tokens, a known
    word is one.

    Any printable ASCII text can be encoded; other characters become <unk>.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    head, tail = (part.replace(" ", SPACE) for part in TEMPLATE.split(" {}"))
    pieces = Regex(f"^{SPACE}{head}|\\?\n{tail.removeprefix('?').strip()}|{SPACE}[^{SPACE}?]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    alphabet = [chr(c) for c in range(32, 127)] + ["\n", SPACE]
    trainer = BpeTrainer(
        vocab_size=max_vocab,
        min_frequency=1,
        special_tokens=["<unk>", BOS, EOS],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEMPLATE.format(t.lower()) for t in instructions], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def init_tiny(
    folder: Path,
    *,
    prompts: Sequence[str],
    statistics: Mapping[str, Any],
    key: str,
    action_dims: int,
    chunk: int = 8,
    image_size: int = 56,
    seed: int = 0,
    sizes: TinySizes | None = None,
    settings: Settings | None = None,
    max_shard_bytes: int = 2_000_000,
) -> None:
    """Write a fresh checkpoint into a folder that must not exist.

    prompts: the instructions, without template. statistics: {"action": {...}, "proprio": {...}} of
    the data set `key`. settings: fields of Settings other than chunk, unnorm_key and action_format;
    JPEG is off unless asked for.
    """
    sizes = sizes or TinySizes()
    used = replace(
        settings or Settings(jpeg="off", centre_crop=False),
        chunk=chunk,
        unnorm_key=key,
        action_format=choose_format(action_dims, None),
    )
    assert len(statistics["action"]["q01"]) == action_dims, (key, action_dims)
    tokenizer = train_tokenizer(prompts, sizes.max_vocab)
    norm_stats = {key: dict(statistics)}
    config = with_settings(
        _config(sizes, image_size=image_size, num_text=tokenizer.get_vocab_size()), used
    )

    def fill(path: Path) -> None:
        write_json(path / "config.json", {**config, "norm_stats": norm_stats})
        write_json(path / "dataset_statistics.json", norm_stats)
        write_json(path / "preprocessor_config.json", _preprocessor(image_size))
        tokenizer.save(str(path / "tokenizer.json"))
        write_json(path / "tokenizer_config.json", _tokenizer_config())
        tensors = random_weights(path, seed=seed)
        write_sharded(tensors, path, max_shard_bytes=max_shard_bytes)

    write_folder(folder, fill)


def random_weights(folder: Path, *, seed: int) -> dict[str, Tensor]:
    """All tensors of the layout described by `folder`'s config.json, dead ones included; a function
    of seed alone.

    Matrices are N(0, 1 / fan_in); those that write into a residual stream are divided by sqrt(2 *
    depth).
    """
    config = read_net_config(folder)
    shapes = stored_tensors(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(name, shapes[name], config.num_layers, generator) for name in sorted(shapes)
    }


def _draw(name: str, shape: tuple[int, ...], depth: int, generator: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "bias":
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    if leaf in ("cls_token", "reg_token", "pos_embed", "latent"):
        return 0.02 * noise
    if "embed_tokens" in name:
        return noise / math.sqrt(shape[1])
    scale = 1 / math.sqrt(math.prod(shape[1:]))
    if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.fc2.weight")):
        scale /= math.sqrt(2 * depth)
    return scale * noise


def _config(sizes: TinySizes, *, image_size: int, num_text: int) -> dict[str, Any]:
    """config.json without statistics and settings."""
    common = {
        "dim": sizes.vision_dim,
        "depth": sizes.vision_depth + 1,
        "heads": sizes.vision_heads,
        "mlp": sizes.vision_mlp,
    }
    towers = (
        TowerSize(**common, cls_token=True, registers=4, layer_scale=True, attn_pool=False),
        TowerSize(**common, cls_token=False, registers=0, layer_scale=False, attn_pool=True),
    )
    pad_id = num_text + NUM_BINS
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [image_size, image_size],
        "timm_model_ids": list(TOWER_IDS),
        "timm_override_act_layers": [None, None],
        "use_fused_vision_backbone": True,
        "n_action_bins": NUM_BINS,
        "pad_token_id": pad_id,
        "pad_to_multiple_of": _PAD_ROWS,
        "torch_dtype": "float32",
        "text_config": {
            "model_type": "llama",
            "vocab_size": pad_id + _PAD_ROWS,
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.mlp,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "pad_token_id": pad_id,
        },
        "vlarl": {"towers": dict(zip(TOWER_IDS, map(asdict, towers), strict=True))},
    }


def _preprocessor(image_size: int) -> dict[str, Any]:
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": True,
        "input_sizes": [[3, image_size, image_size]] * 2,
        "interpolations": ["bicubic", "bicubic"],
        "means": list(_MEAN),
        "stds": list(_STD),
        "tvf_do_letterbox": False,
        "tvf_normalize_params": [
            {"inplace": False, "mean": mean, "std": std}
            for mean, std in zip(_MEAN, _STD, strict=True)
        ],
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "padding_side": "right",
    }
