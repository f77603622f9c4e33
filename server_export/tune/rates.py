"""Searches for a learning rate.

A tuning uses successive halving: short runs of all rates, then longer runs of the best three. Every short run
has the schedule of the final one, whose learning rate falls to zero: with a constant rate, smaller rates look
better than they are. If the best rate is at the end of the grid, a rate beyond it is tried. Evolution
strategies then search the size of their perturbations with the best rate: Adam ignores the scale of
gradients, so that one hardly depends on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Trial = tuple[float, int, float]
"""Learning rate, steps and loss of a run."""

# Steps of a first run as a share of the final run's, and factor from a first run to a longer one.
_FIRST_SHARE, _LONGER = 1 / 12, 3
_FINALISTS = 3
_MIN_STEPS = 8
_BEYOND, _MAX_BEYOND = 3.0, 2
# Sizes of perturbations around the default, and beyond the end of that grid.
EPSILONS, _MAX_BEYOND_EPSILONS = 3, 1


def search_rates(run: Callable[[float, int], float], rates: Sequence[float], steps: int) -> list[Trial]:
    """Search for a learning rate.

    Args:
        run: runs training with a learning rate and a number of steps, and returns the loss of development
            rows, which is infinite if the run diverged.
        rates: grid of learning rates in ascending order.
        steps: steps of the final run.

    Returns:
        Learning rate, steps and loss of every run, in order.
    """
    few, more = _lengths(steps)
    losses = grid_losses(lambda rate: run(rate, few), rates, _BEYOND, _MAX_BEYOND)
    first = [(rate, few, loss) for rate, loss in losses.items()]
    if more == few:
        return first
    finalists = [rate for rate in sorted(losses, key=losses.__getitem__) if math.isfinite(losses[rate])]
    return first + [(rate, more, run(rate, more)) for rate in finalists[:_FINALISTS]]


def rates_around(centre: float, factor: float, trials: int) -> list[float]:
    """Return a geometric grid of learning rates around a centre, in ascending order.

    An even number of rates has one more below the centre than above it, since too low a rate does less harm.

    Args:
        centre: rate in the centre.
        factor: ratio of neighbours.
        trials: number of rates.
    """
    return [_rounded(centre * factor**power) for power in range(-(trials // 2), trials - trials // 2)]


def grid_losses(
    loss: Callable[[float], float], rates: Sequence[float], factor: float, max_extra: int
) -> dict[float, float]:
    """Return the losses of the rates of a grid, and of further rates beyond the end where the best one is.

    Args:
        loss: returns the loss of a rate; not finite if training diverged.
        rates: grid of rates; a single rate is not extended.
        factor: ratio of neighbours.
        max_extra: maximum number of rates to try beyond an end: lower ones if no loss of the grid is finite.
    """
    losses = {rate: loss(rate) for rate in rates}
    for _ in range(max_extra if len(losses) > 1 else 0):
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
    """Return the rate with the lowest loss, the lowest one of several; None if no loss is finite."""
    finite = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda rate: (losses[rate], rate), default=None)


def search_epsilons(run: Callable[[float], float], epsilon: float) -> dict[float, float]:
    """Search for the size of perturbations around a default; see `grid_losses`, also for what is returned.

    Args:
        run: runs training with a size, and returns the loss of development rows.
        epsilon: the default, which is the centre of the grid.
    """
    return grid_losses(run, rates_around(epsilon, _BEYOND, EPSILONS), _BEYOND, _MAX_BEYOND_EPSILONS)


def longest_search(rates: int, steps: int, with_epsilons: bool = False) -> list[int]:
    """Return the steps of every run of the longest possible search over a grid of `rates` rates.

    Args:
        rates: number of rates of the grid.
        steps: steps of the final run.
        with_epsilons: whether sizes of perturbations are searched afterwards, of which the default had a run.
    """
    few, more = _lengths(steps)
    runs = [few] * (rates + _MAX_BEYOND) + [more] * _FINALISTS * (more != few)
    return runs + [more] * (EPSILONS - 1 + _MAX_BEYOND_EPSILONS) * with_epsilons


def _lengths(steps: int) -> tuple[int, int]:
    """Return the steps of a first run and of a longer one."""
    few = min(max(round(_FIRST_SHARE * steps), _MIN_STEPS), steps)
    return few, min(_LONGER * few, steps)


def _rounded(rate: float) -> float:
    """Round a rate to three significant digits, for readable names of folders."""
    return float(f"{rate:.3g}")
