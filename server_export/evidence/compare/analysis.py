"""Statistics of runs: when a loss is reached, intervals over seeds, and which method is better.

All functions are pure. Intervals are percentile bootstraps over seeds, paired by seed if two methods are
compared (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13). With a
handful of seeds they are too narrow; a report says so.
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
    """A value and the ends of its interval; both ends are NaN if there are too few seeds."""

    value: float
    low: float
    high: float

    def contains(self, number: float) -> bool:
        """Return whether a number is in the interval; False if there is no interval."""
        return self.low <= number <= self.high


@dataclass(frozen=True)
class Spread:
    """The values of a figure over seeds.

    `censored` counts the seeds without a value, such as those that didn't reach a target. `bounded` holds the
    seeds whose value is only an upper bound; a mean that includes one is an upper bound too.
    """

    values: Mapping[int, float]
    censored: int = 0
    bounded: frozenset[int] = frozenset()

    @property
    def mean(self) -> float | None:
        """The mean over all seeds, or None if one has no value: the mean of the others would be too good."""
        if self.censored or not self.values:
            return None
        return float(np.mean(list(self.values.values())))

    @property
    def resolved(self) -> dict[int, float]:
        """The values that are not only bounds and can be compared."""
        return {seed: value for seed, value in self.values.items() if seed not in self.bounded}

    @property
    def ends(self) -> tuple[float, float] | None:
        """The lowest and the highest value, or None without values."""
        return (min(self.values.values()), max(self.values.values())) if self.values else None


@dataclass(frozen=True)
class Crossing:
    """The position at which a curve first reaches a target; an upper bound unless `resolved`."""

    position: float
    resolved: bool = True


def first_crossing(curve: Sequence[tuple[float, float | None]], target: float) -> Crossing | None:
    """Return where a curve first falls to a target, interpolated linearly between two evaluations.

    Between the start and the next evaluation there is no interpolation: learning is fastest there, and a
    straight line would be wrong. That evaluation's position is an upper bound.

    Args:
        curve: (position, loss) of the evaluations, the start first; a loss that isn't finite is None.
        target: loss to reach; equality counts as reached.

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
            share = (before[1] - target) / (before[1] - loss)
            return Crossing(float(before[0] + share * (position - before[0])))
        before = position, loss
    return None


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the mean of values, one for each seed, with its bootstrap percentile interval."""
    sample = np.asarray(values, float)
    value = float(sample.mean())
    if len(sample) < 2:
        return Interval(value, math.nan, math.nan)
    indices = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.quantile(sample[indices].mean(-1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # A quantile between two equal numbers may differ from them by rounding.
    return Interval(value, min(float(low), value), max(float(high), value))


def paired_gap(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Return the mean of first - second over common seeds, or None without common seeds."""
    seeds = sorted(first.keys() & second.keys())
    return bootstrap([first[seed] - second[seed] for seed in seeds]) if seeds else None


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Return the geometric mean of first / second over common seeds with positive values, or None without."""
    logs = [{seed: math.log(value) for seed, value in each.items() if value > 0} for each in (first, second)]
    gap = paired_gap(*logs)
    return None if gap is None else Interval(*map(math.exp, (gap.value, gap.low, gap.high)))


def best_of(figures: Mapping[str, Spread], lower_is_better: bool) -> str | None:
    """Return the name with the best mean, or None if none has a mean."""
    means = {name: spread.mean for name, spread in figures.items() if spread.mean is not None}
    sign = 1 if lower_is_better else -1
    return min(means, key=lambda name: sign * means[name], default=None)


def is_tie(best: Spread, other: Spread, noise: float, as_ratio: bool) -> bool:
    """Return whether a figure is indistinguishable from a better one; both must have a mean.

    Args:
        best: the better figure.
        other: the other figure.
        noise: differences of means up to this are ties; a share of the best for ratios.
        as_ratio: compare ratios, for figures whose scale matters.
    """
    assert best.mean is not None and other.mean is not None
    compare, neutral = (paired_ratio, 1.0) if as_ratio else (paired_gap, 0.0)
    interval = compare(other.resolved, best.resolved)
    close = abs(other.mean - best.mean) <= (noise * abs(best.mean) if as_ratio else noise)
    # A bounded figure may be better than the best one.
    return close or bool(other.bounded) or (interval is not None and interval.contains(neutral))
