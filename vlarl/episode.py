"""Which episode is played: data, not behaviour. Torch-free: simulator processes import it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of a plan.

    Two episodes with the same (task, trial) start in the same state, bit for bit.

    task: the env's name of the task, e.g. "button-press-v3".
    trial: index of the initial state (goal vector, init state, first frame) of that task.
    group: index of the GRPO group in the plan; -1 outside of groups.
    member: index inside the group, or the repeat of an evaluation trial.
    record: ask the env for video frames of this episode; no part of its identity.
    index: position in the global plan, unique in it; names the episode in logs, noise keys and
    results.
    """

    task: str
    trial: int
    index: int
    group: int = -1
    member: int = 0
    record: bool = field(default=False, compare=False)
