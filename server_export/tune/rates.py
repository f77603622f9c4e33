"""Searches for a learning rate; a tuning's is successive halving: short runs, longer ones of the best three.

Every short run has the schedule of the final one, whose rate falls to zero: at a constant rate smaller ones
look better than they are. A best rate at the end of the grid asks for one beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Trial = tuple[float, int, float]

# Steps of a first run as a share of the final one's, and how many times as many a second one has.
_FIRST_SHARE, _LONGER = 1 / 12, 3
_FINALISTS = 3
_FEWEST_STEPS = 8
_BEYOND, _MOST_BEYOND = 3.0, 2


def search_rates(run: Callable[[float, int], float], rates: Sequence[float], steps: int) -> list[Trial]:
    """Try learning rates.

    Args:
        run: loss of development rows after a run with a rate and so many steps; infinite if it diverged.
        rates: a grid, rising.
        steps: of the final run.

    Returns:
        Rate, steps and loss of every run, in their order.
    """
    few, more = _lengths(steps)
    losses = grid_losses(lambda rate: run(rate, few), rates, _BEYOND, _MOST_BEYOND)
    first = [(rate, few, loss) for rate, loss in losses.items()]
    if more == few:
        return first
    finalists = [rate for rate in sorted(losses, key=losses.__getitem__) if math.isfinite(losses[rate])]
    return first + [(rate, more, run(rate, more)) for rate in finalists[:_FINALISTS]]


def rates_around(centre: float, factor: float, trials: int) -> list[float]:
    """So many learning rates around a centre, rising, each `factor` times the one before.

    An even number has one more below the centre than above it: too low a rate fails less badly.
    """
    return [_rounded(centre * factor**power) for power in range(-(trials // 2), trials - trials // 2)]


def grid_losses(
    loss: Callable[[float], float], rates: Sequence[float], factor: float, most: int
) -> dict[float, float]:
    """What the rates of a grid lead to, and up to `most` beyond the end at which the best of them lies.

    Args:
        loss: what a rate leads to, lower is better; not finite where it diverged.
        rates: a grid; one rate alone has no end.
        factor: between neighbours.
        most: rates to try beyond an end; where none of the grid has a loss, lower ones.
    """
    losses = {rate: loss(rate) for rate in rates}
    for _ in range(most if len(losses) > 1 else 0):
        best = best_rate(losses)
        if best is None or best == min(losses):
            beyond = _rounded(min(losses) / factor)
        elif best == max(losses):
            beyond = _rounded(max(losses) * factor)
        else:
            break
        losses[beyond] = loss(beyond)
    return losses


def best_rate(losses: Mapping[float, float]) -> float | None:
    """The rate of the lowest loss, the lower rate of equal ones; None if none is finite."""
    finite = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda rate: (losses[rate], rate), default=None)


def longest_search(rates: int, steps: int) -> list[int]:
    """Steps of every run of the longest search over a grid of so many rates."""
    few, more = _lengths(steps)
    return [few] * (rates + _MOST_BEYOND) + [more] * _FINALISTS * (more != few)


def _lengths(steps: int) -> tuple[int, int]:
    """Steps of a first run and of a finalist's."""
    few = min(max(round(_FIRST_SHARE * steps), _FEWEST_STEPS), steps)
    return few, min(_LONGER * few, steps)


def _rounded(rate: float) -> float:
    """Three significant digits, so that a rate reads well in a folder's name."""
    return float(f"{rate:.3g}")
