"""The search for a learning rate."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_export.evidence.compare.search import best, beyond, grid, search


def test_grid_is_geometric_around_its_centre() -> None:
    assert grid(0.01, 3, 3) == [0.00333, 0.01, 0.03]
    assert grid(0.01, 10, 2) == [0.001, 0.01]
    assert grid(0.01, 10, 1) == [0.01]


@given(st.floats(1e-6, 1.0), st.floats(1.5, 10.0), st.integers(1, 7))
def test_grid_rises_by_its_factor(centre: float, factor: float, trials: int) -> None:
    rates = grid(centre, factor, trials)
    assert len(rates) == trials
    assert all(
        second / first == pytest.approx(factor, rel=0.02) for first, second in itertools.pairwise(rates)
    )
    assert any(rate == pytest.approx(centre, rel=0.01) for rate in rates)


@pytest.mark.parametrize(
    ("optimum", "chosen", "trials"), [(0.01, 0.01, 3), (0.1, 0.09, 4), (0.0001, 0.00111, 4)]
)
def test_search_goes_one_beyond_an_edge(optimum: float, chosen: float, trials: int) -> None:
    rate, losses = search(0.01, 3, 3, lambda rate: abs(math.log(rate / optimum)))
    assert rate == chosen
    assert len(losses) == trials


def test_failures_are_infinite_and_push_down() -> None:
    rate, losses = search(0.01, 3, 3, lambda rate: 0.5 if rate < 0.002 else None)
    assert (rate, losses[0.01]) == (0.00111, math.inf)
    assert search(0.01, 3, 3, lambda rate: math.nan)[0] is None


def test_ties_go_to_the_lower_rate_and_one_trial_is_never_at_an_edge() -> None:
    assert best({0.3: 1.0, 0.1: 1.0}) == 0.1
    assert beyond({0.1: 1.0}, 3) is None
