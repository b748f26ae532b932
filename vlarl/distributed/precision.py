"""The number type of forwards. Apart from `shard`, whose imports take seconds."""

from __future__ import annotations

import contextlib

import torch

from vlarl.config.schema import ComputeSection
from vlarl.distributed.world import World


def autocast(world: World, compute: ComputeSection) -> contextlib.AbstractContextManager[object]:
    """The compute dtype of forwards: fsdp2 casts by itself, replicas go through torch.autocast."""
    if compute.shard == "none" and compute.param_dtype == "bf16":
        return torch.autocast(world.device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
