"""Means, medians and Adam, against numpy and Flower."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

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
ONE: Any = {"metrics": MetricRecord({"num-examples": 1})}
RANDOM = np.random.default_rng(0)


def _answer(values: FloatArray) -> Answer:
    return Answer(bytes(16), 0, 0, 4, 0.0, np.zeros(2, np.float32), values)


def _changes(count: int) -> FloatArray:
    return RANDOM.normal(size=(count, SIZE)).astype(np.float32)


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


@pytest.mark.parametrize("average", ["fedavg", "fedprox"])
@pytest.mark.parametrize("combine", ["mean", "trimmed", "median"])
@pytest.mark.parametrize("devices", [4, 7])
def test_every_device_has_the_same_say(average: Any, combine: Any, devices: int, tmp_path: Path) -> None:
    changes = _changes(devices)
    plan = Plan(estimator="exact", average=average, combine=combine)
    found = combined_change(changes, plan, tmp_path, 0)
    np.testing.assert_allclose(found, _expected(changes, combine), rtol=1e-5, atol=1e-7)
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


def test_a_liars_scalars_weigh_no_more_than_an_honest_devices() -> None:
    """And its answer costs the mean of the honest ones a share of one device, whatever it holds."""
    honest = _changes(3)
    lengths = np.linalg.norm(honest, axis=1)
    for lie in (_changes(1), 1e6 * _changes(1), np.full((1, SIZE), 0.0), np.full((1, SIZE), -999_999.0)):
        table = np.concatenate([honest, lie.astype(np.float32)])
        most = np.median(np.linalg.norm(table, axis=1))
        expected = (honest * np.minimum(1, most / lengths)[:, None]).sum(0) / 4
        found = combined_scalars(table, Plan(combine="trimmed"))
        assert np.linalg.norm(found - expected) <= most / 4 * (1 + 1e-5)
    assert np.array_equal(combined_scalars(honest, Plan()), middle(honest, Plan()))


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


def test_fedadam_is_flowers_and_remembers_its_moments_between_servers(tmp_path: Path) -> None:
    """Which knows no other way than to average devices' arrays itself."""
    plan = Plan(estimator="exact", average="fedadam", server_rate=0.1)
    flower: Any = FedAdam(eta=0.1)
    values = np.zeros(SIZE, np.float32)
    for step, changes in enumerate(_changes(6).reshape(3, 2, SIZE)):
        flower.current_arrays = {"all": values}
        told = [
            _Reply(RecordDict({"arrays": ArrayRecord({"all": Array(values + own)}), **ONE}))
            for own in changes
        ]
        arrays, _ = flower.aggregate_train(step + 1, told)
        values = values + combined_change(changes, plan, tmp_path, step)
        np.testing.assert_allclose(values, arrays["all"].numpy(), rtol=1e-4, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "averaging-000002.safetensors",
        "averaging-000003.safetensors",
    ]


@dataclass(frozen=True)
class _Reply:
    """What a strategy of Flower's reads of a message."""

    content: RecordDict

    def has_error(self) -> bool:
        """Whether the device failed."""
        return False


def test_two_answers_are_never_shortened() -> None:
    answers = {1: _answer(np.ones(4, np.float32)), 2: _answer(np.full(4, 1000, np.float32))}
    assert shortened_answers(answers, Plan())[1] == []
    answers[3] = _answer(np.ones(4, np.float32))
    cut, whose = shortened_answers(answers, Plan(outlier=4.0))
    assert whose == [2]
    np.testing.assert_allclose(np.linalg.norm(cut[2].values), 4 * 2, rtol=1e-5)
