"""What one example can change of a report, and what noise hides."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.fleet.agreement import Plan
from device_runner.fleet.privacy import Reported, exposure, reach, spent, system_normals
from prge.contract import AdaptedModule
from prge.estimators import Measurement, clipped
from prge.examples import Example, TokenSequence
from prge.sampling import Sampler
from prge.tangents import Tangents
from tests.bundles import make_contract

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


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 12), st.integers(1, 30))
def test_exposure_is_that_of_the_worst_row(seed: int, steps: int, examples: int, rows: int) -> None:
    sequence = TokenSequence((1,), ())
    own = [Example(row, (sequence,), 2, 0) for row in range(rows)]
    sampler = Sampler(own, make_contract(batch_size=examples), seed)
    seen = [Counter(example.row for example in sampler.chosen(step)) for step in range(steps)]
    worst = max((sum(each[row] ** 2 for each in seen) for row in range(rows)), default=0)
    assert exposure(seed, steps, examples, rows) == worst


def test_a_row_that_comes_once_a_pass_counts_once_a_pass() -> None:
    assert exposure(7, steps=9, examples=4, rows=12) == 3
    assert exposure(7, steps=2, examples=4, rows=1) == 32


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
