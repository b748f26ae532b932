"""Success rates and what can be said about them: Wilson intervals, paired differences. Torch-free.

All intervals are two-sided at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

Interval = tuple[float, float]
"""Lower and upper limit."""

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Rate:
    """k successes in n > 0 trials. A percentage is never made of anything else."""

    k: int
    n: int

    def __post_init__(self) -> None:
        assert self.n > 0, self.n
        assert 0 <= self.k <= self.n, (self.k, self.n)

    @property
    def value(self) -> float:
        """The observed rate, k / n."""
        return self.k / self.n

    @property
    def interval(self) -> Interval:
        """Wilson score interval, without continuity correction. Source: Wilson, JASA 22 (1927)."""
        k, n, square = self.k, self.n, _Z**2
        centre = (k + square / 2) / (n + square)
        half = _Z / (n + square) * math.sqrt(k * (n - k) / n + square / 4)
        # The exact limits at k = 0 and k = n; the closed form misses them by a rounding error.
        return 0.0 if k == 0 else centre - half, 1.0 if k == n else centre + half


def mean_rate(rates: Sequence[Rate]) -> tuple[float, Interval]:
    """Mean of independent rates with equal weights, and its interval.

    The squared distances of the rates' Wilson limits are added (MOVER; Zou and Donner, Statistics
    in Medicine 27 (2008)).
    """
    mean = sum(rate.value for rate in rates) / len(rates)
    below = math.sqrt(sum((r.value - r.interval[0]) ** 2 for r in rates)) / len(rates)
    above = math.sqrt(sum((r.interval[1] - r.value) ** 2 for r in rates)) / len(rates)
    return mean, (mean - below, mean + above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Counts of n > 0 trials that A and B both played.

    both, only_a, only_b, neither: which of the two succeeded.
    """

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def n(self) -> int:
        """Number of pairs."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def a(self) -> Rate:
        """A's success rate."""
        return Rate(self.both + self.only_a, self.n)

    @property
    def b(self) -> Rate:
        """B's success rate."""
        return Rate(self.both + self.only_b, self.n)

    @property
    def difference(self) -> float:
        """B's rate minus A's."""
        return (self.only_b - self.only_a) / self.n

    @property
    def interval(self) -> Interval:
        """Interval of `difference`: Newcombe's hybrid score method for paired data.

        Source: Newcombe, "Improved confidence intervals for the difference between binomial
        proportions based on paired data", Statistics in Medicine 17 (1998), method 10.
        """
        (low_a, high_a), (low_b, high_b) = self.a.interval, self.b.interval
        below_a, above_a = self.a.value - low_a, high_a - self.a.value
        below_b, above_b = self.b.value - low_b, high_b - self.b.value
        phi = self._correlation()
        below = below_b**2 - 2 * phi * below_b * above_a + above_a**2
        above = above_b**2 - 2 * phi * above_b * below_a + below_a**2
        return (
            self.difference - math.sqrt(max(below, 0.0)),
            self.difference + math.sqrt(max(above, 0.0)),
        )

    def _correlation(self) -> float:
        """Newcombe's phi: shrunk towards 0 when positive, 0 when a margin is empty."""
        margins = self.a.k * (self.n - self.a.k) * self.b.k * (self.n - self.b.k)
        if margins == 0:
            return 0.0
        numerator = self.both * self.neither - self.only_a * self.only_b
        if numerator > 0:
            numerator = max(numerator - self.n / 2, 0.0)
        return numerator / math.sqrt(margins)

    @property
    def p_value(self) -> float:
        """Exact McNemar test: two-sided binomial test of the pairs that disagree; 1 without any."""
        disagree, fewer = self.only_a + self.only_b, min(self.only_a, self.only_b)
        tail = sum(math.comb(disagree, i) for i in range(fewer + 1))
        return min(1.0, 2 * tail / 2**disagree)
