"""The exact gradient: that of the loss of prge.learning.objectives, whatever the examples and their parts."""

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
from prge.learning.estimators import exact
from prge.learning.estimators.exact import Exact, check_single_sequences
from prge.learning.estimators.protocol import Measurement, Step
from prge.learning.examples import Example, sequences_of, token_count
from prge.learning.head import Classifier, CrossFittedHeads
from prge.learning.preferences import KTO
from prge.learning.sampling import Sampler
from tests.numpy_engine import NumpyEngine, adapter_of, head_of, head_with, losses_of, slopes_of
from tests.refusals import raises
from tests.rows import KINDS_OF_ROWS, choice, classified, completion, long_choice, random_completions

SEED, STEP = 3, 5

ROWS: dict[str, Sequence[Example]] = {
    **KINDS_OF_ROWS,
    "completions among candidates": [
        choice(1, [4, 2], [1, 3], 1),
        completion(2, [1, 2, 3, 4], 2),
        choice(3, [5], [2, 6, 9], 0),
    ],
}
CLASSES = [classified(row, [row % 7, row % 5, row % 3], 3, row % 3) for row in range(1, 12)]


def _examples(rows: Sequence[Example], count: int, seed: int = SEED) -> list[Example]:
    return Sampler(rows, count, seed).batch(STEP)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [7, 14])
def test_it_is_the_slope_of_the_mean_loss(name: str, count: int) -> None:
    engine = NumpyEngine()
    adapter, examples = adapter_of(engine), _examples(ROWS[name], count)
    found = Exact().measure(engine, Step(adapter, examples, SEED, STEP))
    assert engine.calls == 1
    expected = slopes_of(lambda values: losses_of(engine, values, examples).mean(), adapter.values)
    assert found.gradient is not None
    np.testing.assert_allclose(found.gradient, expected, atol=1e-4)
    assert found.loss == pytest.approx(losses_of(engine, adapter.values, examples).mean(), rel=1e-6)


@pytest.mark.parametrize("folds", [0, 3])
def test_an_encoder_is_scored_by_the_head_of_every_row(folds: int) -> None:
    engine = NumpyEngine(encoder=True)
    adapter, examples = adapter_of(engine), _examples(CLASSES, 8)
    head: Classifier = CrossFittedHeads([head_of(fold) for fold in range(folds)]) if folds else head_of()
    found = Exact().measure(engine, Step(adapter, examples, SEED, STEP, head))
    expected = slopes_of(lambda values: losses_of(engine, values, examples, head).mean(), adapter.values)
    np.testing.assert_allclose(found.gradient, expected, atol=1e-4)


def test_a_trained_head_has_its_own_gradient() -> None:
    engine = NumpyEngine(encoder=True)
    adapter, head, examples = adapter_of(engine), head_of(), _examples(CLASSES, 4)
    found = Exact().measure(engine, Step(adapter, examples, SEED, STEP, head, head))
    expected = slopes_of(
        lambda values: losses_of(engine, adapter.values, examples, head_with(values)).mean(), head.values
    )
    np.testing.assert_allclose(found.head_gradient, expected, atol=1e-4)


# Parts of a step


