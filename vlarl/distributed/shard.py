"""How the policy is spread over ranks, and everything whose result must not depend on it.

Losses are additive with weights that are normalised over the *global* rollout: the loss of the run
is the sum of the ranks' losses. So gradients are summed over ranks, never averaged:
- none: every rank holds a replica; `reduce_gradients` adds the gradients once per optimizer step.
- fsdp2: parameters, gradients and optimizer state are sharded; the backward pass reduces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute

from vlarl.config.schema import ComputeSection
from vlarl.distributed.world import World

_BUCKET_BYTES = 64 * 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(
    module: nn.Module, units: Sequence[type[nn.Module]], world: World, compute: ComputeSection
) -> None:
    """Spread `module` over the ranks as `compute.shard` says, in place, with rank 0's weights.

    units: classes whose instances are sharded and recomputed one by one (Policy.shard_units); what
    is left of the module is one more unit, the root. Call before the optimizer is made: under fsdp2
    the parameters are replaced. Afterwards the module must be entered through its `forward`, or
    inside `full_weights`; calling a part of the root that is no unit finds sharded parameters.
    """
    module.to(world.device)
    _share_weights(module, world)
    parts = [part for part in module.modules() if isinstance(part, tuple(units))]
    if compute.activation_checkpointing:
        for part in parts:
            part.forward = functools.partial(recompute, part.forward, use_reentrant=False)
    if compute.shard == "none":
        return
    mesh = init_device_mesh(world.device.type, (world.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES[compute.param_dtype], reduce_dtype=torch.float32
    )
    # Children first: a unit inside a unit must be wrapped before the one around it.
    for part in [*reversed(parts), module]:
        if not isinstance(part, FSDPModule):
            fully_shard(
                part, mesh=mesh, mp_policy=precision, reshard_after_forward=part is not module
            )
    for part in _sharded_parts(module):
        # FSDP averages gradients over ranks; our weights are already global, so it has to sum. The
        # second switch keeps it to plain SUM reductions, the only ones that gloo knows.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def _sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _share_weights(module: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if world.size == 1:
        return
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    for bucket in _buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.broadcast(flat, src=0)
        _scatter(flat, bucket)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype and device, about 64 MiB each: few messages, bounded memory."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def reduce_gradients(params: Sequence[nn.Parameter], world: World) -> None:
    """Add the ranks' gradients, in place; call once after the last backward of an optimizer step.

    params: the same parameters in the same order on every rank. A parameter that got a gradient on
    some ranks only counts as zero on the others; one that got none anywhere keeps None, so that the
    optimizer leaves it and its moments alone. Does nothing on one rank and for sharded parameters,
    which the backward pass has reduced already.
    """
    plain = [p for p in params if not isinstance(p, DTensor)]
    if world.size == 1 or not plain:
        return
    here = torch.tensor([p.grad is not None for p in plain], dtype=torch.int32, device=world.device)
    anywhere = world.all_max(here).tolist()
    grads = []
    for param, needed in zip(plain, anywhere, strict=True):
        if needed:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat)
        _scatter(flat, bucket)


def clip_grad_norm(params: Sequence[nn.Parameter], max_norm: float, world: World) -> Tensor:
    """Scale the gradients so that their global L2 norm is at most max_norm; the norm before that.

    Call after `reduce_gradients`. Returns a float32 scalar on the policy's device, identical on all
    ranks. A NaN or infinite norm is returned as it is and the gradients are then unusable: do not
    step. All ranks must call it: sharded gradients are summed over ranks.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.zeros((), device=world.device)
    plain = [g for g in grads if not isinstance(g, DTensor)]
    sharded = [g.to_local() for g in grads if isinstance(g, DTensor)]
    square = torch.zeros((), device=world.device)
    if sharded:
        square = square + world.all_sum(nn.utils.get_total_norm(sharded).float().square())
    if plain:
        square = square + nn.utils.get_total_norm(plain).float().square()
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


@contextlib.contextmanager
def full_weights(module: nn.Module) -> Generator[None]:
    """Inside, every rank holds all weights and forwards need no communication.

    For rollouts: ranks play different numbers of decisions, so a forward must not wait for peers.
    All ranks must enter and leave together; inside they are free. For forwards without gradient.
    Costs the memory of the full weights in the compute dtype. Nothing happens without fsdp2.
    """
    parts = _sharded_parts(module)
    for part in parts:
        part.reshard()  # what is still unsharded could be older than the last optimizer step
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not module, recurse=False)


def full_state_dict(module: nn.Module, world: World) -> dict[str, Tensor]:
    """module.state_dict() as if it were not sharded, on the CPU of rank 0; empty on other ranks.

    All ranks must call it. Other ranks hold one full tensor at a time.
    """
    state: Mapping[str, Tensor] = module.state_dict()
    full = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            full[name] = whole.detach().cpu()
    return full
