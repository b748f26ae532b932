"""The seams: what the trainer asks of an env, a policy, an algorithm and a metric backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from vlarl.batch import (
    Credit,
    EnvStep,
    LossBatch,
    LossOutput,
    Observation,
    PolicyEval,
    PolicyStep,
    Rollout,
)
from vlarl.episode import Episode
from vlarl.specs import EnvSpec, PolicySpec

AllSum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks, keeping shape and dtype; the identity on one rank."""


@runtime_checkable
class VecEnv(Protocol):
    """`num_slots` episodes played at once, asynchronously (in the manner of EnvPool).

    `reset` and `send` return at once; `recv` waits. A synchronous batched env implements the same
    three calls. A slot has at most one message under way. After its episode is done a slot must be
    reset before the next send.
    """

    spec: EnvSpec
    num_slots: int

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start episodes[i] in slots[i]. The first observation comes through `recv`."""
        ...

    def send(self, slots: Sequence[int], action: Tensor) -> None:
        """Play action[i] in slots[i].

        action: [n, C, A] float32, canonical units, on the CPU or the env's device. Raises
        RunFailed, before any slot has moved, when one is not finite (vlarl.batch.require_finite).
        """
        ...

    def recv(self, min_slots: int, among: Sequence[int] | None = None) -> tuple[list[int], EnvStep]:
        """Wait until at least min_slots of the slots under way have answered; return all that have.

        The answer is in slot order. among: look at these slots only (for fixed pipeline stages).
        All tensors are owned by the caller: a later message never changes them.
        """
        ...

    def close(self) -> None:
        """Free processes, memory and renderers. Safe to call twice."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Turns observations into chunks of actions and can score what it sampled."""

    spec: PolicySpec
    module: nn.Module
    shard_units: tuple[type[nn.Module], ...]

    def act(
        self, obs: Observation, *, temperature: float, keys: Tensor | None = None
    ) -> PolicyStep:
        """Decide, without gradient.

        keys: [n] int64, one noise key a row (vlarl.noise); row i's sample depends on keys[i] and
        its own distribution only, never on the other rows. temperature 0 means greedy and needs no
        keys.
        """
        ...

    def evaluate(
        self, obs: Observation, trace: Mapping[str, Tensor], *, temperature: float
    ) -> PolicyEval:
        """Score stored decisions under the current weights, with gradient."""
        ...

    def value(self, obs: Observation) -> Tensor:
        """[n, V] float32 without gradient: V(obs), for bootstrapping. Only when spec.has_value."""
        ...

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by group, without overlap.

        The groups are "actor", and "critic" when there is a value head.
        """
        ...

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a checkpoint that `load` of the same class and the ecosystem's loaders read.

        state: a full (unsharded) CPU state dict of `module` to write in its place, under FSDP.
        """
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A value, not a class hierarchy: two pure functions and what they need.

    credit(rollout, cfg, all_sum) -> Credit;  loss(eval, batch, cfg) -> LossOutput.
    """

    name: str
    needs_value: bool
    needs_groups: bool
    credit: Callable[[Rollout, Any, AllSum], Credit]
    loss: Callable[[PolicyEval, LossBatch, Any], LossOutput]


class MetricSink(Protocol):
    """Where numbers go. Only rank 0 has one that writes."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for one step. Names are listed in docs/metrics.md."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...
