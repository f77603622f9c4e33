"""What Gaussian noise amounts to: epsilon of differential privacy, by the accountant of dp-accounting."""

from __future__ import annotations

import math
from functools import lru_cache

from prge.errors import PrgeError


@lru_cache(maxsize=1024)
def epsilon_of(parts: tuple[tuple[float, int], ...], delta: float) -> float:
    """Epsilon of Gaussian mechanisms, each (noise, times); infinite where one has no noise.

    `noise` is the standard deviation as a share of what one example can change.

    Raises:
        PrgeError: the accountant isn't installed.
    """
    counted = [(noise, times) for noise, times in parts if times]
    if any(not noise for noise, _ in counted):
        return math.inf
    if not counted:
        return 0.0
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.pld import PLDAccountant
    except ModuleNotFoundError:
        raise PrgeError("noise needs the package dp-accounting", remedy="pip install 'prge[fleet]'") from None
    accountant = PLDAccountant()
    for noise, times in counted:
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), times))
    return float(accountant.get_epsilon(delta))
