"""Lower bounds of epsilon from trials with a row and without it.

An (epsilon, delta) private device gives an answer with probability p with the row and q without it, where
p <= exp(epsilon) q + delta, and vice versa. Clopper-Pearson intervals bound p and q by the counts of an
answer that was chosen before all trials. The bound holds with a confidence of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from prge.training.privacy_accounting import epsilon_of

# Both bounds hold together with a confidence of 95 %.
_ERROR_RATE = 0.025


@dataclass(frozen=True)
class Audit:
    """Lower bounds of epsilon, 0 if nothing is proven.

    `epsilon` follows from the trials alone. `gaussian` assumes Gaussian noise, which needs far fewer trials:
    it is derived from mu of Gaussian differential privacy for the same two shares.
    """

    epsilon: float
    gaussian: float


def audit(inside: int, outside: int, trials: int, delta: float) -> Audit:
    """Return the largest epsilon that the counts prove.

    Args:
        inside: trials with the row in which the device gave the chosen answer.
        outside: trials without the row in which the device gave the chosen answer.
        trials: number of trials with the row, and number of trials without it.
        delta: delta of differential privacy.
    """
    low, upper = interval(inside, trials)[0], interval(outside, trials)[1]
    ratios = ((low - delta) / upper, (1 - upper - delta) / (1 - low))
    normal = NormalDist()
    mu = normal.inv_cdf(low) - normal.inv_cdf(upper) if low > 0 and upper < 1 else 0.0
    gaussian = epsilon_of([(1 / mu, 1)], delta) if mu > 0 else 0.0
    return Audit(math.log(max(*ratios, 1.0)), gaussian)


def interval(hits: int, trials: int, doubt: float = _ERROR_RATE) -> tuple[float, float]:
    """Return Clopper-Pearson bounds of a probability; each fails with probability `doubt` at most."""
    low = _root(lambda share: 1 - _at_most(hits - 1, trials, share) - doubt) if hits else 0.0
    high = _root(lambda share: doubt - _at_most(hits, trials, share)) if hits < trials else 1.0
    return low, high


def _root(increasing: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return high


def _at_most(hits: int, trials: int, share: float) -> float:
    """Return the probability of at most `hits` hits."""
    counts = np.arange(hits + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_binomials = factorials[trials] - factorials[counts] - factorials[trials - counts]
    return float(
        np.exp(log_binomials + counts * math.log(share) + (trials - counts) * math.log1p(-share)).sum()
    )
