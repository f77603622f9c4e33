"""Differential privacy accounting: the exact epsilon of composed Gaussian mechanisms.

tests/prge/training/test_privacy_accounting.py compares it with the package dp-accounting, which is too large
for a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROOT_2 = math.sqrt(2)
# Above it, the tail of the normal distribution is too small for a float; the first term of its asymptotic
# series has a relative error below 1e-3 there.
_ASYMPTOTIC_FROM = 35.0


def epsilon_of(parts: Sequence[tuple[float, int]], delta: float) -> float:
    """Return the epsilon of a composition of Gaussian mechanisms for a delta.

    A composition of Gaussian mechanisms is a Gaussian mechanism whose inverse variance is the sum of theirs
    (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3), even if it is adaptive (Smith and Thakurta
    2022, arXiv 2210.17520). The result is exact and not a bound (Balle and Wang 2018, theorem 8).

    Args:
        parts: noise multiplier and number of uses of each mechanism.
        delta: the delta.

    Returns:
        Epsilon; infinity if a mechanism that is used has no noise.
    """
    used = [(noise, times) for noise, times in parts if times]
    if any(not noise for noise, _ in used):
        return math.inf
    mean = math.sqrt(sum(times / noise / noise for noise, times in used))
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
    """Return the delta of a Gaussian mechanism; `mean` is sensitivity / standard deviation."""
    above = 0.5 * math.erfc((epsilon / mean - mean / 2) / _ROOT_2)
    return above - math.exp(epsilon + _log_tail(epsilon / mean + mean / 2))


def _log_tail(value: float) -> float:
    """Return the logarithm of the probability that a standard normal variable exceeds a value."""
    if value < _ASYMPTOTIC_FROM:
        return math.log(0.5 * math.erfc(value / _ROOT_2))
    return -value * value / 2 - math.log(value * math.sqrt(2 * math.pi))
