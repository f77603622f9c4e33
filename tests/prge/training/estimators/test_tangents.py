"""Tangents against gradients in closed form: projected gradients, their mean, and the journal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest

from prge.engine import Call, Directions, Float64Array
from prge.formats.adapter import Adapter
from prge.objectives.classification_head import CrossFittedHeads
from prge.objectives.examples import Example
from prge.training.estimators import directions
from prge.training.estimators.directions import RankOneDirections, truncate_to_grid
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Measurement, Step
from prge.training.estimators.tangents import TangentEstimator
from prge.training.sampler import Sampler
from tests.numpy_engine import (
    MODULE,
    NumpyEngine,
    compute_losses,
    gradients_of,
    head_from_values,
    make_nonzero_adapter,
    random_head,
)
from tests.rows import EXAMPLES_BY_FORM as ROWS
from tests.rows import classification, random_completions

SEED, STEP, QUERIES = 3, 5, 3

CLASSES = [classification(row, [row % 7, row % 5, row % 3], 3, row % 3) for row in range(1, 12)]


def _examples(rows: Sequence[Example], count: int = 4) -> list[Example]:
    return Sampler(rows, count, SEED).batch(STEP)


def _rank_one(estimate: Measurement, adapter: Adapter, shared: bool = False) -> np.ndarray:
    """Return the step's directions as vectors, [queries, examples, size]."""
    queries, examples = estimate.projected_gradients.shape
    step = RankOneDirections(SEED, STEP, queries, examples, adapter.modules, shared)
    products = [np.einsum("qer,qeo->qero", u, v) for _, u, v in step.factors()]
    return np.concatenate([p.reshape(*p.shape[:2], -1) for p in products], -1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize("rows", ROWS)
def test_a_projected_gradient_is_the_derivative_of_its_example_along_its_direction(
    rows: str, count: int, shared: bool
) -> None:
    engine = NumpyEngine()
    adapter, examples = make_nonzero_adapter(engine), _examples(ROWS[rows], count)
    result = TangentEstimator(QUERIES, shared).measure(engine, Step(adapter, examples, SEED, STEP))
    exact = gradients_of(lambda values: compute_losses(engine, values, examples), adapter.values)
    expected = np.einsum("qes,es->qe", _rank_one(result, adapter, shared), exact)
    np.testing.assert_allclose(result.projected_gradients, expected, atol=2e-5)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(
        result.loss, compute_losses(engine, adapter.values, examples).mean(), rtol=1e-12
    )


@pytest.mark.parametrize("folds", [0, 2])
@pytest.mark.parametrize("count", [4, 8])
def test_projected_gradients_of_an_encoder(folds: int, count: int) -> None:
    engine = NumpyEngine(encoder=True)
    adapter, examples = make_nonzero_adapter(engine), _examples(CLASSES, count)
    head = CrossFittedHeads([random_head(1), random_head(2)]) if folds else random_head()
    result = TangentEstimator(QUERIES).measure(engine, Step(adapter, examples, SEED, STEP, head))
    exact = gradients_of(lambda values: compute_losses(engine, values, examples, head), adapter.values)
    expected = np.einsum("qes,es->qe", _rank_one(result, adapter), exact)
    np.testing.assert_allclose(result.projected_gradients, expected, atol=2e-5)
    assert result.head_gradient is None


def test_a_trained_head_gets_its_exact_gradient() -> None:
    engine = NumpyEngine(encoder=True)
    adapter, head, examples = make_nonzero_adapter(engine), random_head(), _examples(CLASSES, 8)
    result = TangentEstimator(QUERIES).measure(engine, Step(adapter, examples, SEED, STEP, head, head))
    expected = gradients_of(
        lambda values: compute_losses(engine, adapter.values, examples, head_from_values(values)).mean(),
        head.values,
    )
    assert result.head_gradient is not None
    np.testing.assert_allclose(result.head_gradient, expected, atol=1e-5)


def test_all_sign_combinations_together_give_the_exact_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of (u.G v) u v^T over all signs is G: nothing is left to chance, so nothing is left out."""
    combinations = np.array(list(itertools.product([-1, 1], repeat=2 + 3)), np.float32)
    engine = NumpyEngine(vocabulary=3, rank=2)
    adapter, examples = make_nonzero_adapter(engine), _examples(random_completions(8, vocabulary=3), 8)
    monkeypatch.setattr(
        directions, "rademacher", lambda seed, step, query, size: np.tile(combinations[query], size // 5)
    )
    estimator = TangentEstimator(len(combinations))
    result = estimator.measure(engine, Step(adapter, examples, SEED, STEP))
    exact = Exact().measure(engine, Step(adapter, examples, SEED, STEP)).gradient
    assert exact is not None
    np.testing.assert_allclose(
        estimator.gradient(result.journal_fields, SEED, STEP, adapter.modules), exact, atol=1e-5
    )


def test_one_direction_for_all_examples_is_the_derivative_of_the_mean_loss() -> None:
    engine = NumpyEngine()
    adapter, examples = make_nonzero_adapter(engine), _examples(random_completions(12))
    estimator = TangentEstimator(QUERIES, shared=True)
    result = estimator.measure(engine, Step(adapter, examples, SEED, STEP))
    exact = Exact().measure(engine, Step(adapter, examples, SEED, STEP)).gradient
    assert exact is not None
    along = _rank_one(result, adapter, shared=True)[:, 0]
    np.testing.assert_allclose(result.projected_gradients.mean(1), along @ exact, atol=1e-6)
    expected = (along * result.projected_gradients.mean(1)[:, None]).mean(0)
    gradient = estimator.gradient(result.journal_fields, SEED, STEP, adapter.modules)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_clipping_scales_the_examples_with_large_gradients() -> None:
    engine = NumpyEngine()
    step = Step(make_nonzero_adapter(engine), _examples(random_completions(12)), SEED, STEP)
    whole = TangentEstimator(QUERIES).measure(engine, step).projected_gradients
    size = np.sqrt((whole**2).mean(0))
    limit = float(np.median(size))
    result = TangentEstimator(QUERIES, max_grad_norm=limit).measure(engine, step).projected_gradients
    np.testing.assert_allclose(np.sqrt((result**2).mean(0)), np.minimum(size, limit), rtol=1e-6)
    np.testing.assert_allclose(result / result[0], whole / whole[0], rtol=1e-6)


class Watching(NumpyEngine):
    """Records its inputs and the largest derivative that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Call, Directions]] = []
        self.largest = 0.0

    def jvp(self, call: Call, directions: Directions) -> tuple[Float64Array, Float64Array]:
        self.given.append((call, directions))
        outputs, derivatives = super().jvp(call, directions)
        self.largest = max(self.largest, float(np.abs(derivatives).max()))
        return outputs, derivatives


