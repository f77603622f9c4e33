"""What one example can change of a report, and what noise hides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.fleet.agreement import Plan
from device_runner.fleet.privacy import Reported, passes, reach, spent, system_normals
from prge.contract import AdaptedModule
from prge.estimators import Measurement, clipped
from prge.tangents import Tangents

MODULES = [AdaptedModule("layer", 2, 4, 6)]


class _Measured(Tangents):
    """Tangents that were measured before."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(shared=True)
        self._measurement = measurement

    def measure(self, *_: Any) -> Measurement:
        """What was measured."""
        return self._measurement


def _measured(queries: int = 3, examples: int = 4) -> Measurement:
    scalars = np.random.default_rng(0).normal(size=(queries, examples))
    return Measurement(0.7, scalars, None, 0.1, 12)


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 1000))
def test_no_row_takes_part_more_often_than_counted(steps: int, examples: int, rows: int) -> None:
    taken = np.bincount(np.arange(steps * examples) % rows, minlength=rows)
    assert taken.max() == passes(steps, examples, rows)


def test_a_bound_of_zero_is_none() -> None:
    assert spent(100.0, 0.0) == "" and spent(3.0, 4.0) == ""
    assert "at most 4" in spent(4.1, 4.0)


@given(st.integers(1, 12), st.floats(0.1, 10), st.integers(0, 2**32))
def test_an_example_changes_a_report_by_no_more_than_its_reach(queries: int, clip: float, seed: int) -> None:
    plan = Plan(queries=queries, clip=clip, share_directions=True, examples=4)
    random = np.random.default_rng(seed)
    scalars = clipped(random.normal(size=(queries, 4)) * random.lognormal(0, 3, 4), clip)
    without = scalars.copy()
    without[:, 0] = 0
    assert np.linalg.norm(scalars.mean(1) - without.mean(1)) <= reach(plan) * (1 + 1e-9)


def test_normals_of_the_system_are_normal_and_never_the_same() -> None:
    drawn = system_normals(20_001)
    assert drawn.shape == (20_001,) and abs(drawn.mean()) < 0.05 and abs(drawn.std() - 1) < 0.05
    assert not np.array_equal(drawn, system_normals(20_001))


def _report(plan: Plan, measurement: Measurement, draw: Any = system_normals) -> Measurement:
    nothing: Any = None
    return Reported(_Measured(measurement), plan, draw).measure(nothing, nothing)


def test_a_mean_over_examples_has_the_gradient_of_them_all() -> None:
    measured = _measured()
    told = _report(Plan(share_directions=True, queries=3), measured)
    assert told.scalars.shape == (3, 1) and told.loss == 0.7
    estimator = _Measured(measured)
    one, all_ = (estimator.gradient({"scalars": each.scalars}, 1, 2, MODULES) for each in (told, measured))
    np.testing.assert_allclose(one, all_, rtol=1e-5, atol=1e-7)


def test_what_is_told_is_what_a_message_carries() -> None:
    told = _report(Plan(), _measured(4))
    assert np.array_equal(told.scalars, told.scalars.astype(np.float32))
    assert told.scalars.shape == (4, 4)


@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_noise_has_the_deviation_that_was_agreed_on_and_hides_the_loss(estimator: Any) -> None:
    plan = Plan(estimator=estimator, share_directions=True, queries=3, clip=2.0, noise=0.5)
    measured = _measured()
    if estimator == "exact":
        measured = Measurement(0.7, np.zeros(0), None, 0.1, 12, gradient=np.zeros(12, np.float32))
    told = _report(plan, measured, lambda count: np.ones(count, np.float32))
    added = told.scalars[:, 0] - measured.scalars.mean(1) if told.gradient is None else told.gradient
    norm = 2.0 * math.sqrt(3) if estimator == "tangent" else 2.0
    np.testing.assert_allclose(added, 0.5 * norm / 4, rtol=1e-5)
    assert told.loss == 0.0
