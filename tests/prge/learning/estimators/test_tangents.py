"""Tangents against gradients in closed form: every scalar, their mean, and what the journal keeps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from prge.engine import Array
from prge.files.adapter import Adapter
from prge.learning.estimators import directions
from prge.learning.estimators.directions import RankOneDirections, on_grid
from prge.learning.estimators.exact import Exact
from prge.learning.estimators.protocol import Measurement, Step
from prge.learning.estimators.tangents import Tangents
from prge.learning.examples import Batch, Example
from prge.learning.head import CrossFittedHeads
from prge.learning.sampling import Sampler
from tests.numpy_engine import (
    MODULE,
    NumpyEngine,
    NumpyTangentEngine,
    adapter_of,
    head_of,
    head_with,
    losses_of,
    slopes_of,
)
from tests.rows import KINDS_OF_ROWS as ROWS
from tests.rows import classified, random_completions

SEED, STEP, QUERIES = 3, 5, 3

CLASSES = [classified(row, [row % 7, row % 5, row % 3], 3, row % 3) for row in range(1, 12)]


def _batches(engine: NumpyTangentEngine, examples: Sequence[Example], calls: int = 1) -> list[Batch]:
    return Sampler(examples, engine.contract, SEED, calls).batches(STEP)


def _rank_one(estimate: Measurement, adapter: Adapter, shared: bool = False) -> np.ndarray:
    """The step's directions as vectors, [queries, examples, size]."""
    queries, examples = estimate.scalars.shape
    step = RankOneDirections(SEED, STEP, queries, examples, adapter.modules, shared)
    products = [np.einsum("qer,qeo->qero", u, v) for _, u, v in step.factors()]
    return np.concatenate([p.reshape(*p.shape[:2], -1) for p in products], -1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_a_scalar_is_the_derivative_of_its_example_along_its_direction(
    rows: str, calls: int, shared: bool
) -> None:
    model = NumpyEngine()
    engine, adapter = model.tangent(QUERIES), adapter_of(model)
    batches = _batches(engine, ROWS[rows], calls)
    found = Tangents(shared).measure(engine, Step(adapter, batches, SEED, STEP))
    exact = slopes_of(lambda values: losses_of(model, values, batches), adapter.values)
    expected = np.einsum("qes,es->qe", _rank_one(found, adapter, shared), exact)
    np.testing.assert_allclose(found.scalars, expected, atol=2e-5)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found.loss, losses_of(model, adapter.values, batches).mean(), rtol=1e-12)


@pytest.mark.parametrize("folds", [0, 2])
@pytest.mark.parametrize("calls", [1, 2])
def test_scalars_of_an_encoder(folds: int, calls: int) -> None:
    model = NumpyEngine(encoder=True)
    engine, adapter = model.tangent(QUERIES), adapter_of(model)
    head = CrossFittedHeads([head_of(1), head_of(2)]) if folds else head_of()
    batches = _batches(engine, CLASSES, calls)
    found = Tangents().measure(engine, Step(adapter, batches, SEED, STEP, head))
    exact = slopes_of(lambda values: losses_of(model, values, batches, head), adapter.values)
    expected = np.einsum("qes,es->qe", _rank_one(found, adapter), exact)
    np.testing.assert_allclose(found.scalars, expected, atol=2e-5)
    assert found.head_gradient is None


def test_a_trained_head_gets_its_exact_gradient() -> None:
    model = NumpyEngine(encoder=True)
    engine, adapter, head = model.tangent(QUERIES), adapter_of(model), head_of()
    batches = _batches(engine, CLASSES, calls=2)
    found = Tangents().measure(engine, Step(adapter, batches, SEED, STEP, head, head))
    expected = slopes_of(
        lambda values: losses_of(model, adapter.values, batches, head_with(values)).mean(), head.values
    )
    assert found.head_gradient is not None
    np.testing.assert_allclose(found.head_gradient, expected, atol=1e-5)


