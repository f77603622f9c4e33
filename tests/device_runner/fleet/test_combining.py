"""Means, medians and Flower's strategies, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.fleet.agreement import Plan
from device_runner.fleet.combining import (
    combined_change,
    combined_scalars,
    middle,
    opposed_answers,
    shortened_answers,
)
from device_runner.fleet.messages import Answer
from prge.engine import FloatArray

SIZE = 40
RANDOM = np.random.default_rng(0)


def _answer(values: FloatArray, examples: int = 4, places: Any = None) -> Answer:
    return Answer(bytes(16), 0, 0, 0, examples, 0.0, np.zeros(2, np.float32), values, places)


def _changes(count: int) -> FloatArray:
    return RANDOM.normal(size=(count, SIZE)).astype(np.float32)


@pytest.mark.parametrize("combine", ["mean", "trimmed", "median"])
def test_common_directions_combine_step_by_step(combine: Any) -> None:
    plan = Plan(local_steps=2, queries=5, share_directions=True, combine=combine)
    values = RANDOM.normal(size=(4, 10)).astype(np.float32)
    found = combined_scalars([_answer(own) for own in values], plan)
    np.testing.assert_allclose(found[:, 0], _expected(values, combine).reshape(2, 5), rtol=1e-6)


def _expected(values: FloatArray, combine: str) -> Any:
    return {
        "mean": lambda: values.mean(0),
        "trimmed": lambda: _trimmed(values),
        "median": lambda: np.median(values, 0),
    }[combine]()


def _trimmed(values: FloatArray) -> Any:
    """The oracle: of four numbers the two in the middle, of seven the three."""
    cut = {4: 1, 7: 2}[len(values)]
    return np.array([np.mean(sorted(column)[cut:-cut]) for column in values.T])


def test_own_directions_stay_apart() -> None:
    plan = Plan(local_steps=2, queries=5, share_directions=True, directions="own")
    values = RANDOM.normal(size=(3, 10)).astype(np.float32)
    found = combined_scalars([_answer(own) for own in values], plan)
    assert found.shape == (2, 3, 5)
    assert np.array_equal(found[1, 2], values[2, 5:])


@pytest.mark.parametrize("average", ["fedavg", "fedprox"])
@pytest.mark.parametrize("combine", ["mean", "trimmed", "median"])
def test_every_device_has_the_same_say(average: Any, combine: Any, tmp_path: Path) -> None:
    """Whatever number of examples it claims."""
    plan = Plan(estimator="exact", average=average, combine=combine)
    values, changes = np.ones(SIZE, np.float32), _changes(7)
    answers = [_answer(own, examples) for own, examples in zip(changes, (1, 10**9, *[4] * 5), strict=True)]
    found = combined_change(answers, plan, values, tmp_path, 0)
    np.testing.assert_allclose(found, _expected(changes, combine), rtol=1e-4, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_less_than_a_third_moves_no_number_beyond_what_the_others_say() -> None:
    honest = _changes(7)
    for combine in ("trimmed", "median"):
        for lie in (1e6, -1e6, 0.0):
            table = np.concatenate([honest, np.full((3, SIZE), lie, np.float32)])
            found = middle(table, Plan(combine=combine))
            assert np.all((honest.min(0) <= found) & (found <= honest.max(0)))
    table = np.concatenate([honest, np.full((3, SIZE), 1e6, np.float32)])
    assert np.all(middle(table, Plan(combine="mean")) > honest.max(0))


def test_an_answer_with_the_wrong_sign_is_found_in_the_noise() -> None:
    """By its whole, where each number is mostly noise; and nobody honest is."""
    random, plan = np.random.default_rng(7), Plan(combine="trimmed")
    spoken: dict[int, float] = {}
    found = []
    for _ in range(12):
        signal = random.normal(size=1280)
        honest = 0.3 * signal + random.normal(size=(4, 1280))
        honest[3] *= -1
        answers = {node: _answer(values.astype(np.float32)) for node, values in enumerate(honest)}
        opposed, now = opposed_answers(answers, plan, spoken)
        spoken |= now
        found.append(opposed)
    assert found.count([3]) >= 8 and found.count([]) == 12 - found.count([3])
    assert opposed_answers(answers, Plan(combine="mean"), spoken) == ([], {})


def test_devices_without_any_signal_are_seldom_against_each_other() -> None:
    random, plan = np.random.default_rng(7), Plan(combine="trimmed")
    spoken: dict[int, float] = {}
    count = 0
    for _ in range(100):
        answers = {node: _answer(random.normal(size=320).astype(np.float32)) for node in range(10)}
        opposed, now = opposed_answers(answers, plan, spoken)
        spoken |= now
        count += len(opposed)
    assert count < 50  # of 1,000


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
