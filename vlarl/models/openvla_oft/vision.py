"""The two vision towers and the projector, with the parameter names of the released checkpoints.

Source: moojink/openvla-oft@213c5ff prismatic/extern/hf/modeling_prismatic.py. Features are what the
last but one block returns, without final norm and prefix tokens; blocks and heads behind that point
are never built (`layout.dead_tensors`).
"""

from __future__ import annotations

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vlarl.models.openvla_oft.config import PATCH, TowerSize


class LayerScale(nn.Module):
    """Per-channel factor. timm calls the parameter `gamma`; checkpoints say `scale_factor`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last axis."""
        return x * self.scale_factor


def build_tower(size: TowerSize, image_size: int) -> VisionTransformer:
    """The live part of a tower: [n, 3, s, s] -> [n, prefix + patches, dim]."""
    tower = VisionTransformer(
        img_size=image_size,
        patch_size=PATCH,
        embed_dim=size.dim,
        depth=size.depth - 1,
        num_heads=size.heads,
        # timm truncates dim * ratio; the half keeps rounding errors from losing a unit.
        mlp_ratio=(size.mlp + 0.5) / size.dim,
        class_token=size.cls_token,
        reg_tokens=size.registers,
        no_embed_class=True,
        global_pool="",
        num_classes=0,
        final_norm=False,
    )
    if size.layer_scale:
        for block in tower.blocks:
            assert isinstance(block, Block)
            block.add_module("ls1", LayerScale(size.dim))
            block.add_module("ls2", LayerScale(size.dim))
    return tower


class VisionBackbone(nn.Module):
    """Both towers on every image.

    pixels: [n, 6k, s, s], per image 3 channels for the first tower, then 3 for the second. Returns
    [n, k * P, dim1 + dim2], images one after another.
    """

    def __init__(self, towers: tuple[TowerSize, TowerSize], image_size: int) -> None:
        super().__init__()
        self.featurizer = build_tower(towers[0], image_size)
        self.fused_featurizer = build_tower(towers[1], image_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of all patches of all images."""
        n, channels, height, width = pixels.shape
        images = pixels.reshape(n * channels // 6, 6, height, width)
        features = torch.cat(
            [
                tower(part)[:, tower.num_prefix_tokens :]
                for tower, part in (
                    (self.featurizer, images[:, :3]),
                    (self.fused_featurizer, images[:, 3:]),
                )
            ],
            dim=-1,
        )
        return features.reshape(n, -1, features.shape[-1])


class Projector(nn.Module):
    """[n, P, D_vision] -> [n, P, D]: three layers with exact GELU between, the first four times as
    wide as its input.
    """

    def __init__(self, vision_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_size, 4 * vision_size)
        self.fc2 = nn.Linear(4 * vision_size, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """Visual tokens for the language model."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))
