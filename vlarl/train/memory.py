"""About how much memory a rank needs in each phase, before anything is loaded.

Weights, gradients, moments and stored decisions are counted; activations follow from the network's
sizes (`Footprint`). Not in it: what the allocator and CUDA itself take, renderers on the GPU, page
cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vlarl.config.schema import RunConfig
from vlarl.specs import Footprint
from vlarl.train.setup import Parts

Phase = Literal["load", "rollout", "update", "save"]
Place = Literal["gpu", "host"]
PHASES: tuple[Phase, ...] = ("load", "rollout", "update", "save")

PROCESS_BYTES = 2**30
"""Of a rank with torch and the policy's libraries, measured without CUDA: 0.8 GiB."""
COPIES = 3
"""Of what was decided, while an iteration's decisions are put in order: as it came, as one tensor,
and sorted. What was observed is moved batch by batch and exists once."""
_F32 = 4
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that takes memory of a rank in a phase. once: of rank 0 only."""

    phase: Phase
    place: Place
    what: str
    num_bytes: int
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All of a rank's items, and what they rest on, as sentences. rank 0 is meant."""

    items: tuple[Item, ...]
    assumes: tuple[str, ...]

    def total(self, phase: Phase, place: Place) -> int:
        """Bytes in a phase."""
        return sum(i.num_bytes for i in self.items if (i.phase, i.place) == (phase, place))

    def machine(self, ranks: int) -> int:
        """Bytes of a host with so many ranks, rank 0 among them, in the phase that needs most."""
        host = [item for item in self.items if item.place == "host"]
        return max(
            sum(i.num_bytes * (1 if i.once else ranks) for i in host if i.phase == phase)
            for phase in PHASES
        )


def estimate(run: RunConfig, parts: Parts, *, ranks: int, on_gpu: bool) -> Estimate | None:
    """What rank 0 of so many needs; None when the policy cannot say how large it is.

    on_gpu: whether the network is on a GPU; else it takes the host's memory.
    """
    module = parts.policy_module
    if not hasattr(module, "footprint"):
        return None
    compute = min(_BYTES[run.compute.param_dtype], _BYTES[getattr(run.policy, "dtype", "fp32")])
    net: Footprint = module.footprint(run.policy, parts.policy_spec, compute=compute)
    place: Place = "gpu" if on_gpu else "host"
    network = _network(run, net, ranks, compute)
    host, said = _host(run, parts, net, ranks)
    items = [Item(phase=p, place=place, what=what, num_bytes=n) for p, what, n in network]
    items += [Item(phase=p, place="host", what=what, num_bytes=n) for p, what, n in host]
    if run.compute.shard == "fsdp2":
        gathered = "whole weights, rank 0"
        items.append(
            Item(phase="save", place="host", what=gathered, num_bytes=net.weights, once=True)
        )
    return Estimate(items=tuple(items), assumes=(*net.assumes, *said))


def most_decisions(run: RunConfig, parts: Parts, ranks: int) -> int:
    """Of an iteration, on the rank that has most, if every episode lasts to the horizon."""
    size = run.algo.episodes_multiple
    groups = math.ceil(run.rollout.episodes / size / ranks)
    return groups * size * math.ceil(parts.env_spec.max_steps / parts.policy_spec.chunk)


_Row = tuple[Phase, str, int]


def _network(run: RunConfig, net: Footprint, ranks: int, compute: int) -> list[_Row]:
    """What is where the network is."""
    sharded = run.compute.shard == "fsdp2"
    parts = ranks if sharded else 1
    weights, trained = math.ceil(net.weights / parts), math.ceil(net.trained / parts)
    rows: list[_Row] = [("load", "weights", net.weights)]  # read whole, then shared out
    for phase in PHASES[1:]:
        rows += [(phase, "weights", weights), (phase, "Adam moments", 2 * trained)]
    copy = f"weights in {run.compute.param_dtype}"
    if sharded:
        rows.append(("rollout", copy, compute * net.parameters))
        # The root stays, two units are there at once, and one's gradients before they are summed.
        gathered = compute * (net.root + 2 * net.largest)
        gathered += (compute + _F32) * (net.root + net.largest)
        rows.append(("update", "gathered units", gathered))
    elif compute * net.parameters < net.weights:  # autocast keeps what it has cast
        rows += [(phase, copy, compute * net.parameters) for phase in ("rollout", "update")]
    at_once = math.ceil(min(run.env.num_slots, run.rollout.episodes) / run.rollout.stages)
    rows.append(("rollout", "activations", at_once * net.inside))
    rows.append(("update", "gradients", trained))
    decision = net.everything
    if run.compute.activation_checkpointing:
        decision = net.kept + net.inside
    # AdamW's square roots come when the activations are gone, and take as much as the gradients.
    rows.append(("update", "activations", max(run.optim.micro_batch * decision, trained)))
    return rows


def _host(
    run: RunConfig, parts: Parts, net: Footprint, ranks: int
) -> tuple[list[_Row], tuple[str, ...]]:
    """What is in the host's memory in any case, and what that rests on."""
    env, policy = parts.env_spec, parts.policy_spec
    height, width = env.frame_size
    observed = 3 * len(env.cameras) * height * width + _F32 * env.state_dims
    decisions = most_decisions(run, parts, ranks)
    assumes = [
        f"{decisions:,} decisions of {policy.chunk} actions stored on a rank: every episode lasts "
        f"to the horizon of {env.max_steps}"
    ]
    rows: list[_Row] = [(phase, "process", PROCESS_BYTES) for phase in PHASES]
    rows.append(("rollout", "decisions", decisions * (observed + COPIES * net.stored)))
    rows.append(("update", "decisions", decisions * (observed + net.stored)))
    if hasattr(parts.env_module, "worker_bytes"):
        each = parts.env_module.worker_bytes(run.env)
        slots = run.env.num_slots
        rows += [(phase, "simulators", slots * each) for phase in PHASES[1:]]
        assumes.append(
            f"{slots} simulators of {each / 1e9:.1f} GB, as measured with a software renderer"
        )
    return rows, tuple(assumes)
