"""Tests of aggregation against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from device_runner.fleet.aggregation import (
    aggregate,
    aggregate_projected_gradients,
    find_opposed_results,
    shorten_outliers,
)
from device_runner.fleet.agreement import Plan
from device_runner.fleet.messages import RoundResult
from prge.engine import FloatArray

SIZE = 40
RANDOM = np.random.default_rng(0)


def _answer(values: FloatArray) -> RoundResult:
    return RoundResult(bytes(16), 0, 0, 4, 0.0, np.zeros(2, np.float32), values)


def _changes(count: int) -> FloatArray:
    return RANDOM.normal(size=(count, SIZE)).astype(np.float32)


def _expected(values: FloatArray, combine: str) -> Any:
    return {
        "mean": lambda: values.mean(0),
        "trimmed": lambda: _trimmed(values),
        "median": lambda: np.median(values, 0),
    }[combine]()


def _trimmed(values: FloatArray) -> Any:
    """Return the trimmed mean: of the middle two of four values, or the middle three of seven."""
    cut = {4: 1, 7: 2}[len(values)]
    return np.array([np.mean(sorted(column)[cut:-cut]) for column in values.T])


@pytest.mark.parametrize("combine", ["mean", "trimmed", "median"])
@pytest.mark.parametrize("devices", [4, 7])
def test_every_device_has_the_same_weight(combine: Any, devices: int) -> None:
    changes = _changes(devices)
    result = aggregate(changes, Plan(estimator="exact", combine=combine))
    np.testing.assert_allclose(result, _expected(changes, combine), rtol=1e-5, atol=1e-7)


def test_less_than_a_third_of_the_devices_moves_no_value_beyond_the_others() -> None:
    honest = _changes(7)
    for combine in ("trimmed", "median"):
        for value in (1e6, -1e6, 0.0):
            table = np.concatenate([honest, np.full((3, SIZE), value, np.float32)])
            result = aggregate(table, Plan(combine=combine))
            assert np.all((honest.min(0) <= result) & (result <= honest.max(0)))
    table = np.concatenate([honest, np.full((3, SIZE), 1e6, np.float32)])
    assert np.all(aggregate(table, Plan(combine="mean")) > honest.max(0))


def test_a_malicious_device_has_no_more_weight_than_an_honest_one() -> None:
    """Whatever a device's result holds, its influence on the mean is that of one device."""
    honest = _changes(3)
    lengths = np.linalg.norm(honest, axis=1)
    for changes in (_changes(1), 1e6 * _changes(1), np.full((1, SIZE), 0.0), np.full((1, SIZE), -999_999.0)):
        table = np.concatenate([honest, changes.astype(np.float32)])
        median_norm = np.median(np.linalg.norm(table, axis=1))
        expected = (honest * np.minimum(1, median_norm / lengths)[:, None]).sum(0) / 4
        result = aggregate_projected_gradients(table, Plan(combine="trimmed"))
        assert np.linalg.norm(result - expected) <= median_norm / 4 * (1 + 1e-5)
    assert np.array_equal(aggregate_projected_gradients(honest, Plan()), aggregate(honest, Plan()))


def test_a_result_with_flipped_sign_is_detected_in_the_noise() -> None:
    """A sign flip is detected from the whole result if single values are mostly noise."""
    random, plan = np.random.default_rng(7), Plan(combine="trimmed")
    signs: dict[int, float] = {}
    result = []
    for _ in range(12):
        signal = random.normal(size=1280)
        honest = 0.3 * signal + random.normal(size=(4, 1280))
        honest[3] *= -1
        answers = {node: _answer(values.astype(np.float32)) for node, values in enumerate(honest)}
        opposed, new_signs = find_opposed_results(answers, plan, signs)
        signs |= new_signs
        result.append(opposed)
    assert result.count([3]) >= 8 and result.count([]) == 12 - result.count([3])
    assert find_opposed_results(answers, Plan(combine="mean"), signs) == ([], {})


def test_devices_without_signal_seldom_oppose_each_other() -> None:
    random, plan = np.random.default_rng(7), Plan(combine="trimmed")
    signs: dict[int, float] = {}
    count = 0
    for _ in range(100):
        answers = {node: _answer(random.normal(size=320).astype(np.float32)) for node in range(10)}
        opposed, new_signs = find_opposed_results(answers, plan, signs)
        signs |= new_signs
        count += len(opposed)
    assert count < 50  # of 1,000


def test_two_results_are_never_scaled_down() -> None:
    answers = {1: _answer(np.ones(4, np.float32)), 2: _answer(np.full(4, 1000, np.float32))}
    assert shorten_outliers(answers, Plan())[1] == []
    answers[3] = _answer(np.ones(4, np.float32))
    cut, whose = shorten_outliers(answers, Plan(outlier=4.0))
    assert whose == [2]
    np.testing.assert_allclose(np.linalg.norm(cut[2].values), 4 * 2, rtol=1e-5)
