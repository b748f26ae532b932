"""The ranks of a run and what they tell each other.

Built once, in the worker, from the environment variables that torchrun sets; passed down from
there. Nothing else reads RANK, LOCAL_RANK or WORLD_SIZE. Every method that communicates must be
called by all ranks the same number of times in the same order; on one rank all of them are local.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vlarl.config.schema import ComputeSection
from vlarl.errors import ConfigError, DeviceMissing

log = logging.getLogger(__name__)

# Ranks wait for each other at the end of a rollout, and episodes differ in length.
_TIMEOUT = timedelta(minutes=60)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among its peers.

    rank, size: over all hosts. local_rank: on this host. device: where the policy lives.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files."""
        return self.rank == 0

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum over ranks: a new tensor of x's shape, dtype and device, identical everywhere."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def all_max(self, x: Tensor) -> Tensor:
        """The largest value over ranks, element by element; otherwise like `all_sum`."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        assert x.dtype != torch.bool, "reduce counts, not flags"
        result = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(result, op=op)
        return result

    def gather_object(self, thing: _T) -> list[_T] | None:
        """The things of all ranks in rank order on rank 0, None elsewhere. Travels by pickle."""
        if self.size == 1:
            return [thing]
        things: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(thing, things)
        return things

    def all_gather_object(self, thing: _T) -> list[_T]:
        """The things of all ranks in rank order, on every rank. Travels by pickle."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def broadcast_object(self, thing: _T) -> _T:
        """Rank 0's thing, on every rank. What the others pass is ignored."""
        if self.size == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Return once all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()


def init_world(compute: ComputeSection, environ: Mapping[str, str] | None = None) -> World:
    """Join the peers that torchrun started, or be alone, without a process group, when it did not.

    environ: instead of os.environ. Sets the number of torch threads of this process and the current
    CUDA device. Raises DeviceMissing when `compute.device` asks for a GPU that is not there, and
    ConfigError when the environment is only half set.
    """
    environ = os.environ if environ is None else environ
    rank, local_rank, size, local_size = _ranks(environ)
    device = _device(compute, local_rank)
    _set_threads(compute, local_size)
    if size > 1:
        # Objects and CPU tensors go through gloo, GPU tensors through nccl.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
        log.info("rank %d of %d over %s", rank, size, backend)
    elif compute.shard == "fsdp2":
        # A mesh of one: fsdp2 needs a group even when there is nobody to share with.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return World(rank=rank, local_rank=local_rank, size=size, device=device)


def _ranks(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if not any(name in environ for name in names[:3]):
        return 0, 0, 1, 1
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set although {', '.join(n for n in names if n in environ)} "
            "is; start the worker with torchrun, or plainly, without any of them"
        )
    rank, local_rank, size, local_size = (int(environ[name]) for name in names)
    return rank, local_rank, size, local_size


def require_device(compute: ComputeSection) -> None:
    """Raise DeviceMissing when `compute.device` asks for a GPU that this host lacks."""
    if compute.device == "cuda" and torch.cuda.device_count() == 0:
        raise DeviceMissing(
            "compute.device is cuda but torch sees no CUDA device; see why, or set "
            "compute.device=cpu",
            fix="vlarl doctor",
        )


def _device(compute: ComputeSection, local_rank: int) -> torch.device:
    require_device(compute)
    count = torch.cuda.device_count()
    if compute.device == "cpu" or (compute.device == "auto" and count == 0):
        why = "compute.device=cpu" if compute.device == "cpu" else "no CUDA device"
        log.info("device cpu (%s)", why)
        return torch.device("cpu")
    if local_rank >= count:
        raise DeviceMissing(
            f"rank {local_rank} of this host has no GPU of its own: there are {count}",
            fix=f"start with --nproc {count}, or set compute.device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    log.info("device %s, %s", device, torch.cuda.get_device_name(device))
    return device


def _set_threads(compute: ComputeSection, local_size: int) -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = compute.threads or max(1, cores // local_size)
    torch.set_num_threads(threads)
    why = "compute.threads" if compute.threads else f"{cores} cores for {local_size} ranks"
    log.info("%d torch threads (%s)", threads, why)
