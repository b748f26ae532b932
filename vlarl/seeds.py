"""One evaluation with several seeds: the mean over seeds and how far it can be trusted. Torch-free.

The interval of a mean over seeds speaks about new seeds. With the usual three it is wide, and wider
than Wilson's interval of the pooled episodes, which knows nothing of what differs between seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.special import stdtrit

from vlarl.comparison import VOLATILE, protocol_differences
from vlarl.config import resolved
from vlarl.errors import ConfigError
from vlarl.proportions import Interval, Rate
from vlarl.results import EvalResult, counted
from vlarl.run_dir import RunDir, checkpoint_step


def mean_of_seeds(values: Sequence[float]) -> tuple[float, Interval]:
    """Mean of at least two seeds' numbers and its 95 % interval by Student's t."""
    centre = mean(values)
    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return centre, (centre - half, centre + half)


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A rate with each seed: `rates[i]` of seed i. interval: 95 % Student t, cut to [0, 1]."""

    rates: tuple[Rate, ...]

    @property
    def mean(self) -> float:
        """Mean of the rates, each seed counting once."""
        return mean_of_seeds(self._values)[0]

    @property
    def interval(self) -> Interval:
        """95 % interval of the mean."""
        low, high = mean_of_seeds(self._values)[1]
        return max(low, 0.0), min(high, 1.0)

    @property
    def _values(self) -> list[float]:
        return [rate.value for rate in self.rates]

    def as_json(self) -> dict[str, Any]:
        """Counts of each seed, mean and interval as JSON values."""
        return {
            "k": [rate.k for rate in self.rates],
            "n": [rate.n for rate in self.rates],
            "mean": self.mean,
            "interval_95": list(self.interval),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSeeds:
    """Results that differ in the seed only.

    names: of the results. by_task, by_group: those that all results have.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    total: SeedMean
    by_task: Mapping[str, SeedMean]
    by_group: Mapping[str, SeedMean]

    def document(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "results": list(self.names),
            "seeds": list(self.seeds),
            "success": self.total.as_json(),
            "tasks": {name: mean.as_json() for name, mean in self.by_task.items()},
            "groups": {name: mean.as_json() for name, mean in self.by_group.items()},
        }


def over_seeds(results: Mapping[str, EvalResult]) -> OverSeeds:
    """Put at least two results together. results: by name, e.g. of their files.

    The trained weights may differ, for one training run a seed; all else of the protocol must
    agree.

    Raises:
        ConfigError: fewer than two, a seed that comes twice with the same weights, incomplete
        results, other episodes or another protocol; the message says which.
    """
    if len(results) < 2:
        raise ConfigError("a mean over seeds takes at least two results")
    (start, first), *others = results.items()
    for name, result in others:
        if result.plan_hash != first.plan_hash:
            raise ConfigError(f"{name} is of other episodes than {start}")
        different = protocol_differences(
            _without_seed(first), _without_seed(result), ignore=(*VOLATILE, "checkpoint")
        )
        if different:
            raise ConfigError(
                f"{start} and {name} differ in more than the seed: " + "; ".join(different)
            )
    for name, result in results.items():
        if not result.is_complete:
            lacking = counted(len(result.missing), "episode")
            raise ConfigError(f"{name} lacks {lacking} ({result.coverage})")
    _refuse_copies(results)
    every = list(results.values())
    return OverSeeds(
        names=tuple(results),
        seeds=tuple(map(seed_of, every)),
        total=SeedMean(tuple(result.total for result in every)),
        by_task=_each(every, lambda result: result.by_task),
        by_group=_each(every, lambda result: result.by_group),
    )


def recipe(run: RunDir) -> dict[str, Any]:
    """The settings of a run but for its seed and names: equal for the seeds of one experiment."""
    values = resolved.load(run.config).values
    return {k: v for k, v in values.items() if k not in ("name", "seed", "run_dir")}


def training_warnings(results: Mapping[str, EvalResult]) -> list[str]:
    """What speaks against the weights of these results being one recipe's, as sentences.

    results: by the path of their file. A stamp does not know how its weights were trained; their
    run does, where it is still there.
    """
    weights = {result.protocol.get("checkpoint", {}).get("sha256") for result in results.values()}
    if len(weights) == 1 and None not in weights:
        return []
    known = {path: _training(Path(path), result) for path, result in results.items()}
    lost = [path for path, training in known.items() if training is None]
    if lost:
        return [
            f"the runs that trained the weights of {', '.join(lost)} are not there to ask; that "
            "they differ in the seed only was not checked"
        ]
    (start, first), *others = known.items()
    found = []
    for path, training in others:
        different = protocol_differences(first or {}, training or {}, ignore=VOLATILE)
        if different:
            found.append(
                f"the weights of {start} and {path} were trained with more differences than the "
                "seed: " + "; ".join(different)
            )
    return found


def _training(file: Path, result: EvalResult) -> dict[str, Any] | None:
    """Recipe and step of the run whose weights were measured; None when they are of no run here."""
    own = result.protocol.get("checkpoint", {})
    path, step = own.get("path"), own.get("step")
    if path is None:  # measured while training: RUN/eval/FILE
        run = RunDir(file.resolve().parent.parent)
    else:  # RUN/ckpt/step_000020/policy
        folder = Path(path).resolve().parent
        run, step = RunDir(folder.parent.parent), checkpoint_step(folder)
    if step is None or not run.config.is_file():
        return None
    return {**recipe(run), "step": step}


def seed_of(result: EvalResult) -> int:
    """The seed of the sampling noise."""
    return int(result.protocol.get("sampling", {}).get("seed", 0))


def _refuse_copies(results: Mapping[str, EvalResult]) -> None:
    seen: list[tuple[str, Any]] = []
    for name, result in results.items():
        weights = result.protocol.get("checkpoint", {})
        own = (seed_of(result), weights, result.episodes)
        twin = next((other for other, known in seen if known == own), None)
        if twin is not None:
            raise ConfigError(
                f"{twin} and {name} are the same measurement (seed {own[0]}); give each once"
            )
        seen.append((name, own))


def _without_seed(result: EvalResult) -> dict[str, Any]:
    sampling = {k: v for k, v in result.protocol.get("sampling", {}).items() if k != "seed"}
    return {**result.protocol, "sampling": sampling}


def _each(
    results: Sequence[EvalResult], rates: Callable[[EvalResult], Mapping[str, Rate]]
) -> dict[str, SeedMean]:
    tables = [rates(result) for result in results]
    return {
        name: SeedMean(tuple(table[name] for table in tables))
        for name in tables[0]
        if all(name in table for table in tables)
    }
