"""Crossings, intervals and rankings against plain computations."""

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
    bootstrap,
    first_crossing,
    paired_gap,
    paired_ratio,
    rank,
)

numbers = st.floats(-100, 100)


def test_first_crossing_interpolates() -> None:
    assert first_crossing([0, 10, 20], [1.0, 0.6, 0.2], 0.4, True) == Crossing(15)
    assert first_crossing([0, 10, 20], [0.2, 0.4, 0.6], 0.5, False) == Crossing(15)
    assert first_crossing([0, 10], [1.0, 0.6], 0.5, True) is None
    assert first_crossing([3, 10], [0.5, 0.6], 0.5, True) == Crossing(3)
    assert first_crossing([0, 10, 20, 30], [1.0, 0.75, math.nan, 0.25], 0.5, True) == Crossing(20)
    assert first_crossing([], [], 0.5, True) is None


def test_a_target_reached_by_the_first_evaluation_has_only_a_bound() -> None:
    # The loss of exact gradients on the demo: from 0.73 to 0.108 within 2,016 rows, below 0.229 long before.
    assert first_crossing([0, 2016, 4032], [0.73, 0.108, 0.103], 0.229, True) == Crossing(2016, False)
    assert first_crossing([0, 10, 20], [1.0, math.nan, 0.0], 0.5, True) == Crossing(20, False)
    assert first_crossing([0, 10, 20], [math.nan, 0.4, 0.0], 0.5, True) == Crossing(10, False)


@given(st.lists(numbers, min_size=2, max_size=12), numbers)
def test_first_crossing_against_a_dense_curve(values: list[float], target: float) -> None:
    positions = np.arange(len(values), dtype=float)
    found = first_crossing(positions.tolist(), values, target, True)
    assert found == first_crossing(
        positions.tolist(), [-value for value in values], -target, lower_is_better=False
    )
    if min(values) > target:
        assert found is None
        return
    assert found is not None
    first = next(index for index, value in enumerate(values) if value <= target)
    assert found.resolved == (first != 1)
    if first < 2:
        assert found.position == first
    else:
        assert first - 1 <= found.position <= first
        assert np.interp(found.position, positions, values) == pytest.approx(target, abs=1e-6)


def test_bootstrap_against_all_resamples() -> None:
    values = [1.0, 2.0, 6.0]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=3)]
    found = bootstrap(values)
    assert found.value == pytest.approx(3)
    ends = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert [found.low, found.high] == pytest.approx(ends.tolist())
    assert bootstrap(values) == found


@given(st.lists(numbers, min_size=2, max_size=8))
def test_bootstrap_stays_within_the_sample(values: list[float]) -> None:
    found = bootstrap(values)
    assert min(values) - 1e-9 <= found.low <= found.value <= found.high <= max(values) + 1e-9


def test_one_seed_has_no_interval() -> None:
    found = bootstrap([2.0])
    assert found.value == 2
    assert math.isnan(found.low)
    assert not found.contains(2.0)


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


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=2, max_size=6))
def test_ratios_turn_around(pairs: list[tuple[float, float]]) -> None:
    first = {seed: pair[0] for seed, pair in enumerate(pairs)}
    second = {seed: pair[1] for seed, pair in enumerate(pairs)}
    there, back = paired_ratio(first, second), paired_ratio(second, first)
    assert there is not None
    assert back is not None
    assert there.value * back.value == pytest.approx(1)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low), rel=1e-3)


def test_spread_has_no_mean_where_one_seed_has_no_value() -> None:
    assert Spread({1: 2.0, 2: 4.0}).mean == 3
    censored = Spread({1: 2.0}, censored=1)
    assert (censored.mean, censored.lowest, censored.highest) == (None, 2.0, 2.0)
    assert Spread({}).lowest is None


def test_rank_tells_ties_from_differences() -> None:
    figures = {
        "far": Spread({1: 5.0, 2: 5.1, 3: 5.2}),
        "best": Spread({1: 1.0, 2: 1.1, 3: 1.2}),
        "near": Spread({1: 0.9, 2: 1.3, 3: 1.3}),
        "censored": Spread({1: 0.1}, censored=2),
    }
    ranking = rank(figures, lower_is_better=True)
    assert ranking is not None
    assert (ranking.best, ranking.ties) == ("best", ("near",))
    ranking = rank(figures, lower_is_better=False, noise=10)
    assert ranking is not None
    assert (ranking.best, set(ranking.ties)) == ("far", {"best", "near"})
    assert rank({"censored": figures["censored"]}, True) is None


def test_a_bound_is_compared_with_nothing() -> None:
    figures = {
        "best": Spread({1: 10.0, 2: 11.0, 3: 12.0}),
        "bounded": Spread({1: 48.0, 2: 48.0, 3: 48.0}, bounded=frozenset({1, 2, 3})),
        "slow": Spread({1: 100.0, 2: 110.0, 3: 120.0}),
    }
    ranking = rank(figures, lower_is_better=True, as_ratio=True)
    assert ranking is not None
    # It was reached before 48, perhaps before 10.
    assert (ranking.best, ranking.ties) == ("best", ("bounded",))
    del figures["best"]
    ranking = rank(figures, lower_is_better=True, as_ratio=True)
    assert ranking is not None
    assert (ranking.best, ranking.ties) == ("bounded", ())
    assert Spread({1: 48.0, 2: 60.0}, bounded=frozenset({1})).resolved == {2: 60.0}


def test_interval_contains_its_ends() -> None:
    assert Interval(1, 0, 2).contains(2)
