"""Projected gradients and gradients against derivatives in closed form, including their sign."""

from __future__ import annotations

import numpy as np
import pytest

from prge.engine import Call, Float64Array
from prge.formats.adapter import Adapter
from prge.objectives.examples import Example
from prge.training.estimators.differences import Antithetic, Differences, FiniteDifference, OneSided
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Step
from prge.training.sampler import Sampler
from tests.numpy_engine import NumpyEngine, compute_losses, make_nonzero_adapter
from tests.rows import random_completions

SEED, STEP = 3, 5


def _examples(count: int = 4) -> list[Example]:
    return Sampler(random_completions(12), count, SEED).batch(STEP)


def _projected_gradients(
    engine: NumpyEngine, rule: FiniteDifference, adapter: Adapter, count: int = 4
) -> np.ndarray:
    return Differences(rule).measure(engine, Step(adapter, _examples(count), SEED, STEP)).projected_gradients


@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize(
    "rule, tolerance",
    [
        (Antithetic(4, 1e-3), 1e-4),
        (OneSided(4, 1e-4, normalize=False), 5e-3),
    ],
)
def test_projected_gradients_are_directional_derivatives(
    rule: FiniteDifference, tolerance: float, count: int
) -> None:
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    exact = Exact().measure(engine, Step(adapter, _examples(count), SEED, STEP)).gradient
    assert exact is not None
    directions = DirectionSampler(SEED, STEP, adapter.size)
    expected = [directions(query) @ exact for query in range(4)]
    np.testing.assert_allclose(_projected_gradients(engine, rule, adapter, count), expected, atol=tolerance)


@pytest.mark.parametrize("rule", [Antithetic(3, 1e-2), OneSided(3, 1e-2)])
def test_all_perturbations_of_a_step_are_copies_of_one_call(rule: FiniteDifference) -> None:
    calls: list[Call] = []

    class Watching(NumpyEngine):
        def forward(self, call: Call) -> Float64Array:
            calls.append(call)
            return super().forward(call)

    engine = Watching()
    adapter = make_nonzero_adapter(engine)
    result = Differences(rule).measure(engine, Step(adapter, _examples(), SEED, STEP))
    (call,) = calls
    directions = DirectionSampler(SEED, STEP, adapter.size)
    for copy, variant in zip(call.adapters, rule.perturbations(), strict=True):
        moved = adapter.values + np.float32(variant.scale) * directions(variant.query)
        np.testing.assert_array_equal(copy, moved)
    losses = [compute_losses(engine, copy, _examples()).mean() for copy in call.adapters]
    np.testing.assert_allclose(
        result.projected_gradients, rule.projected_gradients(np.array(losses)), rtol=1e-9
    )
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-12) and result.engine_seconds == 1


def test_normalized_step_divides_by_the_deviation_of_the_losses() -> None:
    perturbed = np.array([1.0, 2.0, 6.0])
    result = OneSided(3, 0.5).projected_gradients(np.array([0.5, *perturbed]))
    np.testing.assert_allclose(result, (perturbed - 0.5) / perturbed.std())


def test_a_normalized_step_is_0_if_all_losses_are_equal() -> None:
    assert OneSided(3, 0.5).projected_gradients(np.ones(4)).tolist() == [0, 0, 0]


def test_gradient_is_the_mean_of_projected_gradient_times_direction() -> None:
    projected_gradients = [0.5, -2.0, 3.0]
    modules = NumpyEngine().model.modules
    result = Differences(Antithetic(3, 1e-2)).gradient(
        {"projected_gradients": projected_gradients}, 1, 2, modules
    )
    directions = DirectionSampler(1, 2, len(result))
    expected = sum(s * directions(i).astype(np.float64) for i, s in enumerate(projected_gradients)) / 3
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 10.0])
def test_antithetic_differences_are_exact_on_a_quadratic(epsilon: float) -> None:
    """f(b) = b.H.b / 2 + g.b: the even part cancels for every step size; the sign is the derivative's."""
    random = np.random.default_rng(4)
    root = random.normal(size=(20, 20))
    hessian, gradient, at = root @ root.T, random.normal(size=20), random.normal(size=20)

    def f(b: np.ndarray) -> float:
        return float(b @ hessian @ b / 2 + gradient @ b)

    rule = Antithetic(6, epsilon)
    directions = DirectionSampler(SEED, STEP, 20)
    values = np.array([f(at + v.scale * directions(v.query)) for v in rule.perturbations()])
    exact = [directions(query) @ (hessian @ at + gradient) for query in range(6)]
    np.testing.assert_allclose(rule.projected_gradients(values), exact, rtol=1e-7, atol=1e-7)


def test_one_sided_differences_keep_half_of_the_curvature() -> None:
    """f(b) = b.b / 2 at 0: the derivative is 0, the difference eps * dimension / 2."""
    rule = OneSided(1, 0.1, normalize=False)
    direction = DirectionSampler(SEED, STEP, 20)(0)
    values = np.array([np.sum((v.scale * direction) ** 2) / 2 for v in rule.perturbations()])
    np.testing.assert_allclose(rule.projected_gradients(values), [0.1 * 20 / 2], rtol=1e-5)


def test_clipping_bounds_the_projected_gradients_of_a_step() -> None:
    engine = NumpyEngine()
    rule = Antithetic(4, 1e-2)
    step = Step(make_nonzero_adapter(engine), _examples(), SEED, STEP)
    whole, shrunk = (
        Differences(rule, max_grad_norm=limit).measure(engine, step).projected_gradients
        for limit in (0.0, 0.1)
    )
    assert np.sqrt((shrunk**2).mean()) == pytest.approx(0.1)
    np.testing.assert_allclose(shrunk / shrunk[0], whole / whole[0])


def test_root_mean_square_of_the_projected_gradients_is_the_norm_of_the_gradient() -> None:
    gradient = np.random.default_rng(6).normal(size=200)
    directions = DirectionSampler(SEED, STEP, 200)
    projected_gradients = np.array([directions(query) @ gradient for query in range(4000)])
    assert np.sqrt((projected_gradients**2).mean()) == pytest.approx(np.linalg.norm(gradient), rel=0.05)
