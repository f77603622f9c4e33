"""The gradient of an exact call: that of the loss of prge.learning.objectives, whatever the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from prge.engine import Array, FloatArray, Slope
from prge.errors import ConfigError
from prge.learning.estimators.exact import Exact, check_single_sequences
from prge.learning.estimators.protocol import Step
from prge.learning.examples import Batch, Example
from prge.learning.head import Classifier, CrossFittedHeads
from prge.learning.sampling import Sampler
from tests.numpy_engine import MODULE, NumpyEngine, adapter_of, head_of, head_with, losses_of, slopes_of
from tests.rows import KINDS_OF_ROWS, choice, classified, completion, random_completions

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


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("calls", [1, 2])
def test_it_is_the_slope_of_the_mean_loss(name: str, calls: int) -> None:
    model = NumpyEngine(batch_size=7)
    engine = model.exact()
    adapter = adapter_of(engine)
    batches = Sampler(ROWS[name], engine.contract, SEED, calls).batches(STEP)
    found = Exact().measure(engine, Step(adapter, batches, SEED, STEP))
    expected = slopes_of(lambda values: losses_of(model, values, batches).mean(), adapter.values)
    assert found.gradient is not None
    np.testing.assert_allclose(found.gradient, expected, atol=1e-4)
    assert found.loss == pytest.approx(losses_of(model, adapter.values, batches).mean(), rel=1e-6)
    assert engine.calls == calls
    assert found.rows == 3 * 7 * calls


@pytest.mark.parametrize("folds", [0, 3])
def test_an_encoder_is_scored_by_the_head_of_every_row(folds: int) -> None:
    model = NumpyEngine(batch_size=4, encoder=True)
    engine = model.exact()
    adapter = adapter_of(engine)
    head: Classifier = CrossFittedHeads([head_of(fold) for fold in range(folds)]) if folds else head_of()
    batches = Sampler(CLASSES, engine.contract, SEED, 2).batches(STEP)
    found = Exact().measure(engine, Step(adapter, batches, SEED, STEP, head))
    expected = slopes_of(lambda values: losses_of(model, values, batches, head).mean(), adapter.values)
    np.testing.assert_allclose(found.gradient, expected, atol=1e-4)


def test_a_trained_head_has_its_own_gradient() -> None:
    model = NumpyEngine(batch_size=4, encoder=True)
    engine = model.exact()
    adapter, head = adapter_of(engine), head_of()
    batches = Sampler(CLASSES, engine.contract, SEED).batches(STEP)
    found = Exact().measure(engine, Step(adapter, batches, SEED, STEP, head, head))
    expected = slopes_of(
        lambda values: losses_of(model, adapter.values, batches, head_with(values)).mean(), head.values
    )
    np.testing.assert_allclose(found.head_gradient, expected, atol=1e-4)


def test_clipping_shortens_the_whole_gradient() -> None:
    engine = NumpyEngine().exact()
    adapter = adapter_of(engine)
    batches = Sampler(random_completions(8), engine.contract, SEED).batches(STEP)

    def gradient(clip: float) -> Array:
        found = Exact(clip).measure(engine, Step(adapter, batches, SEED, STEP)).gradient
        assert found is not None
        return found

    whole = gradient(0.0)
    norm = float(np.linalg.norm(whole))
    np.testing.assert_allclose(gradient(norm / 4), whole / 4, rtol=1e-5)
    assert gradient(norm * 2).tobytes() == whole.tobytes()


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_every_example_is_clipped_before_the_mean(encoder: bool, clip: float) -> None:
    """Those of a larger norm get the limit's, all others stay what they are."""
    examples, count = 9, 6
    engine = NumpyEngine(batch_size=1, encoder=encoder).exact()
    rows = CLASSES[:examples] if encoder else [*random_completions(6), *ROWS["candidates"][:3]]
    adapter, head = adapter_of(engine), head_of() if encoder else None
    batches = Sampler(rows, engine.contract, SEED, count).batches(STEP)

    def gradient(batches: Sequence[Batch], **limits: float) -> Array:
        found = Exact(**limits).measure(engine, Step(adapter, batches, SEED, STEP, head)).gradient
        assert found is not None
        return found.astype(float)

    alone = [gradient([batch]) for batch in batches]
    norms = np.array([np.linalg.norm(each) for each in alone])
    limit = float(np.median(norms))
    shares = np.minimum(1, limit / norms)
    assert 0 < (shares < 1).sum() < count
    expected = sum(share * each for share, each in zip(shares, alone, strict=True)) / count
    # The step's own limit comes after.
    expected *= min(1.0, clip / np.linalg.norm(expected)) if clip else 1.0
    np.testing.assert_allclose(
        gradient(batches, clip=clip, clip_examples=limit), expected, atol=1e-7 * np.abs(expected).max()
    )
    unbounded = gradient(batches, clip=clip)
    assert gradient(batches, clip=clip, clip_examples=2 * norms.max()).tobytes() == unbounded.tobytes()


