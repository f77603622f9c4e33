"""Choosing a learning rate: a geometric grid, extended once where the best trial is at its edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Trial = Callable[[float], float | None]


def grid(centre: float, factor: float, trials: int) -> list[float]:
    """`trials` learning rates around a centre, ascending, each `factor` times the one before.

    An even number has one more below the centre than above it: too low a rate fails less badly.
    """
    return [_rounded(centre * factor**power) for power in range(-(trials // 2), trials - trials // 2)]


def search(
    centre: float, factor: float, trials: int, losses: Trial
) -> tuple[float | None, dict[float, float]]:
    """Try the grid, and one rate beyond its edge if the best one lies there.

    Args:
        centre: of the grid.
        factor: between neighbours.
        trials: how many rates.
        losses: what a rate leads to, lower is better; None or not finite where it failed.

    Returns:
        The best rate, None if all failed; and the loss by rate, infinite for a failure.
    """
    losses_by_rate = {rate: _finite(losses(rate)) for rate in grid(centre, factor, trials)}
    further = beyond(losses_by_rate, factor)
    if further is not None:
        losses_by_rate[further] = _finite(losses(further))
    return best(losses_by_rate), losses_by_rate


def best(losses: Mapping[float, float]) -> float | None:
    """The rate of the lowest loss, the lower rate of equal ones; None if none is finite."""
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=lambda rate: (finite[rate], rate), default=None)


def beyond(losses: Mapping[float, float], factor: float) -> float | None:
    """The next rate outside the tried ones where the best is at their edge; None if it is inside."""
    chosen = best(losses)
    rates = sorted(losses)
    if len(rates) < 2:
        return None
    if chosen is None or chosen == rates[0]:
        return _rounded(rates[0] / factor)
    return _rounded(rates[-1] * factor) if chosen == rates[-1] else None


def _finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _rounded(rate: float) -> float:
    """Three significant digits, so that a rate reads well in a folder's name."""
    return float(f"{rate:.3g}")
