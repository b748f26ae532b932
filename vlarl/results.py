"""What an evaluation found: one outcome per planned episode, its protocol. Torch-free.

Every planned (task, trial, repeat) is there at most once; what is missing is named. Rates are k of
n episodes, recomputed from the episodes whenever they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from vlarl.atomic import new_file
from vlarl.episode import Episode
from vlarl.errors import RunFailed
from vlarl.proportions import Interval, Rate, mean_rate
from vlarl.protocol import shape_problems

FORMAT = "vlarl-eval"
VERSION = 1
"""Version of the file's schema; a reader refuses others."""


class EpisodeKey(NamedTuple):
    """Identity of an evaluation episode: the env's task and trial, and the repeat."""

    task: str
    trial: int
    repeat: int

    @classmethod
    def of(cls, episode: Episode) -> EpisodeKey:
        """The key of a planned episode."""
        return cls(episode.task, episode.trial, episode.member)

    def __str__(self) -> str:
        return f"{self.task} trial {self.trial} repeat {self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """Outcome of one episode.

    num_steps: executed actions. total_reward: their summed reward. num_clipped: actions with a
    component outside the env's bounds. diverged: the simulator gave non-finite numbers.
    """

    task: str
    trial: int
    repeat: int
    success: bool
    num_steps: int
    total_reward: float
    num_clipped: int
    diverged: bool

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @property
    def key(self) -> EpisodeKey:
        """(task, trial, repeat)."""
        return EpisodeKey(self.task, self.trial, self.repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Outcomes of a plan.

    plan: every episode that was asked for, without duplicates. episodes: those that were played, in
    plan order. protocol: how they were played (versions, horizon, temperature, checkpoint hash and
    so on), nested JSON values. groups: name -> tasks, for averages over groups of tasks.

    Raises:
        RunFailed: when an episode is there twice, was not planned or is impossible, a group has a
        task that was not planned, or the protocol is misshapen; the message names them.
    """

    plan: tuple[EpisodeKey, ...]
    episodes: tuple[EpisodeResult, ...]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = shape_problems(self.protocol)
        if problems:
            raise RunFailed(_joined(problems))
        problems = coverage_problems(self.plan, [e.key for e in self.episodes])
        planned = {key.task for key in self.plan}
        problems += [
            f"group '{name}' has '{task}', of which nothing is planned"
            for name, tasks in self.groups.items()
            for task in tasks
            if task not in planned
        ]
        if problems:
            raise RunFailed("the evaluation does not fit its plan: " + _joined(problems))
        horizon = self.protocol.get("env", {}).get("horizon", math.inf)
        problems = [text for e in self.episodes for text in episode_problems(e, horizon)]
        if problems:
            raise RunFailed("impossible outcomes: " + _joined(problems))
        order = {key: i for i, key in enumerate(self.plan)}
        in_order = tuple(sorted(self.episodes, key=lambda e: order[e.key]))
        object.__setattr__(self, "episodes", in_order)

    @property
    def missing(self) -> tuple[EpisodeKey, ...]:
        """Planned episodes without an outcome, in plan order."""
        played = {e.key for e in self.episodes}
        return tuple(key for key in self.plan if key not in played)

    @property
    def is_complete(self) -> bool:
        """Every planned episode was played exactly once."""
        return len(self.episodes) == len(self.plan)

    @property
    def shard(self) -> tuple[int, int] | None:
        """(i, n) when exactly the i-th of n > 1 parts of the plan was played, `plan[i - 1 :: n]`.

        None when it was something else, or a lone episode, which does not tell n.
        """
        played = {e.key for e in self.episodes}
        at = [i for i, key in enumerate(self.plan) if key in played]
        if len(at) < 2:
            return None
        first, n = at[0], at[1] - at[0]
        is_part = first < n and at == list(range(first, len(self.plan), n))
        return (first + 1, n) if is_part and n > 1 else None

    @property
    def coverage(self) -> str:
        """How much of the plan was played, in words."""
        if self.is_complete:
            return f"all {counted(len(self.plan), 'planned episode')}"
        part = f" (shard {self.shard[0]}/{self.shard[1]})" if self.shard else ""
        of = counted(len(self.plan), "planned episode")
        return f"incomplete, {len(self.episodes)} of {of}{part}"

    @property
    def total(self) -> Rate:
        """Successes of all played episodes."""
        return _rate(self.episodes)

    @property
    def by_task(self) -> dict[str, Rate]:
        """Rate of each task that was played, in plan order."""
        parts: dict[str, list[EpisodeResult]] = {}
        for episode in self.episodes:
            parts.setdefault(episode.task, []).append(episode)
        return {task: _rate(part) for task, part in parts.items()}

    @property
    def by_group(self) -> dict[str, Rate]:
        """Rate of each group with played episodes; its episodes count equally."""
        rates = self.by_task
        sums = {}
        for name, tasks in self.groups.items():
            own = [rates[task] for task in tasks if task in rates]
            if own:
                sums[name] = Rate(sum(r.k for r in own), sum(r.n for r in own))
        return sums

    @property
    def num_diverged(self) -> int:
        """Episodes that failed because the simulator diverged."""
        return sum(e.diverged for e in self.episodes)

    @property
    def mean_of_groups(self) -> tuple[float, Interval] | None:
        """Mean of the group rates with its 95 % interval; None for fewer than two groups.

        The average that multi-task benchmarks publish for difficulty groups; it differs from
        `total` when the groups differ in size.
        """
        rates = list(self.by_group.values())
        return mean_rate(rates) if len(rates) > 1 else None

    @property
    def plan_hash(self) -> str:
        """SHA-256 of the set of planned (task, trial, repeat)."""
        return plan_hash(self.plan)

    def metrics(self) -> dict[str, float]:
        """Numbers for a MetricSink; docs/metrics.md has the formulas."""
        count = len(self.episodes)
        numbers = {
            "eval/success_once": self.total.value,
            "eval/return": sum(e.total_reward for e in self.episodes) / count,
            "eval/reward": sum(e.total_reward / e.num_steps for e in self.episodes) / count,
            "eval/episode_len": sum(e.num_steps for e in self.episodes) / count,
            "eval/num_trajectories": float(count),
        }
        by_task = {f"eval/success_once/{t}": rate.value for t, rate in self.by_task.items()}
        return numbers | by_task

    def summary(self) -> dict[str, Any]:
        """The rates as JSON values: k, n, rate, 95 % interval."""
        found: dict[str, Any] = {
            "complete": self.is_complete,
            "planned": len(self.plan),
            "success": rate_json(self.total) if self.episodes else None,
            "tasks": {task: rate_json(rate) for task, rate in self.by_task.items()},
        }
        found["diverged"] = self.num_diverged
        return found | (groups_json(self.by_group) if len(self.by_group) > 1 else {})

    def document(self) -> dict[str, Any]:
        """Everything, as the JSON values of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "summary": self.summary(),
            "protocol": self.protocol,
            "groups": {name: list(tasks) for name, tasks in self.groups.items()},
            "plan_hash": self.plan_hash,
            "plan": [list(key) for key in self.plan],
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the file, whole or not at all.

        Raises:
            ConfigError: the file exists and overwrite is False.
            RunFailed: the folder cannot be written.
        """
        try:
            with new_file(path, overwrite=overwrite) as temporary:
                temporary.write_text(_dump(self.document()), encoding="utf-8")
        except OSError as error:
            raise RunFailed(f"cannot write {path}: {error.strerror}") from None
        except ValueError as error:  # a number in the protocol that JSON lacks
            raise RunFailed(f"cannot write {path}: {error}") from None