def test_all_sign_combinations_together_give_the_exact_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of (u.G v) u v^T over all signs is G: nothing is left to chance, so nothing is left out."""
    combinations = np.array(list(itertools.product([-1, 1], repeat=2 + 3)), np.float32)
    model = NumpyEngine(vocabulary=3, rank=2)
    engine, adapter = model.tangent(len(combinations)), adapter_of(model)
    batches = _batches(engine, random_completions(8, vocabulary=3), calls=2)
    monkeypatch.setattr(
        directions, "rademacher", lambda seed, step, query, size: np.tile(combinations[query], size // 5)
    )
    estimator = Tangents()
    found = estimator.measure(engine, Step(adapter, batches, SEED, STEP))
    exact = Exact().measure(model.exact(), Step(adapter, batches, SEED, STEP)).gradient
    assert exact is not None
    np.testing.assert_allclose(
        estimator.gradient(found.learnt, SEED, STEP, adapter.modules), exact, atol=1e-5
    )


def test_one_direction_for_all_examples_is_the_derivative_of_the_mean_loss() -> None:
    model = NumpyEngine()
    engine, adapter = model.tangent(QUERIES), adapter_of(model)
    batches = _batches(engine, random_completions(12))
    estimator = Tangents(shared=True)
    found = estimator.measure(engine, Step(adapter, batches, SEED, STEP))
    exact = Exact().measure(model.exact(), Step(adapter, batches, SEED, STEP)).gradient
    assert exact is not None
    along = _rank_one(found, adapter, shared=True)[:, 0]
    np.testing.assert_allclose(found.scalars.mean(1), along @ exact, atol=1e-6)
    expected = (along * found.scalars.mean(1)[:, None]).mean(0)
    gradient = estimator.gradient(found.learnt, SEED, STEP, adapter.modules)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_clipping_shrinks_the_examples_that_are_too_steep() -> None:
    model = NumpyEngine()
    engine, adapter = model.tangent(QUERIES), adapter_of(model)
    batches = _batches(engine, random_completions(12))
    whole = Tangents().measure(engine, Step(adapter, batches, SEED, STEP)).scalars
    size = np.sqrt((whole**2).mean(0))
    limit = float(np.median(size))
    found = Tangents(clip=limit).measure(engine, Step(adapter, batches, SEED, STEP)).scalars
    np.testing.assert_allclose(np.sqrt((found**2).mean(0)), np.minimum(size, limit), rtol=1e-6)
    np.testing.assert_allclose(found / found[0], whole / whole[0], rtol=1e-6)


def test_rows_of_an_example_share_its_direction_and_padding_has_none() -> None:
    """Two sequences an example in five rows: one row of padding."""
    seen: list[Mapping[str, Array]] = []

    class Watching(NumpyTangentEngine):
        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            seen.append({name: array.copy() for name, array in inputs.items()})
            return super().forward(inputs)

    engine = Watching(NumpyEngine(batch_size=5), QUERIES)
    adapter = adapter_of(engine)
    batches = _batches(engine, ROWS["longer candidates"], calls=2)
    found = Tangents().measure(engine, Step(adapter, batches, SEED, STEP))
    step = RankOneDirections(SEED, STEP, QUERIES, 4, adapter.modules)
    ((_, u, v),) = step.factors()
    for call, inputs in enumerate(seen):
        for kind, factor in (("u", u), ("v", v)):
            rows = inputs[f"{kind}.{MODULE}"]
            for row in range(4):
                assert np.array_equal(rows[:, row], factor[:, 2 * call + row // 2])
            assert not rows[:, 4].any()
    assert found.scalars.shape == (QUERIES, 4)


def test_the_adapter_is_given_without_a_copy_and_buffers_are_kept() -> None:
    seen: list[Mapping[str, Array]] = []

    class Watching(NumpyTangentEngine):
        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            seen.append(inputs)
            return super().forward(inputs)

    engine = Watching(NumpyEngine(), QUERIES)
    adapter, estimator = adapter_of(engine), Tangents()
    for step in (STEP, STEP + 1):
        estimator.measure(engine, Step(adapter, _batches(engine, random_completions(12)), SEED, step))
    assert np.shares_memory(seen[0][f"lora_b.{MODULE}"], adapter.values)
    assert seen[0][f"u.{MODULE}"] is seen[1][f"u.{MODULE}"]


def test_a_step_counts_its_tangents_as_rows() -> None:
    engine = NumpyEngine(batch_size=4).tangent(QUERIES)
    batches = _batches(engine, random_completions(12), calls=2)
    found = Tangents().measure(engine, Step(adapter_of(engine), batches, SEED, STEP))
    assert engine.calls == 2
    assert found.rows == 2 * 4 * (1 + QUERIES)
    assert found.engine_seconds > 0


def test_the_largest_tangent_of_all_calls_is_told() -> None:
    model = NumpyEngine()

    class Watching(NumpyTangentEngine):
        largest = 0.0

        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            outputs = super().forward(inputs)
            # Three of the four targets of a completion are read.
            self.largest = max(self.largest, float(np.abs(outputs["dlogprobs"][..., :3]).max()))
            return outputs

    engine = Watching(model, QUERIES)
    batches = _batches(engine, random_completions(12), calls=3)
    found = Tangents().measure(engine, Step(adapter_of(engine), batches, SEED, STEP))
    assert found.largest_tangent == engine.largest > 0


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradient_from_a_journal_has_the_same_bits(clip: float) -> None:
    engine = NumpyEngine().tangent(QUERIES)
    adapter = adapter_of(engine)
    batches = _batches(engine, random_completions(12), calls=2)
    estimator = Tangents(clip=clip)
    found = estimator.measure(engine, Step(adapter, batches, SEED, STEP))
    live = estimator.gradient(found.learnt, SEED, STEP, adapter.modules)
    stored = json.loads(json.dumps(found.learnt))
    assert on_grid(np.array(stored["scalars"]), axis=0).tolist() == stored["scalars"]
    replayed = Tangents().gradient(stored, SEED, STEP, adapter.modules)
    assert replayed.tobytes() == live.tobytes()
