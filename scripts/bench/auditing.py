"""What answers tell of a row: a lower bound of epsilon, by trials with the row and without it.

An (epsilon, delta) private device answers something with probability p with the row and q without it, where
p <= exp(epsilon) q + delta, and the same the other way round. Clopper and Pearson's intervals bound p and q
by counts of what was named before any trial: what is found holds with a confidence of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from prge.training.privacy_accounting import epsilon_of

# Two bounds hold together with 95 %.
_DOUBT = 0.025


@dataclass(frozen=True)
class Audit:
    """What is proven, 0 where nothing is: `epsilon` by the trials alone, `gaussian` of normals.

    Of normals far fewer trials say the epsilon: mu of Gaussian differential privacy by the same two shares.
    """

    epsilon: float
    gaussian: float


def audit(inside: int, outside: int, trials: int, delta: float) -> Audit:
    """The largest epsilon that counts prove.

    Args:
        inside: trials with the row in which the device answered what tells of it.
        outside: such trials without the row.
        trials: of either kind.
        delta: of the epsilon.
    """
    low, upper = interval(inside, trials)[0], interval(outside, trials)[1]
    ratios = ((low - delta) / upper, (1 - upper - delta) / (1 - low))
    normal = NormalDist()
    apart = normal.inv_cdf(low) - normal.inv_cdf(upper) if low > 0 and upper < 1 else 0.0
    gaussian = epsilon_of([(1 / apart, 1)], delta) if apart > 0 else 0.0
    return Audit(math.log(max(*ratios, 1.0)), gaussian)


def interval(hits: int, trials: int, doubt: float = _DOUBT) -> tuple[float, float]:
    """Clopper and Pearson's bounds of a probability, each of which fails with probability `doubt` at most."""
    low = _root(lambda share: 1 - _at_most(hits - 1, trials, share) - doubt) if hits else 0.0
    high = _root(lambda share: doubt - _at_most(hits, trials, share)) if hits < trials else 1.0
    return low, high


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _at_most(hits: int, trials: int, share: float) -> float:
    """Probability of so many hits at most."""
    counts = np.arange(hits + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    ways = factorials[trials] - factorials[counts] - factorials[trials - counts]
    return float(np.exp(ways + counts * math.log(share) + (trials - counts) * math.log1p(-share)).sum())