def coverage_problems(plan: Iterable[EpisodeKey], played: Iterable[EpisodeKey]) -> list[str]:
    """Why `played` does not fit `plan`: duplicates and strangers, by name; empty when it fits.

    Missing episodes are no misfit (see EvalResult.missing).
    """
    planned, counts = Counter(plan), Counter(played)
    return [
        *(f"{key} is planned {n} times" for key, n in planned.items() if n > 1),
        *(f"{key} was played {n} times" for key, n in counts.items() if n > 1),
        *(f"{key} was played but not planned" for key in counts if key not in planned),
    ]


def episode_problems(episode: EpisodeResult, horizon: float) -> list[str]:
    """Why this cannot be an outcome within `horizon` actions; empty when it can."""
    checks = [
        (1 <= episode.num_steps <= horizon, f"num_steps {episode.num_steps}, not 1 to {horizon}"),
        (
            0 <= episode.num_clipped <= episode.num_steps,
            f"num_clipped {episode.num_clipped} of {episode.num_steps} steps",
        ),
        (math.isfinite(episode.total_reward), f"total_reward {episode.total_reward}"),
        (not (episode.success and episode.diverged), "a success although the simulator diverged"),
    ]
    return [f"{episode.key} has {text}" for is_fine, text in checks if not is_fine]


def plan_hash(plan: Iterable[EpisodeKey]) -> str:
    """SHA-256 of a plan as a set: two plans of the same episodes in any order agree."""
    lines = sorted(f"{key.task}\t{key.trial}\t{key.repeat}\n" for key in plan)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def rate_json(rate: Rate) -> dict[str, Any]:
    """A rate with its 95 % interval as JSON values."""
    return {"k": rate.k, "n": rate.n, "rate": rate.value, "interval_95": list(rate.interval)}


def groups_json(groups: Mapping[str, Rate]) -> dict[str, Any]:
    """Rates of groups and their mean, as JSON values."""
    mean, interval = mean_rate(list(groups.values()))
    return {
        "groups": {name: rate_json(rate) for name, rate in groups.items()},
        "mean_of_groups": {"rate": mean, "interval_95": list(interval)},
    }


def name_some(keys: Sequence[EpisodeKey], limit: int = 5) -> str:
    """The first few keys, and how many more there are."""
    rest = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(map(str, keys[:limit])) + rest


def _joined(problems: Sequence[str], limit: int = 5) -> str:
    rest = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *rest])


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _rate(episodes: Sequence[EpisodeResult]) -> Rate:
    if not episodes:
        raise RunFailed("no episode was played, so there is no success rate")
    return Rate(sum(e.success for e in episodes), len(episodes))


def _dump(document: Mapping[str, Any]) -> str:
    """JSON with the long lists one row a line."""
    parts = []
    for key, value in document.items():
        if key in ("plan", "episodes"):
            rows = ",\n".join(
                "  " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in value
            )
            text = f"[\n{rows}\n ]" if value else "[]"
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
            text = text.replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
