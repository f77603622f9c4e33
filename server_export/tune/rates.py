"""The learning rate by successive halving: short runs of some rates, longer ones of the best three.

Every short run has the schedule of the final one, whose rate falls to zero: at a constant rate smaller ones
look better than they are. A best rate at the end of the grid asks for one beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    first = [(rate, few, run(rate, few)) for rate in rates]
    for _ in range(_MOST_BEYOND):
        ranked = sorted(first, key=_loss)
        best, tried = ranked[0][0], [rate for rate, _, _ in first]
        if not math.isfinite(ranked[0][2]) or best == min(tried):
            beyond = min(tried) / _BEYOND
        elif best == max(tried):
            beyond = max(tried) * _BEYOND
        else:
            break
        first.append((beyond, few, run(beyond, few)))
    if more == few:
        return first
    finalists = [rate for rate, _, loss in sorted(first, key=_loss)[:_FINALISTS] if math.isfinite(loss)]
    return first + [(rate, more, run(rate, more)) for rate in finalists]


def longest_search(rates: int, steps: int) -> list[int]:
    """Steps of every run of the longest search over a grid of so many rates."""
    few, more = _lengths(steps)
    return [few] * (rates + _MOST_BEYOND) + [more] * _FINALISTS * (more != few)


def _lengths(steps: int) -> tuple[int, int]:
    """Steps of a first run and of a finalist's."""
    few = min(max(round(_FIRST_SHARE * steps), _FEWEST_STEPS), steps)
    return few, min(_LONGER * few, steps)


def _loss(trial: Trial) -> float:
    return trial[2]
