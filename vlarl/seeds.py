"""One evaluation with several seeds: the mean over seeds and how far it can be trusted. Torch-free.

The interval of a mean over seeds speaks about new seeds. With the usual three it is wide, and wider
than Wilson's interval of the pooled episodes, which knows nothing of what differs between seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy.special import stdtrit

from vlarl.comparison import VOLATILE, protocol_differences
from vlarl.errors import ConfigError
from vlarl.proportions import Interval, Rate
from vlarl.results import EvalResult


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
    """Results that differ in the seed only. by_task, by_group: those that all results have."""

    seeds: tuple[int, ...]
    total: SeedMean
    by_task: Mapping[str, SeedMean]
    by_group: Mapping[str, SeedMean]

    def document(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "seeds": list(self.seeds),
            "success": self.total.as_json(),
            "tasks": {name: mean.as_json() for name, mean in self.by_task.items()},
            "groups": {name: mean.as_json() for name, mean in self.by_group.items()},
        }


def over_seeds(results: Sequence[EvalResult]) -> OverSeeds:
    """Put at least two results together.

    The trained weights may differ, for one training run a seed; all else of the protocol must
    agree.

    Raises:
        ConfigError: fewer than two, a seed that comes twice with the same weights, incomplete
        results, other episodes or another protocol; the message says which.
    """
    if len(results) < 2:
        raise ConfigError("a mean over seeds takes at least two results")
    first = results[0]
    for number, result in enumerate(results[1:], start=2):
        if result.plan_hash != first.plan_hash:
            raise ConfigError(f"result {number} is of other episodes than result 1")
        different = protocol_differences(
            _without_seed(first), _without_seed(result), ignore=(*VOLATILE, "checkpoint")
        )
        if different:
            raise ConfigError(
                f"results 1 and {number} differ in more than the seed: " + "; ".join(different)
            )
    for number, result in enumerate(results, start=1):
        if not result.is_complete:
            raise ConfigError(f"result {number} lacks {len(result.missing)} episodes")
    _refuse_copies(results)
    return OverSeeds(
        seeds=tuple(seed_of(result) for result in results),
        total=SeedMean(tuple(result.total for result in results)),
        by_task=_each(results, lambda result: result.by_task),
        by_group=_each(results, lambda result: result.by_group),
    )


def seed_of(result: EvalResult) -> int:
    """The seed of the sampling noise."""
    return int(result.protocol.get("sampling", {}).get("seed", 0))


def _refuse_copies(results: Sequence[EvalResult]) -> None:
    weights = [result.protocol.get("checkpoint", {}) for result in results]
    known = [
        (seed_of(result), own.get("sha256"), own.get("path"), own.get("step"))
        for result, own in zip(results, weights, strict=True)
    ]
    for number, one in enumerate(known):
        if one in known[:number] and results[number].episodes == results[known.index(one)].episodes:
            raise ConfigError(
                f"results {known.index(one) + 1} and {number + 1} are the same measurement "
                f"(seed {one[0]}); give each once"
            )


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