def test_one_example_moves_a_step_by_no_more_than_its_limit() -> None:
    engine = NumpyEngine(batch_size=1).exact()
    engine.model.weight *= 30
    adapter, limit, calls = adapter_of(engine), 0.1, 5
    batches = Sampler(random_completions(12), engine.contract, SEED, calls).batches(STEP)
    other = Sampler(random_completions(12), engine.contract, SEED + 1).batches(STEP)
    found = [
        Exact(clip_examples=limit).measure(engine, Step(adapter, chosen, SEED, STEP)).gradient
        for chosen in (batches, [*batches[:-1], *other])
    ]
    assert found[0] is not None and found[1] is not None
    assert 0 < np.linalg.norm(found[0] - found[1]) <= 2 * limit / calls * (1 + 1e-6)


def test_a_batch_of_several_examples_has_no_gradient_of_one() -> None:
    engine = NumpyEngine().exact()
    batches = Sampler(random_completions(8), engine.contract, SEED).batches(STEP)
    with pytest.raises(ValueError, match="batch of one example"):
        Exact(clip_examples=1.0).measure(engine, Step(adapter_of(engine), batches, SEED, STEP))
    assert engine.calls == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("limits", [{}, {"clip": 1e-3}, {"clip_examples": 1e-3}], ids=str)
def test_no_limit_makes_a_number_of_what_is_none(bad: float, limits: dict[str, float]) -> None:
    engine = NumpyEngine(batch_size=1).exact()
    whole = engine.gradient

    def broken(inputs: Mapping[str, Array], slope: Slope) -> tuple[FloatArray, dict[str, FloatArray]]:
        answers, gradients = whole(inputs, slope)
        gradients[f"lora_b.{MODULE}"][0, 0] = bad
        return answers, gradients

    engine.gradient = broken  # type: ignore[method-assign]
    batches = Sampler(random_completions(8), engine.contract, SEED, 2).batches(STEP)
    with np.errstate(invalid="ignore"):
        found = Exact(**limits).measure(engine, Step(adapter_of(engine), batches, SEED, STEP)).gradient
    assert found is not None and not np.isfinite(found[0])


def test_examples_of_several_sequences_are_refused_where_each_is_clipped() -> None:
    check_single_sequences([*ROWS["candidates"], *CLASSES])
    with pytest.raises(ConfigError, match=r"row 1 has 2 sequences(?s:.)*leave --clip-examples out"):
        check_single_sequences([*ROWS["completions"], *ROWS["longer candidates"]])


def test_a_journal_gives_the_same_bits_back() -> None:
    engine = NumpyEngine().exact()
    adapter = adapter_of(engine)
    batches = Sampler(random_completions(8), engine.contract, SEED).batches(STEP)
    found = Exact().measure(engine, Step(adapter, batches, SEED, STEP))
    stored: Mapping[str, Any] = json.loads(json.dumps(found.learnt))
    assert "scalars" not in stored
    # Four bytes a number as text, three bytes in four letters.
    assert len(stored["gradient"]) == pytest.approx(adapter.size * 16 / 3, abs=4)
    again = Exact().gradient(stored, SEED, STEP, adapter.modules)
    assert found.gradient is not None
    assert again.tobytes() == found.gradient.tobytes()
