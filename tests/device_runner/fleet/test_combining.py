"""Means, medians and Flower's strategies, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.fleet.agreement import Plan
from device_runner.fleet.combining import combined_change, combined_scalars, shortened_answers
from device_runner.fleet.messages import Answer
from prge.engine import FloatArray

SIZE = 40
RANDOM = np.random.default_rng(0)


def _answer(values: FloatArray, examples: int = 4, places: Any = None) -> Answer:
    return Answer(bytes(16), 0, 0, 0, examples, 0.0, np.zeros(2, np.float32), values, places)


def _changes(count: int) -> FloatArray:
    return RANDOM.normal(size=(count, SIZE)).astype(np.float32)


@pytest.mark.parametrize("combine", ["mean", "median"])
def test_common_directions_combine_step_by_step(combine: Any) -> None:
    plan = Plan(local_steps=2, queries=5, share_directions=True, combine=combine)
    values = RANDOM.normal(size=(3, 10)).astype(np.float32)
    found = combined_scalars([_answer(own) for own in values], plan)
    middle = {"mean": np.mean, "median": np.median}[combine]
    np.testing.assert_allclose(found[:, 0], middle(values, 0).reshape(2, 5), rtol=1e-6)


def test_own_directions_stay_apart() -> None:
    plan = Plan(local_steps=2, queries=5, share_directions=True, directions="own")
    values = RANDOM.normal(size=(3, 10)).astype(np.float32)
    found = combined_scalars([_answer(own) for own in values], plan)
    assert found.shape == (2, 3, 5)
    assert np.array_equal(found[1, 2], values[2, 5:])


@pytest.mark.parametrize("average", ["fedavg", "fedprox"])
def test_averages_are_weighted_by_examples(average: Any, tmp_path: Path) -> None:
    plan = Plan(estimator="exact", average=average)
    values, changes = np.ones(SIZE, np.float32), _changes(2)
    answers = [_answer(changes[0], 1), _answer(changes[1], 3)]
    found = combined_change(answers, plan, values, tmp_path, 0)
    np.testing.assert_allclose(found, (changes[0] + 3 * changes[1]) / 4, rtol=1e-4, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_fedadam_remembers_its_moments_between_servers(tmp_path: Path) -> None:
    """Reddi et al. 2021, algorithm 2, as Flower has it: beta1 0.9, beta2 0.99, tau 1e-3, bias corrected."""
    plan = Plan(estimator="exact", average="fedadam", server_rate=0.1)
    values = np.zeros(SIZE, np.float32)
    first, second = np.zeros(SIZE), np.zeros(SIZE)
    for step, changes in enumerate(_changes(6).reshape(3, 2, SIZE)):
        found = combined_change([_answer(own) for own in changes], plan, values, tmp_path, step)
        delta = changes.mean(0)
        first = 0.9 * first + 0.1 * delta
        second = 0.99 * second + 0.01 * delta**2
        rate = 0.1 * np.sqrt(1 - 0.99 ** (step + 2)) / (1 - 0.9 ** (step + 2))
        np.testing.assert_allclose(found, rate * first / (np.sqrt(second) + 1e-3), rtol=2e-2, atol=1e-4)
        values = values + found
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "averaging-000002.safetensors",
        "averaging-000003.safetensors",
    ]


def test_the_largest_values_go_back_to_their_places(tmp_path: Path) -> None:
    places = np.array([3, 30], np.uint32)
    answer = _answer(np.array([5.0, -2.0], np.float32), places=places)
    found = combined_change([answer], Plan(estimator="exact"), np.zeros(SIZE, np.float32), tmp_path, 0)
    assert found.nonzero()[0].tolist() == [3, 30] and found[30] == -2


def test_two_answers_are_never_shortened() -> None:
    answers = {1: _answer(np.ones(4, np.float32)), 2: _answer(np.full(4, 1000, np.float32))}
    assert shortened_answers(answers, Plan())[1] == []
    answers[3] = _answer(np.ones(4, np.float32))
    cut, whose = shortened_answers(answers, Plan(outlier=4.0))
    assert whose == [2]
    np.testing.assert_allclose(np.linalg.norm(cut[2].values), 4 * 2, rtol=1e-5)