def test_sequences_of_an_example_share_its_direction() -> None:
    """The examples have one sequence or two."""
    engine = Watching()
    adapter = make_nonzero_adapter(engine)
    examples = [*ROWS["longer candidates"][:2], ROWS["completions"][0], ROWS["longer candidates"][3]]
    result = TangentEstimator(QUERIES).measure(engine, Step(adapter, examples, SEED, STEP))
    ((_, u, v),) = RankOneDirections(SEED, STEP, QUERIES, 4, adapter.modules).factors()
    ((call, factors),) = engine.given
    assert len(call.sequences) == 7
    for name, factor in (("u", u), ("v", v)):
        for sequence, example in enumerate((0, 0, 1, 1, 2, 3, 3)):
            assert np.array_equal(factors[f"{name}.{MODULE}"][:, sequence], factor[:, example])
    assert result.projected_gradients.shape == (QUERIES, 4)


def test_the_adapter_is_passed_without_a_copy() -> None:
    engine = Watching()
    adapter = make_nonzero_adapter(engine)
    TangentEstimator(QUERIES).measure(engine, Step(adapter, _examples(random_completions(12)), SEED, STEP))
    ((call, _),) = engine.given
    assert np.shares_memory(call.adapters, adapter.values)


def test_a_step_is_one_call_whatever_its_examples() -> None:
    engine = NumpyEngine()
    step = Step(make_nonzero_adapter(engine), _examples(random_completions(12), 8), SEED, STEP)
    result = TangentEstimator(QUERIES).measure(engine, step)
    assert engine.calls == 1
    assert result.engine_seconds > 0


def test_the_largest_tangent_of_a_step_is_reported() -> None:
    engine = Watching()
    step = Step(make_nonzero_adapter(engine), _examples(random_completions(12), 12), SEED, STEP)
    result = TangentEstimator(QUERIES).measure(engine, step)
    assert result.largest_tangent == engine.largest > 0
    engine.weight[0, 0] = np.nan
    with np.errstate(invalid="ignore"):
        largest = TangentEstimator(QUERIES).measure(engine, step).largest_tangent
    assert largest is not None and np.isnan(largest)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_gradient_from_a_journal_has_the_same_bits(max_grad_norm: float) -> None:
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    estimator = TangentEstimator(QUERIES, max_grad_norm=max_grad_norm)
    step = Step(adapter, _examples(random_completions(12), 8), SEED, STEP)
    result = estimator.measure(engine, step)
    live = estimator.gradient(result.journal_fields, SEED, STEP, adapter.modules)
    stored = json.loads(json.dumps(result.journal_fields))
    assert (
        truncate_to_grid(np.array(stored["projected_gradients"]), axis=0).tolist()
        == stored["projected_gradients"]
    )
    replayed = TangentEstimator(QUERIES).gradient(stored, SEED, STEP, adapter.modules)
    assert replayed.tobytes() == live.tobytes()
