"""Plans: which episodes are played, as data. Pure functions of trials, seed and step."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from vlarl.episode import Episode
from vlarl.errors import ConfigError
from vlarl.noise import stream

Trials = Mapping[str, Sequence[int]]
"""Task -> its trial ids."""


def _permuted(n: int, *path: object) -> list[int]:
    order = list(range(n))
    random.Random(stream(*path)).shuffle(order)
    return order


def _start(trials: Trials, seed: int, position: int) -> tuple[str, int]:
    """The (task, trial) at a position of an endless sequence.

    Every round names each task once, in a fresh order; a task's trials are used up before one
    comes again.
    """
    tasks = list(trials)
    round_, i = divmod(position, len(tasks))
    task = tasks[_permuted(len(tasks), seed, "plan-tasks", round_)[i]]
    cycle, j = divmod(round_, len(trials[task]))
    return task, trials[task][_permuted(len(trials[task]), seed, "plan-trials", task, cycle)[j]]


def train_plan(
    trials: Trials, *, episodes: int, group_size: int, seed: int, step: int
) -> list[Episode]:
    """The episodes of iteration `step`: `episodes / group_size` groups that share a start state.

    Tasks are balanced within an iteration and trials over iterations. group_size 1 means no groups
    (group is -1). The plan is the same on every rank and needs no state to be resumed.

    Raises:
        ConfigError: when group_size does not divide episodes, or there are no trials.
    """
    if not trials or any(not ids for ids in trials.values()):
        raise ConfigError("the env offers no training trials; check env.tasks and its train trials")
    if episodes % group_size:
        near = max(1, round(episodes / group_size)) * group_size
        raise ConfigError(
            f"rollout.episodes ({episodes}) must be a multiple of the group size ({group_size}); "
            f"the nearest is {near}"
        )
    num_groups = episodes // group_size
    seen: dict[tuple[str, int], int] = {}
    plan: list[Episode] = []
    for g in range(num_groups):
        task, trial = _start(trials, seed, step * num_groups + g)
        for member in range(group_size):
            repeat = seen.get((task, trial), 0)
            seen[task, trial] = repeat + 1
            plan.append(
                Episode(
                    task=task,
                    trial=trial,
                    index=len(plan),
                    group=g if group_size > 1 else -1,
                    member=member if group_size > 1 else repeat,
                )
            )
    return plan


def eval_plan(
    trials: Trials, *, episodes: int | None = None, repeats: int = 1, record: int = 0
) -> list[Episode]:
    """Every (task, trial) exactly `repeats` times, task by task.

    episodes: only the first so many trials of each task. record: how many episodes, spread evenly
    over the plan, ask for video frames.

    Raises:
        ConfigError: when a task has fewer trials than asked for.
    """
    for task, ids in trials.items():
        if episodes is not None and episodes > len(ids):
            raise ConfigError(
                f"task '{task}' has {len(ids)} trials but {episodes} were asked for; "
                f"lower --episodes or offer more trials"
            )
    starts = [
        (task, trial, repeat)
        for task, ids in trials.items()
        for trial in list(ids)[:episodes]
        for repeat in range(repeats)
    ]
    chosen = (
        {math.floor((k + 0.5) * len(starts) / record) for k in range(record)}
        if record < len(starts)
        else set(range(len(starts)))
    )
    return [
        Episode(task=task, trial=trial, index=i, member=repeat, record=i in chosen)
        for i, (task, trial, repeat) in enumerate(starts)
    ]
