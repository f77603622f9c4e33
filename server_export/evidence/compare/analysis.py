"""From curves and figures of runs to statements: time to a loss, intervals over seeds, who is ahead.

Pure functions. Intervals are percentile bootstraps over seeds, paired by seed where two methods are compared
(B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13). With a handful of
seeds they are too narrow; a report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its interval; both ends are NaN where there are too few seeds for one."""

    value: float
    low: float
    high: float

    def contains(self, number: float) -> bool:
        """Whether a number is inside; false where there is no interval."""
        return self.low <= number <= self.high


@dataclass(frozen=True)
class Spread:
    """A figure over seeds. `censored` counts the seeds that have none, such as a target not reached.

    `bounded` are the seeds whose value is only an upper bound, and so is a mean with one of them.
    """

    values: Mapping[int, float]
    censored: int = 0
    bounded: frozenset[int] = frozenset()

    @property
    def mean(self) -> float | None:
        """The mean over all seeds; None if one has no value: that of the others would flatter."""
        if self.censored or not self.values:
            return None
        return float(np.mean(list(self.values.values())))

    @property
    def resolved(self) -> dict[int, float]:
        """The values that are more than bounds: those that can be compared with others."""
        return {seed: value for seed, value in self.values.items() if seed not in self.bounded}

    @property
    def ends(self) -> tuple[float, float] | None:
        """The lowest and the highest value that there is."""
        return (min(self.values.values()), max(self.values.values())) if self.values else None


@dataclass(frozen=True)
class Crossing:
    """Where a curve first reaches a target; not `resolved`, it did so somewhere before that position."""

    position: float
    resolved: bool = True


def first_crossing(curve: Sequence[tuple[float, float | None]], target: float) -> Crossing | None:
    """Where a curve first falls to a target, interpolated linearly between the evaluations around it.

    Not between the start and the first evaluation after it: learning is fastest there, and a straight line
    tells nothing of where a curve fell. That evaluation is an upper bound.

    Args:
        curve: (position, loss) of the evaluations, the start first; a loss that isn't finite is None.
        target: to reach, equality included.

    Returns:
        The crossing; None if no evaluation reaches the target.
    """
    before: tuple[float, float] | None = None
    for index, (position, loss) in enumerate(curve):
        if loss is None:
            continue
        if loss <= target:
            if before is None or before[0] == curve[0][0]:
                return Crossing(float(position), resolved=index == 0)
            part = (before[1] - target) / (before[1] - loss)
            return Crossing(float(before[0] + part * (position - before[0])))
        before = position, loss
    return None


def bootstrap(values: Sequence[float]) -> Interval:
    """Mean of values, one a seed, and its percentile interval over resamples of them."""
    sample = np.asarray(values, float)
    value = float(sample.mean())
    if len(sample) < 2:
        return Interval(value, math.nan, math.nan)
    drawn = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.quantile(sample[drawn].mean(-1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # A quantile between two equal numbers may differ from them by a rounding.
    return Interval(value, min(float(low), value), max(float(high), value))


def paired_gap(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Mean of first - second over the seeds that both have; None if there are none."""
    seeds = sorted(first.keys() & second.keys())
    return bootstrap([first[seed] - second[seed] for seed in seeds]) if seeds else None


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Geometric mean of first / second over the seeds that both have with positive values; None without."""
    logs = [{seed: math.log(value) for seed, value in each.items() if value > 0} for each in (first, second)]
    gap = paired_gap(*logs)
    return None if gap is None else Interval(*map(math.exp, (gap.value, gap.low, gap.high)))


def best_of(figures: Mapping[str, Spread], lower_is_better: bool) -> str | None:
    """The name with the best mean; None if none has a mean."""
    means = {name: spread.mean for name, spread in figures.items() if spread.mean is not None}
    sign = 1 if lower_is_better else -1
    return min(means, key=lambda name: sign * means[name], default=None)


def is_tie(best: Spread, other: Spread, noise: float, as_ratio: bool) -> bool:
    """Whether a figure can't be told apart from a better one; both have a mean.

    Args:
        best: the better one.
        other: the other one.
        noise: differences of means up to this are ties; a share of the best for ratios.
        as_ratio: compare quotients, for figures whose scale matters.
    """
    assert best.mean is not None and other.mean is not None
    compare, neutral = (paired_ratio, 1.0) if as_ratio else (paired_gap, 0.0)
    interval = compare(other.resolved, best.resolved)
    close = abs(other.mean - best.mean) <= (noise * abs(best.mean) if as_ratio else noise)
    # Below its bound it may be better than the best.
    return close or bool(other.bounded) or (interval is not None and interval.contains(neutral))
