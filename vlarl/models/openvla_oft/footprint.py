"""How much memory the network takes, worked out from its sizes alone. Torch-free.

Counts of parameters are exact. Activations are what PyTorch keeps of a Llama layer, a vision block
and the rest for the backward pass, with fused attention and without what the allocator wastes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vlarl.models.openvla_oft.config import NUM_BINS, NetConfig, TowerSize
from vlarl.models.openvla_oft.layout import (
    ACTION_ROWS,
    LM_HEAD,
    Shapes,
    dead_tensors,
    proprio_tensors,
    stored_tensors,
)
from vlarl.specs import Footprint

PROMPT_TOKENS = 40
"""Assumed length of a prompt, BOS included; LIBERO's have 25 to 45."""
_F32 = 4
_UNIT = re.compile(r"(vision_backbone\.\w+\.blocks|language_model\.model\.layers)\.\d+|value_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a network is built and run.

    num_slots: action tokens of a decision. num_images: views. state_dims: 0 = no state token.
    value_width: 0 = no value head. held, compute: bytes of a number of the weights, and in
    forwards. lora_rank: 0 = no adapters; targets: last names of the layers that get one.
    """

    num_slots: int
    num_images: int
    state_dims: int
    value_width: int
    stop_token: bool
    held: int
    compute: int
    freeze_vision: bool = False
    lora_rank: int = 0
    targets: tuple[str, ...] = ()

    def sequence(self, config: NetConfig) -> int:
        """Tokens of the language model for one decision."""
        visual = self.num_images * config.num_patches + (self.state_dims > 0)
        return PROMPT_TOKENS + visual + self.num_slots + self.stop_token


def footprint(config: NetConfig, use: Use) -> Footprint:
    """What the network takes."""
    body, proprio, head = _body(config), _proprio(config, use), _value_head(config, use)
    adapters = _adapters(body, use)
    sizes = _by_unit(body | proprio | head | adapters)
    root = sizes.pop("", 0)
    trained = proprio if use.lora_rank else _thawed(body, use) | proprio
    small = _F32 * (_count(head) + _count(adapters))
    tokens = use.sequence(config)
    layer = tokens * _llama_layer(config, use.compute)
    blocks = [_blocks(tower, config, use) for tower in config.towers]
    outside = _outside(config, use)
    between = tokens * config.hidden_size * use.compute * config.num_layers
    return Footprint(
        parameters=root + sum(sizes.values()),
        largest=max(sizes.values()),
        root=root,
        weights=use.held * _count(body | proprio) + small,
        trained=use.held * _count(trained) + small,
        kept=outside + between + sum(number * passed for number, passed, _ in blocks),
        inside=max(layer, *(inside for _, _, inside in blocks)),
        everything=outside
        + config.num_layers * layer
        + sum(number * inside for number, _, inside in blocks),
        stored=use.num_slots * (2 + _F32) + _F32 * use.value_width,
        assumes=(f"prompts of {PROMPT_TOKENS} tokens, {tokens} tokens a decision",),
    )


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _by_unit(shapes: Shapes) -> dict[str, int]:
    """Sharding unit -> numbers in it; "" is what lies outside."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        found = _UNIT.match(name)
        unit = found[0] if found else ""
        sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
    return sizes


def _body(config: NetConfig) -> Shapes:
    """What is built of a released checkpoint: live tensors, and 256 rows of the head."""
    dead = {*dead_tensors(config), LM_HEAD}
    shapes = {name: s for name, s in stored_tensors(config).items() if name not in dead}
    return shapes | {ACTION_ROWS: (NUM_BINS, config.hidden_size)}


def _proprio(config: NetConfig, use: Use) -> Shapes:
    if not use.state_dims:
        return {}
    shapes = proprio_tensors(use.state_dims, config.hidden_size)
    return {f"proprio_projector.{name}": shape for name, shape in shapes.items()}


def _value_head(config: NetConfig, use: Use) -> Shapes:
    if not use.value_width:
        return {}
    widths = (config.hidden_size, 512, 128, use.value_width)
    shapes: Shapes = {}
    for i in range(3):
        shapes[f"value_head.mlp.{2 * i}.weight"] = (widths[i + 1], widths[i])
        if i < 2:
            shapes[f"value_head.mlp.{2 * i}.bias"] = (widths[i + 1],)
    return shapes


def _is_vision(name: str) -> bool:
    return name.startswith("vision_backbone.")


def _thawed(body: Shapes, use: Use) -> Shapes:
    return {n: s for n, s in body.items() if not (use.freeze_vision and _is_vision(n))}


def _adapters(body: Shapes, use: Use) -> Shapes:
    """Two thin matrices for each adapted linear layer."""
    shapes: Shapes = {}
    for name, shape in _thawed(body, use).items() if use.lora_rank else ():
        layer, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and len(shape) == 2
        if is_linear and layer.rpartition(".")[2] in use.targets:
            shapes[f"{layer}.lora_A.weight"] = (use.lora_rank, shape[1])
            shapes[f"{layer}.lora_B.weight"] = (shape[0], use.lora_rank)
    return shapes


def _llama_layer(config: NetConfig, compute: int) -> int:
    """Bytes a token keeps in a decoder layer.

    Of each norm its input in float32, its result before and after the scale; rotated queries and
    keys, values, the result of attention; gate, its SiLU, up and their product.
    """
    d, m = config.hidden_size, config.intermediate_size
    kv = d // config.num_heads * config.num_kv_heads
    return 2 * _F32 * d + compute * (6 * d + 2 * kv + 4 * m)


def _blocks(tower: TowerSize, config: NetConfig, use: Use) -> tuple[int, int, int]:
    """Number of run blocks, and bytes a decision keeps in front of and inside of each."""
    tokens = config.num_patches + tower.registers + tower.cls_token
    width = use.num_images * tokens * use.compute
    return tower.depth - 1, width * tower.dim, width * (9 * tower.dim + 2 * tower.mlp)


def _outside(config: NetConfig, use: Use) -> int:
    """Bytes a decision keeps outside of all units: pixels, projector, logits."""
    pixels = use.num_images * 6 * config.image_size**2 * (_F32 + use.compute)
    wide = sum(tower.dim for tower in config.towers)
    patches = use.num_images * config.num_patches
    projector = patches * use.compute * (9 * wide + 3 * config.hidden_size)
    logits = use.num_slots * NUM_BINS * 4 * _F32
    return pixels + projector + logits
