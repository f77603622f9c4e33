"""Tests of how much one example can change a report, and of the noise that hides it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.fleet.agreement import Plan
from device_runner.fleet.local_round import CyclicRows
from device_runner.fleet.privacy.reported import (
    ReportingEstimator,
    budget_refusal,
    grid,
    max_participations,
    part_norm,
    sensitivity,
    system_noise,
    whole_sum,
)
from prge.engine import Engine, TokenSequence
from prge.model_spec import AdaptedModule
from prge.objectives.examples import Example
from prge.training.estimators.protocol import Measurement, Step
from prge.training.estimators.tangents import TangentEstimator

MODULES = [AdaptedModule("layer", 2, 4, 6)]


class _Measured(TangentEstimator):
    """An estimator that returns a given measurement."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(3, shared=True)
        self._measurement = measurement
        self.steps: list[Step] = []

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Return the given measurement."""
        self.steps.append(step)
        return self._measurement


def _measured(queries: int = 3, examples: int = 4) -> Measurement:
    projected_gradients = np.random.default_rng(0).normal(size=(queries, examples))
    return Measurement(0.7, projected_gradients, None, 0.1)


@given(
    st.integers(0, 2**32),
    st.integers(0, 40),
    st.integers(1, 12),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_participations_are_bounded_and_no_step_has_a_row_twice(
    seed: int, steps: int, examples: int, windows: list[int]
) -> None:
    """This holds for any number of windows, and wherever in its order a device begins."""
    sampler = CyclicRows(_split(windows), examples, seed)
    sampler.offset = seed % 7
    counts = [Counter(example.row for example in sampler.examples_at(step)) for step in range(steps)]
    assert all(count == 1 for each in counts for count in each.values())
    together, rows = sum(counts, Counter[int]()), len(windows)
    assert max(together.values(), default=0) == max_participations(steps, min(examples, rows), rows)


def test_windows_of_a_row_take_turns_and_none_is_lost() -> None:
    sampler = CyclicRows(_split([3, 1]), 2, seed=4)
    chosen = [example for step in range(3) for example in sampler.examples_at(step)]
    assert Counter(example.sequences[0].tokens for example in chosen) == {
        (0, 0): 1, (0, 1): 1, (0, 2): 1, (1, 0): 3
    }  # fmt: skip


def _split(windows: list[int]) -> list[Example]:
    """Build rows with these numbers of windows; a window's tokens are its row and number."""
    return [
        Example(row, (TokenSequence((row, window), ()),), 2, 0)
        for row, count in enumerate(windows)
        for window in range(count)
    ]


def test_a_bound_of_zero_means_no_bound() -> None:
    assert budget_refusal(100.0, 0.0) == "" and budget_refusal(3.0, 4.0) == ""
    assert "at most 4" in budget_refusal(4.1, 4.0)
    assert "inf after this round, because earlier rounds had no noise" in budget_refusal(math.inf, 4.0)


anything = st.lists(st.lists(st.floats(), min_size=3, max_size=3), min_size=1, max_size=4)


@given(anything, st.integers(0, 3), st.floats(1e-3, 1e6), st.floats(1e-6, 1e6))
def test_a_contribution_changes_the_sum_by_at_most_the_norm(
    parts: list[list[float]], which: int, noise: float, norm: float
) -> None:
    """The bound holds exactly, because sums are integers, whatever the other rows are."""
    unit = noise * norm / 2**20
    whole = np.array(parts)
    without = whole.copy()
    without[which % len(parts)] = 0
    change = whole_sum(whole, norm, unit) - whole_sum(without, norm, unit)
    assert sum(int(each) ** 2 for each in change) <= (norm / unit) ** 2
    assert change.tolist() == whole_sum(whole[[which % len(parts)]], norm, unit).tolist()


def test_contributions_within_the_norm_are_not_clipped() -> None:
    assert whole_sum(np.array([[0.5, -0.25], [0.1, 0.0]]), 1.0, 2.0**-20).tolist() == [
        2**19 - 1 + math.floor(0.1 * 2**20),
        -(2**18) + 1,
    ]


