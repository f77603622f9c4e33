"""Budgets are converted to steps."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server_export.evidence.compare.budget import evaluation_steps, steps_within


def test_budgets_have_several_units() -> None:
    assert steps_within("steps", 12, 32) == 12
    assert steps_within("forward_passes", 1000, 32) == 31
    assert steps_within("seconds", 0.3, 32, 0.1) == 3
    assert steps_within("forward_passes", 1, 32) == 1


@given(st.integers(1, 10**7), st.integers(1, 1000))
def test_rows_are_used_up_and_not_exceeded(rows: int, step_passes: int) -> None:
    steps = steps_within("forward_passes", rows, step_passes)
    assert (steps + 1) * step_passes > rows
    assert steps * step_passes <= max(rows, step_passes)


def test_evaluations_grow_by_the_same_rows_for_every_method() -> None:
    # 48, 96, 192, 384 and 768 rows.
    assert evaluation_steps(20, 48, 48, 2.0) == (0, 1, 2, 4, 8, 16, 20)
    assert evaluation_steps(30, 32, 48, 2.0) == (0, 2, 3, 6, 12, 24, 30)
    assert evaluation_steps(1, 48, 48, 2.0) == (0, 1)


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(1, 200), st.floats(1.1, 1000))
def test_no_two_evaluations_are_further_apart_than_the_growth(
    steps: int, step_passes: int, first: int, growth: float
) -> None:
    result = evaluation_steps(steps, step_passes, first, growth)
    assert list(result) == sorted(set(result))
    assert (result[0], result[-1]) == (0, steps)
    assert result[1] == min(steps, -(-first // step_passes))
    # A step may reach several values of the series, or reach one late by up to its own size.
    for before, after in itertools.pairwise(result[1:]):
        assert after <= before * growth + 1
