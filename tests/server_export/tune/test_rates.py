"""The search for a learning rate, with known losses."""

from __future__ import annotations

import math

import pytest

from server_export.tune.rates import (
    best_rate,
    grid_losses,
    longest_search,
    rates_around,
    search_epsilons,
    search_rates,
)

GRID = (1e-3, 3e-3, 1e-2, 3e-2)


class Losses:
    """A loss with its minimum at one rate, on a logarithmic scale, which diverges above another rate."""

    def __init__(self, best: float, diverges_at: float = math.inf) -> None:
        self.best, self.diverges_at = best, diverges_at
        self.calls: list[tuple[float, int]] = []

    def __call__(self, rate: float, steps: int) -> float:
        self.calls.append((round(rate, 6), steps))
        return math.inf if rate >= self.diverges_at else abs(math.log(rate / self.best)) + 1 / steps


def test_all_rates_run_shortly_and_the_best_three_longer() -> None:
    losses = Losses(3e-3)
    trials = search_rates(losses, GRID, 240)
    assert losses.calls == [
        *((rate, 20) for rate in GRID),
        *((rate, 60) for rate in (0.003, 0.001, 0.01)),
    ]
    assert [(round(rate, 6), steps) for rate, steps, _ in trials] == losses.calls


@pytest.mark.parametrize(("best", "beyond"), [(0.09, 0.09), (3e-4, 1e-3 / 3)])
def test_if_the_best_rate_is_at_the_end_of_the_grid_one_beyond_is_tried(best: float, beyond: float) -> None:
    losses = Losses(best)
    search_rates(losses, GRID, 240)
    assert round(beyond, 6) in [rate for rate, _ in losses.calls]


def test_the_search_ends_if_rates_only_get_better() -> None:
    losses = Losses(1e6)
    search_rates(losses, GRID, 240)
    assert len(losses.calls) == len(GRID) + 2 + 3


def test_if_rates_diverge_smaller_ones_are_tried() -> None:
    losses = Losses(1e-4, diverges_at=1e-3)
    trials = search_rates(losses, GRID, 240)
    assert min(rate for rate, _, _ in trials) < 2e-4
    longer = [loss for _, steps, loss in trials if steps == 60]
    assert longer and all(map(math.isfinite, longer))


def test_a_run_of_few_steps_is_its_own_search() -> None:
    losses = Losses(3e-3)
    search_rates(losses, GRID, 5)
    assert losses.calls == [(rate, 5) for rate in GRID]


@pytest.mark.parametrize("steps", [3, 8, 20, 120, 900])
@pytest.mark.parametrize(
    ("best", "diverges_at"), [(1e-2, math.inf), (1e-5, math.inf), (1.0, math.inf), (1e-2, 1e-9)]
)
def test_no_search_has_more_runs_than_the_longest_search(steps: int, best: float, diverges_at: float) -> None:
    losses = Losses(best, diverges_at)
    search_rates(losses, GRID, steps)
    longest = sorted(longest_search(len(GRID), steps), reverse=True)
    executed = sorted((steps for _, steps in losses.calls), reverse=True)
    assert len(executed) <= len(longest) and all(a <= b for a, b in zip(executed, longest, strict=False))
    assert sum(executed) <= sum(longest)


def test_grid_is_geometric_around_its_centre() -> None:
    assert rates_around(0.01, 3, 3) == [0.00333, 0.01, 0.03]
    assert rates_around(0.01, 10, 2) == [0.001, 0.01]
    assert rates_around(0.01, 10, 1) == [0.01]


@pytest.mark.parametrize(
    ("optimum", "chosen", "trials"), [(0.01, 0.01, 3), (0.1, 0.09, 4), (0.0001, 0.00111, 4)]
)
def test_a_grid_goes_one_beyond_its_end(optimum: float, chosen: float, trials: int) -> None:
    losses = grid_losses(lambda rate: abs(math.log(rate / optimum)), rates_around(0.01, 3, 3), 3, 1)
    assert (best_rate(losses), len(losses)) == (chosen, trials)


def test_after_failures_lower_rates_are_tried_and_a_single_rate_is_not_extended() -> None:
    losses = grid_losses(lambda rate: 0.5 if rate < 0.002 else math.inf, rates_around(0.01, 3, 3), 3, 1)
    assert (best_rate(losses), losses[0.01]) == (0.00111, math.inf)
    assert best_rate(grid_losses(lambda rate: math.nan, [0.1], 3, 1)) is None
    assert best_rate({0.3: 1.0, 0.1: 1.0}) == 0.1
    assert len(grid_losses(lambda rate: rate, [0.1], 3, 1)) == 1


@pytest.mark.parametrize(
    ("optimum", "chosen", "trials"), [(0.01, 0.01, 3), (0.2, 0.09, 4), (1e-4, 0.00111, 4)]
)
def test_sizes_of_perturbations_are_searched_around_the_default(
    optimum: float, chosen: float, trials: int
) -> None:
    losses = search_epsilons(lambda epsilon: abs(math.log(epsilon / optimum)), 0.01)
    assert (best_rate(losses), len(losses)) == (chosen, trials) and 0.01 in losses
    # The default had a run in the search for the learning rate.
    more = len(longest_search(4, 240, with_epsilons=True)) - len(longest_search(4, 240))
    assert len(losses) - 1 <= more