def _split(engine: NumpyEngine, step: Step, tokens: int) -> Measurement:
    """A step whose microbatches have at most so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MICROBATCH_TOKENS", tokens)
        return Exact().measure(engine, step)


@given(
    st.lists(
        st.sampled_from([example for kind in ROWS.values() for example in kind]), min_size=1, max_size=9
    ),
    st.integers(1, 80),
)
def test_a_decoders_gradient_is_the_same_however_a_step_is_split(
    examples: list[Example], tokens: int
) -> None:
    engine = NumpyEngine()
    step = Step(adapter_of(engine), examples, SEED, STEP)
    whole, split = Exact().measure(NumpyEngine(), step), _split(engine, step, tokens)
    _check_equal(whole, split)
    assert sum(engine.computed, ()) == sequences_of(examples)


@given(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=9), st.integers(1, 30))
def test_an_encoders_gradients_are_the_same_however_a_step_is_split(
    examples: list[Example], tokens: int
) -> None:
    engine, head = NumpyEngine(encoder=True), head_of()
    step = Step(adapter_of(engine), examples, SEED, STEP, head, head)
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


def _check_rounding(found: Array, expected: Array) -> None:
    """Both are the same numbers rounded to float32."""
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-23 * np.abs(expected).max())


def test_a_loss_that_compares_examples_is_computed_in_one_call() -> None:
    """KTO's, of the step's mean: parts would have means of their own."""
    engine, objective = NumpyEngine(), KTO(0.3)
    rows = [
        replace(
            long_choice(row, [row % 7, row % 5], [[1, row % 3], [2, 3, 4]], 0),
            liked=row % 2 == 0,
            # The distance to the start is above 0, so that it counts.
            reference=(-2.0 - row / 10, -6.0 - row / 5),
        )
        for row in range(1, 7)
    ]
    step = Step(adapter_of(engine), rows, SEED, STEP, objective=objective)
    found = _split(engine, step, tokens=1)
    assert engine.computed == [sequences_of(rows)]
    whole = Exact().measure(engine, step)
    assert whole.gradient is not None and found.gradient is not None
    assert found.gradient.tobytes() == whole.gradient.tobytes() and found.loss == whole.loss
    halves = [Exact().measure(engine, replace(step, examples=half)) for half in (rows[:3], rows[3:])]
    assert np.mean([half.loss for half in halves]) != pytest.approx(whole.loss, rel=1e-3)


# Limits


def test_clipping_shortens_the_whole_gradient() -> None:
    engine = NumpyEngine()
    step = Step(adapter_of(engine), _examples(random_completions(8), 4), SEED, STEP)

    def gradient(clip: float) -> Array:
        found = Exact(clip).measure(engine, step).gradient
        assert found is not None
        return found

    whole = gradient(0.0)
    norm = float(np.linalg.norm(whole))
    np.testing.assert_allclose(gradient(norm / 4), whole / 4, rtol=1e-5)
    assert gradient(norm * 2).tobytes() == whole.tobytes()


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_every_example_is_clipped_before_the_mean(
    encoder: bool, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a larger norm get the limit's, all others stay what they are."""
    # Sums have other bits where examples are computed together.
    monkeypatch.setattr(exact, "MICROBATCH_TOKENS", 1)
    count = 6
    engine = NumpyEngine(encoder=encoder)
    rows = CLASSES[:9] if encoder else [*random_completions(6), *ROWS["candidates"][:3]]
    adapter, head = adapter_of(engine), head_of() if encoder else None
    examples = _examples(rows, count)

    def gradient(examples: Sequence[Example], **limits: float) -> Array:
        found = Exact(**limits).measure(engine, Step(adapter, examples, SEED, STEP, head)).gradient
        assert found is not None
        return found.astype(float)

    alone = [gradient([example]) for example in examples]
    norms = np.array([np.linalg.norm(each) for each in alone])
    limit = float(np.median(norms))
    shares = np.minimum(1, limit / norms)
    assert 0 < (shares < 1).sum() < count
    expected = sum(share * each for share, each in zip(shares, alone, strict=True)) / count
    # The step's own limit comes after.
    expected *= min(1.0, clip / np.linalg.norm(expected)) if clip else 1.0
    np.testing.assert_allclose(
        gradient(examples, clip=clip, clip_examples=limit), expected, atol=1e-7 * np.abs(expected).max()
    )
    unbounded = gradient(examples, clip=clip)
    assert gradient(examples, clip=clip, clip_examples=2 * norms.max()).tobytes() == unbounded.tobytes()


def test_examples_that_are_clipped_are_computed_one_by_one() -> None:
    engine = NumpyEngine()
    examples = _examples(random_completions(8), 4)
    Exact(clip_examples=1.0).measure(engine, Step(adapter_of(engine), examples, SEED, STEP))
    assert engine.computed == [example.sequences for example in examples]


def test_one_example_moves_a_step_by_no_more_than_its_limit() -> None:
    engine = NumpyEngine()
    engine.weight *= 30
    adapter, limit, count = adapter_of(engine), 0.1, 5
    examples = _examples(random_completions(12), count)
    other = _examples(random_completions(12), 1, seed=SEED + 1)
    found = [
        Exact(clip_examples=limit).measure(engine, Step(adapter, chosen, SEED, STEP)).gradient
        for chosen in (examples, [*examples[:-1], *other])
    ]
    assert found[0] is not None and found[1] is not None
    assert 0 < np.linalg.norm(found[0] - found[1]) <= 2 * limit / count * (1 + 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("limits", [{}, {"clip": 1e-3}, {"clip_examples": 1e-3}], ids=str)
def test_no_limit_makes_a_number_of_what_is_none(bad: float, limits: dict[str, float]) -> None:
    class Broken(NumpyEngine):
        def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Float64Array, Float64Array]:
            outputs, gradient = super().vjp(call, grad_fn)
            gradient[0] = bad
            return outputs, gradient

    engine = Broken()
    step = Step(adapter_of(engine), _examples(random_completions(8), 2), SEED, STEP)
    with np.errstate(invalid="ignore"):
        found = Exact(**limits).measure(engine, step).gradient
    assert found is not None and not np.isfinite(found[0])


def test_examples_of_several_sequences_are_refused_where_each_is_clipped() -> None:
    check_single_sequences([*ROWS["candidates"], *CLASSES])
    with raises(ConfigError, "clipping-several-sequences", saying="row 1"):
        check_single_sequences([*ROWS["completions"], *ROWS["longer candidates"]])


def test_a_journal_gives_the_same_bits_back() -> None:
    engine = NumpyEngine()
    adapter = adapter_of(engine)
    found = Exact().measure(engine, Step(adapter, _examples(random_completions(8), 4), SEED, STEP))
    stored: Mapping[str, Any] = json.loads(json.dumps(found.learnt))
    assert "scalars" not in stored
    # Four bytes a number as text, three bytes in four letters.
    assert len(stored["gradient"]) == pytest.approx(adapter.size * 16 / 3, abs=4)
    again = Exact().gradient(stored, SEED, STEP, adapter.modules)
    assert found.gradient is not None
    assert again.tobytes() == found.gradient.tobytes()
