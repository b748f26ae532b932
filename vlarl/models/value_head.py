"""The critic: an MLP on one hidden state.

Source: RLinf@a3816b5 rlinf/models/embodiment/modules/value_head.py. Same layers and names.
Differences: every Linear starts from N(0, 0.02) with zero bias, which is what the reference ends up
with (its own initialiser never runs), and the head stays in float32 whatever the backbone uses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def reset_linear(module: nn.Module, seed: int) -> None:
    """N(0, 0.02) weights and zero biases, a function of the seed alone, so all ranks start
    alike.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name.endswith("bias"):
                param.zero_()
            else:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.02)


class ValueHead(nn.Module):
    """[n, D] -> [n, V] float32. D -> 512 -> 128 -> V, exact GELU, no bias on the last layer."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 512),
            nn.GELU(),
            nn.Linear(512, 128),
            nn.GELU(),
            nn.Linear(128, width, bias=False),
        )

    def reset(self, seed: int) -> None:
        """Fresh weights.

        The last layer is small but not zero: at zero no gradient would reach the layers below in
        the first step.
        """
        reset_linear(self, seed)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of hidden states of any float type."""
        # Mixed precision may hand the weights in bfloat16; otherwise they are float32 and autocast
        # must not lower them.
        with torch.autocast(hidden.device.type, enabled=False):
            weight = next(self.mlp.parameters())
            return self.mlp(hidden.to(weight.dtype)).float()
