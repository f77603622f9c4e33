"""Epsilon of Gaussian mechanisms, against the accountant of dp-accounting."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.training.privacy_accounting import epsilon_of

DELTA = 1e-5


@pytest.mark.parametrize(
    "parts", [[(1.0, 1)], [(2.0, 5)], [(0.7, 3)], [(8.0, 100)], [(4.0, 40), (1.5, 2)], [(30.0, 1)]]
)
def test_epsilon_equals_that_of_dp_accounting(parts: list[tuple[float, int]]) -> None:
    accounting = pytest.importorskip("dp_accounting")
    accountant = pytest.importorskip("dp_accounting.pld").PLDAccountant()
    for noise, times in parts:
        accountant.compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise), times))
    expected = accountant.get_epsilon(DELTA)
    assert expected * 0.999 - 1e-3 <= epsilon_of(parts, DELTA) <= expected * 1.001


def test_epsilon_of_very_little_and_of_very_much_noise() -> None:
    assert 4e7 < epsilon_of([(1e-4, 1)], DELTA) < 6e7
    assert epsilon_of([(1e6, 1)], DELTA) == 0.0


@given(st.floats(0.2, 50), st.integers(1, 500), st.floats(1e-9, 0.1))
def test_more_noise_costs_less_and_more_passes_cost_more(noise: float, times: int, delta: float) -> None:
    epsilon = epsilon_of([(noise, times)], delta)
    assert epsilon_of([(noise * 1.1, times)], delta) <= epsilon <= epsilon_of([(noise, times + 1)], delta)


def test_epsilons_of_several_fleets_add_up() -> None:
    both = epsilon_of([(1.0, 2), (1.0, 3)], DELTA)
    assert both == pytest.approx(epsilon_of([(1.0, 5)], DELTA))
    assert epsilon_of([], DELTA) == 0.0
    assert math.isinf(epsilon_of([(0.0, 1)], DELTA)) and math.isinf(epsilon_of([(1e-200, 1)], DELTA))
