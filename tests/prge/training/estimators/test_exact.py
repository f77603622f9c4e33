"""The exact gradient equals that of prge.objectives.objective's loss, whatever the microbatches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.engine import Array, Call, Float64Array, GradFn
from prge.errors import ConfigError
from prge.objectives.classification_head import Classifier, CrossFittedHeads
from prge.objectives.examples import Example, sequences_of, token_count
from prge.objectives.preferences import KTO
from prge.training.estimators import exact
from prge.training.estimators.exact import Exact, check_single_sequences
from prge.training.estimators.protocol import Measurement, Step
from prge.training.sampler import Sampler
from tests.numpy_engine import (
    NumpyEngine,
    compute_losses,
    gradients_of,
    head_from_values,
    make_nonzero_adapter,
    random_head,
)
from tests.refusals import raises
from tests.rows import EXAMPLES_BY_FORM, choice, classification, completion, long_choice, random_completions

SEED, STEP = 3, 5

ROWS: dict[str, Sequence[Example]] = {
    **EXAMPLES_BY_FORM,
    "completions among candidates": [
        choice(1, [4, 2], [1, 3], 1),
        completion(2, [1, 2, 3, 4], 2),
        choice(3, [5], [2, 6, 9], 0),
    ],
}
CLASSES = [classification(row, [row % 7, row % 5, row % 3], 3, row % 3) for row in range(1, 12)]


def _examples(rows: Sequence[Example], count: int, seed: int = SEED) -> list[Example]:
    return Sampler(rows, count, seed).batch(STEP)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [7, 14])
def test_the_exact_gradient_is_that_of_the_mean_loss(name: str, count: int) -> None:
    engine = NumpyEngine()
    adapter, examples = make_nonzero_adapter(engine), _examples(ROWS[name], count)
    result = Exact().measure(engine, Step(adapter, examples, SEED, STEP))
    assert engine.calls == 1
    expected = gradients_of(lambda values: compute_losses(engine, values, examples).mean(), adapter.values)
    assert result.gradient is not None
    np.testing.assert_allclose(result.gradient, expected, atol=1e-4)
    assert result.loss == pytest.approx(compute_losses(engine, adapter.values, examples).mean(), rel=1e-6)


@pytest.mark.parametrize("folds", [0, 3])
def test_an_encoder_is_scored_by_the_head_of_every_row(folds: int) -> None:
    engine = NumpyEngine(encoder=True)
    adapter, examples = make_nonzero_adapter(engine), _examples(CLASSES, 8)
    head: Classifier = (
        CrossFittedHeads([random_head(fold) for fold in range(folds)]) if folds else random_head()
    )
    result = Exact().measure(engine, Step(adapter, examples, SEED, STEP, head))
    expected = gradients_of(
        lambda values: compute_losses(engine, values, examples, head).mean(), adapter.values
    )
    np.testing.assert_allclose(result.gradient, expected, atol=1e-4)


def test_a_trained_head_has_its_own_gradient() -> None:
    engine = NumpyEngine(encoder=True)
    adapter, head, examples = make_nonzero_adapter(engine), random_head(), _examples(CLASSES, 4)
    result = Exact().measure(engine, Step(adapter, examples, SEED, STEP, head, head))
    expected = gradients_of(
        lambda values: compute_losses(engine, adapter.values, examples, head_from_values(values)).mean(),
        head.values,
    )
    np.testing.assert_allclose(result.head_gradient, expected, atol=1e-4)


# Parts of a step


def _split(engine: NumpyEngine, step: Step, tokens: int) -> Measurement:
    """Measure a step whose microbatches have at most this many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MICROBATCH_TOKENS", tokens)
        return Exact().measure(engine, step)


@given(
    st.lists(
        st.sampled_from([example for examples in ROWS.values() for example in examples]),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 80),
)
def test_a_decoders_gradient_is_the_same_however_a_step_is_split(
    examples: list[Example], tokens: int
) -> None:
    engine = NumpyEngine()
    step = Step(make_nonzero_adapter(engine), examples, SEED, STEP)
    whole, split = Exact().measure(NumpyEngine(), step), _split(engine, step, tokens)
    _check_equal(whole, split)
    assert sum(engine.computed, ()) == sequences_of(examples)


@given(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=9), st.integers(1, 30))
def test_an_encoders_gradients_are_the_same_however_a_step_is_split(
    examples: list[Example], tokens: int
) -> None:
    engine, head = NumpyEngine(encoder=True), random_head()
    step = Step(make_nonzero_adapter(engine), examples, SEED, STEP, head, head)
    whole, split = Exact().measure(NumpyEngine(encoder=True), step), _split(engine, step, tokens)
    _check_equal(whole, split)
    assert whole.head_gradient is not None and split.head_gradient is not None
    _check_rounding(split.head_gradient, whole.head_gradient)
    sizes = [sum(len(sequence.tokens) for sequence in call) for call in engine.computed]
    assert all(size <= max(tokens, 3) for size in sizes) and sum(sizes) == token_count(examples)


def _check_equal(whole: Measurement, split: Measurement) -> None:
    assert whole.gradient is not None and split.gradient is not None
    _check_rounding(split.gradient, whole.gradient)
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)


def _check_rounding(result: Array, expected: Array) -> None:
    """Check that both are the same values rounded to float32."""
    assert result.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=2**-23 * np.abs(expected).max())


