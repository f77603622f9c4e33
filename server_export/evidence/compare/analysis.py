"""From curves and figures of runs to statements: time to a quality, intervals over seeds, who is ahead.

Pure functions. Intervals are percentile bootstraps over seeds, paired by seed where two methods are compared
(B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13). With a handful of
seeds they are too narrow; a report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    def lowest(self) -> float | None:
        """The lowest value that there is."""
        return min(self.values.values(), default=None)

    @property
    def highest(self) -> float | None:
        """The highest value that there is."""
        return max(self.values.values(), default=None)


@dataclass(frozen=True)
class Crossing:
    """Where a curve first reaches a target; not `resolved`, it did so somewhere before that position."""

    position: float
    resolved: bool = True


def first_crossing(
    positions: Sequence[float], values: Sequence[float], target: float, lower_is_better: bool
) -> Crossing | None:
    """Where a curve first reaches a target, interpolated linearly between the evaluations around it.

    Not between the start and the first evaluation after it: learning is fastest there, and a straight line
    tells nothing of where a curve fell. That evaluation is an upper bound.

    Args:
        positions: of the evaluations, ascending, the start first: seconds or rows.
        values: their quality; those that are not finite are left out.
        target: to reach, equality included.
        lower_is_better: whether values fall towards it.

    Returns:
        The crossing; None if no evaluation reaches the target.
    """
    sign = 1.0 if lower_is_better else -1.0
    before: int | None = None
    for index, (position, value) in enumerate(zip(positions, values, strict=True)):
        if not math.isfinite(value):
            continue
        if sign * value <= sign * target:
            if not before:
                return Crossing(float(position), resolved=index == 0)
            part = (values[before] - target) / (values[before] - value)
            return Crossing(float(positions[before] + part * (position - positions[before])))
        before = index
    return None


def bootstrap(
    values: Sequence[float], statistic: Callable[[np.ndarray], np.ndarray] | None = None, seed: int = 0
) -> Interval:
    """Mean of values and its percentile interval over resamples of them.

    Args:
        values: one a seed.
        statistic: of resamples f64 [resamples, seeds] along the last axis; the mean without one.
        seed: of the resampling.
    """
    sample = np.asarray(values, float)
    compute = statistic or (lambda drawn: drawn.mean(-1))
    value = float(compute(sample[None])[0])
    if len(sample) < 2:
        return Interval(value, math.nan, math.nan)
    drawn = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    resampled = compute(sample[drawn])
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # A quantile between two equal numbers may differ from them by a rounding.
    return Interval(value, min(float(low), value), max(float(high), value))


def paired_gap(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Mean of first - second over the seeds that both have; None if there are none."""
    seeds = sorted(first.keys() & second.keys())
    return bootstrap([first[seed] - second[seed] for seed in seeds]) if seeds else None


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Geometric mean of first / second over the seeds that both have with positive values; None without."""
    seeds = [seed for seed in sorted(first.keys() & second.keys()) if first[seed] > 0 and second[seed] > 0]
    if not seeds:
        return None
    logs = [math.log(first[seed] / second[seed]) for seed in seeds]
    return bootstrap(logs, lambda drawn: np.exp(drawn.mean(-1)))


@dataclass(frozen=True)
class Ranking:
    """Who is ahead in one figure: the best mean, and who can't be told apart from it."""

    best: str
    ties: tuple[str, ...]


def rank(
    figures: Mapping[str, Spread], lower_is_better: bool, noise: float = 0.0, as_ratio: bool = False
) -> Ranking | None:
    """The method with the best mean of a figure, and those whose difference to it is within noise.

    Args:
        figures: by method; those without a mean take no part.
        lower_is_better: whether a low figure is good.
        noise: differences of means up to this are ties; a share of the best for ratios.
        as_ratio: compare quotients, for figures whose scale matters.

    Returns:
        None if no method has a mean.
    """
    means = {name: spread.mean for name, spread in figures.items() if spread.mean is not None}
    if not means:
        return None
    sign = 1 if lower_is_better else -1
    best = min(means, key=lambda name: sign * means[name])
    ties = []
    for name in means:
        if name == best:
            continue
        compare, neutral = (paired_ratio, 1.0) if as_ratio else (paired_gap, 0.0)
        interval = compare(figures[name].resolved, figures[best].resolved)
        allowed = noise * abs(means[best]) if as_ratio else noise
        close = abs(means[name] - means[best]) <= allowed
        # Below its bound it may be better than the best.
        if close or figures[name].bounded or (interval is not None and interval.contains(neutral)):
            ties.append(name)
    return Ranking(best, tuple(ties))