@pytest.mark.parametrize("unit", ["row", "owner"])
@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_noise_is_relative_to_the_sensitivity(unit: Any, estimator: Any) -> None:
    plan = Plan(
        estimator=estimator, queries=3, max_grad_norm=2.0, noise=0.5, unit=unit, share_directions=True
    )
    norm = 2.0 * math.sqrt(3) if estimator == "tangent" else 2.0
    assert part_norm(plan) == norm
    assert sensitivity(plan) == pytest.approx(norm / (4 if unit == "row" else 1))
    assert grid(plan) * 2**20 / 4 == pytest.approx(0.5 * sensitivity(plan))


def _report(plan: Plan, measurement: Measurement, draw: Any = system_noise) -> Measurement:
    nothing: Any = None
    step = Step(nothing, [nothing], 0, 0)
    return ReportingEstimator(_Measured(measurement), plan, draw).measure(nothing, step)


def test_a_mean_over_examples_has_the_gradient_of_them_all() -> None:
    measured = _measured()
    report = _report(Plan(share_directions=True, queries=3), measured)
    assert report.projected_gradients.shape == (3, 1) and report.loss == 0.7
    estimator = _Measured(measured)
    one, all_ = (
        estimator.gradient({"projected_gradients": each.projected_gradients}, 1, 2, MODULES)
        for each in (report, measured)
    )
    np.testing.assert_allclose(one, all_, rtol=1e-5, atol=1e-7)


def test_the_report_is_what_a_message_carries() -> None:
    report = _report(Plan(), _measured(4))
    assert np.array_equal(report.projected_gradients, report.projected_gradients.astype(np.float32))
    assert report.projected_gradients.shape == (4, 4)


@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_noise_has_the_plans_deviation_and_hides_the_loss(estimator: Any) -> None:
    plan = Plan(estimator=estimator, share_directions=True, queries=3, max_grad_norm=2.0, noise=0.5)
    measured = _measured()
    if estimator == "exact":
        measured = Measurement(0.7, np.zeros(0), None, 0.1, gradient=np.zeros(12, np.float32))
    report = _report(plan, measured, lambda count: np.full(count, 2**20))
    silent = _report(plan, measured, lambda count: np.zeros(count, np.int64))
    added = (report.derivatives - silent.derivatives).ravel()
    norm = 2.0 * math.sqrt(3) if estimator == "tangent" else 2.0
    np.testing.assert_allclose(added, 0.5 * norm / 4, rtol=1e-5)
    assert report.loss == 0.0 and report.largest_tangent is None


def test_each_example_of_a_noisy_exact_step_is_measured_separately() -> None:
    """An exact gradient is clipped per example; projected gradients are per example already."""
    nothing: Any = None
    step = Step(nothing, _split([1, 1, 1, 1]), 0, 0)
    gradient = np.full(12, 0.1, np.float32)
    inner = _Measured(Measurement(0.7, np.zeros(0), None, 0.1, gradient=gradient))
    plan = Plan(estimator="exact", max_grad_norm=2.0, noise=0.5)
    report = ReportingEstimator(inner, plan, lambda count: np.zeros(count, np.int64)).measure(nothing, step)
    assert [each.examples for each in inner.steps] == [[example] for example in step.examples]
    np.testing.assert_allclose(report.derivatives, gradient, rtol=1e-4)
    tangents = _Measured(_measured())
    plan = Plan(share_directions=True, queries=3, max_grad_norm=2.0, noise=0.5)
    ReportingEstimator(tangents, plan).measure(nothing, step)
    assert [each.examples for each in tangents.steps] == [step.examples]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_with_noise_a_result_is_finite_for_any_row(estimator: Any, value: float) -> None:
    plan = Plan(estimator=estimator, share_directions=True, queries=3, max_grad_norm=2.0, noise=0.5)
    measured = _measured()
    if estimator == "exact":
        gradient = np.array([value] * 12, np.float32)
        measured = Measurement(value, np.zeros(0), None, 0.1, gradient=gradient)
    else:
        measured.projected_gradients[1, 2] = value
    report = _report(plan, measured)
    assert np.isfinite(report.derivatives).all() and report.loss == 0.0