def test_a_loss_that_compares_examples_is_computed_in_one_call() -> None:
    """KTO's loss depends on the mean of the step, which microbatches would change."""
    engine, objective = NumpyEngine(), KTO(0.3)
    rows = [
        replace(
            long_choice(row, [row % 7, row % 5], [[1, row % 3], [2, 3, 4]], 0),
            liked=row % 2 == 0,
            # The distance to the start must be above 0 to have an effect.
            reference=(-2.0 - row / 10, -6.0 - row / 5),
        )
        for row in range(1, 7)
    ]
    step = Step(make_nonzero_adapter(engine), rows, SEED, STEP, objective=objective)
    result = _split(engine, step, tokens=1)
    assert engine.computed == [sequences_of(rows)]
    whole = Exact().measure(engine, step)
    assert whole.gradient is not None and result.gradient is not None
    assert result.gradient.tobytes() == whole.gradient.tobytes() and result.loss == whole.loss
    halves = [Exact().measure(engine, replace(step, examples=half)) for half in (rows[:3], rows[3:])]
    assert np.mean([half.loss for half in halves]) != pytest.approx(whole.loss, rel=1e-3)


# Limits


def test_clipping_scales_the_whole_gradient() -> None:
    engine = NumpyEngine()
    step = Step(make_nonzero_adapter(engine), _examples(random_completions(8), 4), SEED, STEP)

    def gradient(max_grad_norm: float) -> Array:
        result = Exact(max_grad_norm).measure(engine, step).gradient
        assert result is not None
        return result

    whole = gradient(0.0)
    norm = float(np.linalg.norm(whole))
    np.testing.assert_allclose(gradient(norm / 4), whole / 4, rtol=1e-5)
    assert gradient(norm * 2).tobytes() == whole.tobytes()


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_every_example_is_clipped_before_the_mean(
    encoder: bool, max_grad_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients with a larger norm are scaled to the limit, others aren't changed."""
    # Sums have other bits where examples are computed together.
    monkeypatch.setattr(exact, "MICROBATCH_TOKENS", 1)
    count = 6
    engine = NumpyEngine(encoder=encoder)
    rows = CLASSES[:9] if encoder else [*random_completions(6), *ROWS["candidates"][:3]]
    adapter, head = make_nonzero_adapter(engine), random_head() if encoder else None
    examples = _examples(rows, count)

    def gradient(examples: Sequence[Example], **limits: float) -> Array:
        result = Exact(**limits).measure(engine, Step(adapter, examples, SEED, STEP, head)).gradient
        assert result is not None
        return result.astype(float)

    alone = [gradient([example]) for example in examples]
    norms = np.array([np.linalg.norm(each) for each in alone])
    limit = float(np.median(norms))
    shares = np.minimum(1, limit / norms)
    assert 0 < (shares < 1).sum() < count
    expected = sum(share * each for share, each in zip(shares, alone, strict=True)) / count
    # The limit of the step is applied afterwards.
    expected *= min(1.0, max_grad_norm / np.linalg.norm(expected)) if max_grad_norm else 1.0
    np.testing.assert_allclose(
        gradient(examples, max_grad_norm=max_grad_norm, max_example_grad_norm=limit),
        expected,
        atol=1e-7 * np.abs(expected).max(),
    )
    unbounded = gradient(examples, max_grad_norm=max_grad_norm)
    assert (
        gradient(examples, max_grad_norm=max_grad_norm, max_example_grad_norm=2 * norms.max()).tobytes()
        == unbounded.tobytes()
    )


def test_examples_that_are_clipped_are_computed_one_by_one() -> None:
    engine = NumpyEngine()
    examples = _examples(random_completions(8), 4)
    Exact(max_example_grad_norm=1.0).measure(engine, Step(make_nonzero_adapter(engine), examples, SEED, STEP))
    assert engine.computed == [example.sequences for example in examples]


def test_one_example_moves_a_step_by_no_more_than_its_limit() -> None:
    engine = NumpyEngine()
    engine.weight *= 30
    adapter, limit, count = make_nonzero_adapter(engine), 0.1, 5
    examples = _examples(random_completions(12), count)
    other = _examples(random_completions(12), 1, seed=SEED + 1)
    result = [
        Exact(max_example_grad_norm=limit).measure(engine, Step(adapter, chosen, SEED, STEP)).gradient
        for chosen in (examples, [*examples[:-1], *other])
    ]
    assert result[0] is not None and result[1] is not None
    assert 0 < np.linalg.norm(result[0] - result[1]) <= 2 * limit / count * (1 + 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("limits", [{}, {"max_grad_norm": 1e-3}, {"max_example_grad_norm": 1e-3}], ids=str)
def test_clipping_keeps_values_that_are_not_finite(bad: float, limits: dict[str, float]) -> None:
    class Broken(NumpyEngine):
        def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Float64Array, Float64Array]:
            outputs, gradient = super().vjp(call, grad_fn)
            gradient[0] = bad
            return outputs, gradient

    engine = Broken()
    step = Step(make_nonzero_adapter(engine), _examples(random_completions(8), 2), SEED, STEP)
    with np.errstate(invalid="ignore"):
        result = Exact(**limits).measure(engine, step).gradient
    assert result is not None and not np.isfinite(result[0])


def test_examples_of_several_sequences_are_refused_where_each_is_clipped() -> None:
    check_single_sequences([*ROWS["candidates"], *CLASSES])
    with raises(ConfigError, "clipping-several-sequences", containing="row 1"):
        check_single_sequences([*ROWS["completions"], *ROWS["longer candidates"]])


def test_a_journal_restores_the_same_bits() -> None:
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    result = Exact().measure(engine, Step(adapter, _examples(random_completions(8), 4), SEED, STEP))
    stored: Mapping[str, Any] = json.loads(json.dumps(result.journal_fields))
    assert "projected_gradients" not in stored
    # Four bytes a number as text, three bytes in four letters.
    assert len(stored["gradient"]) == pytest.approx(adapter.size * 16 / 3, abs=4)
    again = Exact().gradient(stored, SEED, STEP, adapter.modules)
    assert result.gradient is not None
    assert again.tobytes() == result.gradient.tobytes()
