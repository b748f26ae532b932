"""Low-rank adapters in an OpenVLA-OFT network. Imported only where they are asked for: peft is slow
to import.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from vlarl import noise
from vlarl.errors import ConfigError
from vlarl.models.openvla_oft.net import OftNet
from vlarl.policies.openvla_oft import OftConfig


def add_adapters(net: OftNet, cfg: OftConfig) -> None:
    """Insert the adapters of `cfg.lora`, and train nothing but them and the heads."""
    lora = cfg.lora
    assert lora is not None
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
