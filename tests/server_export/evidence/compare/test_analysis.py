"""Crossings, intervals and rankings, compared with plain computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_export.evidence.compare.analysis import (
    Crossing,
    Interval,
    Spread,
    best_of,
    bootstrap,
    first_crossing,
    is_tie,
    paired_gap,
    paired_ratio,
)

numbers = st.floats(-100, 100)


def test_first_crossing_interpolates() -> None:
    assert first_crossing([(0, 1.0), (10, 0.6), (20, 0.2)], 0.4) == Crossing(15)
    assert first_crossing([(0, 1.0), (10, 0.6)], 0.5) is None
    assert first_crossing([(3, 0.5), (10, 0.6)], 0.5) == Crossing(3)
    assert first_crossing([(0, 1.0), (10, 0.75), (20, None), (30, 0.25)], 0.5) == Crossing(20)
    assert first_crossing([], 0.5) is None


def test_a_target_reached_by_the_first_evaluation_has_only_a_bound() -> None:
    # The loss of exact gradients on the demo: from 0.73 to 0.108 within 2,016 rows, below 0.229 long before.
    assert first_crossing([(0, 0.73), (2016, 0.108), (4032, 0.103)], 0.229) == Crossing(2016, False)
    assert first_crossing([(0, 1.0), (10, None), (20, 0.0)], 0.5) == Crossing(20, False)
    assert first_crossing([(0, None), (10, 0.4), (20, 0.0)], 0.5) == Crossing(10, False)


@given(st.lists(numbers, min_size=2, max_size=12), numbers)
def test_first_crossing_against_a_dense_curve(values: list[float], target: float) -> None:
    positions = list(range(len(values)))
    result = first_crossing(list(zip(positions, values, strict=True)), target)
    if min(values) > target:
        assert result is None
        return
    assert result is not None
    first = next(index for index, value in enumerate(values) if value <= target)
    assert result.resolved == (first != 1)
    if first < 2:
        assert result.position == first
    else:
        assert first - 1 <= result.position <= first
        assert np.interp(result.position, positions, values) == pytest.approx(target, abs=1e-6)


def test_bootstrap_against_all_resamples() -> None:
    values = [1.0, 2.0, 6.0]
    means = [np.mean(sample) for sample in itertools.product(values, repeat=3)]
    result = bootstrap(values)
    assert result.value == pytest.approx(3)
    ends = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert [result.low, result.high] == pytest.approx(ends.tolist())
    assert bootstrap(values) == result


@given(st.lists(numbers, min_size=2, max_size=8))
def test_bootstrap_stays_within_the_sample(values: list[float]) -> None:
    result = bootstrap(values)
    assert min(values) - 1e-9 <= result.low <= result.value <= result.high <= max(values) + 1e-9


def test_one_seed_has_no_interval() -> None:
    result = bootstrap([2.0])
    assert result.value == 2
    assert math.isnan(result.low)
    assert not result.contains(2.0)


def test_pairing_takes_common_seeds() -> None:
    first, second = {1: 2.0, 2: 4.0, 9: 100.0}, {1: 1.0, 2: 2.0}
    ratio = paired_ratio(first, second)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    gap = paired_gap(first, second)
    assert gap is not None
    assert gap.value == pytest.approx(1.5)
    assert paired_gap({1: 1.0}, {2: 1.0}) is None
    assert paired_ratio({1: 0.0}, {1: 1.0}) is None


def test_spread_has_no_mean_where_one_seed_has_no_value() -> None:
    assert Spread({1: 2.0, 2: 4.0}).mean == 3
    censored = Spread({1: 2.0}, censored=1)
    assert (censored.mean, censored.ends) == (None, (2.0, 2.0))
    assert Spread({}).ends is None
    assert Spread({1: 48.0, 2: 60.0}, bounded=frozenset({1})).resolved == {2: 60.0}


def test_the_best_has_a_mean() -> None:
    figures = {"one": Spread({1: 5.0}), "two": Spread({1: 7.0}), "censored": Spread({1: 0.1}, censored=2)}
    assert best_of(figures, lower_is_better=True) == "one"
    assert best_of(figures, lower_is_better=False) == "two"
    assert best_of({"censored": figures["censored"]}, True) is None


def test_ties_and_differences() -> None:
    best = Spread({1: 1.0, 2: 1.1, 3: 1.2})
    far, near = Spread({1: 5.0, 2: 5.1, 3: 5.2}), Spread({1: 0.9, 2: 1.3, 3: 1.3})
    for as_ratio in (False, True):
        assert is_tie(best, near, 0.0, as_ratio)
        assert not is_tie(best, far, 0.0, as_ratio)
        assert is_tie(best, far, 10.0, as_ratio)


def test_a_bound_may_lie_below_the_best() -> None:
    best = Spread({1: 10.0, 2: 11.0, 3: 12.0})
    slow, bounded = {1: 48.0, 2: 48.0, 3: 48.0}, frozenset({1, 2, 3})
    assert is_tie(best, Spread(slow, bounded=bounded), 0.0, as_ratio=True)
    assert not is_tie(best, Spread(slow), 0.0, as_ratio=True)


def test_interval_contains_its_ends() -> None:
    assert Interval(1, 0, 2).contains(2)
