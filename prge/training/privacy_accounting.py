"""What noise amounts to: epsilon of Gaussian mechanisms, exactly.

tests/prge/training/test_privacy_accounting.py holds it against the accountant of dp-accounting, which needs more room than a
phone should give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROOT_2 = math.sqrt(2)
# Above it the share of a normal is too small for a float; its first term is exact to 1e-3 there.
_FAR = 35.0


def epsilon_of(parts: Sequence[tuple[float, int]], delta: float) -> float:
    """Epsilon of Gaussian mechanisms, each (noise, times); infinite where one has no noise.

    Gaussian mechanisms one after another are one: their inverse variances add up (Dong, Roth and Su 2019,
    arXiv 1905.02383, corollary 3.3), also where what came before chooses the next (Smith and Thakurta 2022,
    arXiv 2210.17520). Its epsilon is exact (Balle and Wang 2018, theorem 8), not a bound.
    """
    counted = [(noise, times) for noise, times in parts if times]
    if any(not noise for noise, _ in counted):
        return math.inf
    mean = math.sqrt(sum(times / noise / noise for noise, times in counted))
    if math.isinf(mean):
        return math.inf
    if not mean or _delta_of(0.0, mean) <= delta:
        return 0.0
    low, high = 0.0, mean * mean / 2 + mean * math.sqrt(2 * math.log(1 / delta))
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta_of(middle, mean) > delta else (low, middle)
    return high


def _delta_of(epsilon: float, mean: float) -> float:
    """Delta of the Gaussian mechanism that tells normals of a mean and of 0 apart."""
    above = 0.5 * math.erfc((epsilon / mean - mean / 2) / _ROOT_2)
    return above - math.exp(epsilon + _log_tail(epsilon / mean + mean / 2))


def _log_tail(value: float) -> float:
    """Logarithm of the share of a standard normal above a value."""
    if value < _FAR:
        return math.log(0.5 * math.erfc(value / _ROOT_2))
    return -value * value / 2 - math.log(value * math.sqrt(2 * math.pi))
