"""Means over the tokens of a step instead of its examples: for every estimator, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.engine import Array
from prge.objectives.examples import Example
from prge.training.estimators import exact
from prge.training.estimators.differences import Antithetic, Differences
from prge.training.estimators.directions import DirectionSampler, RankOneDirections
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Step
from prge.training.estimators.tangents import TangentEstimator
from prge.training.evaluation import evaluate
from prge.training.sampler import Sampler
from tests.numpy_engine import MODULE, NumpyEngine, gradients_of, make_nonzero_adapter
from tests.rows import completion

SEED, STEP = 3, 0


def by_tokens(examples: list[Example]) -> list[Example]:
    return Sampler(examples, len(examples), SEED, "token").batch(STEP)


def token_loss(engine: NumpyEngine, values: Array, examples: list[Example]) -> float:
    """Return the weighted mean negative log-likelihood of all target tokens, from the model's logits."""
    update = engine.lora_a.T @ values.reshape(engine.model.modules[0].rank, -1)
    losses = []
    for example in examples:
        (sequence,) = example.sequences
        logits = engine.embedding[list(sequence.tokens)] @ (engine.weight + update)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-example.weight * logprobs[target.position, target.token] for target in sequence.targets]
    return float(np.mean(losses))


@st.composite
def steps(draw: st.DrawFn) -> list[Example]:
    """Draw completions of 1 to 4 target tokens with weights."""
    examples = []
    for row in range(1, 5):
        tokens = draw(st.lists(st.integers(0, 10), min_size=2, max_size=6))
        prompt = draw(st.integers(max(len(tokens) - 4, 1), len(tokens) - 1))
        weight = draw(st.sampled_from([1.0, 0.5, 3.0]))
        example = completion(row, tokens, prompt)
        examples.append(Example(row, example.sequences, 1, None, weight=weight))
    return examples


@settings(max_examples=30)
@given(steps(), st.sampled_from([1, 8, 512]))
def test_the_gradient_is_that_of_the_mean_over_tokens(examples: list[Example], tokens: int) -> None:
    """This holds whether the step is computed in parts or not."""
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MICROBATCH_TOKENS", tokens)
        result = Exact().measure(engine, Step(adapter, by_tokens(examples), SEED, STEP))
    expected = gradients_of(lambda values: token_loss(engine, values, examples), adapter.values)
    assert result.loss == pytest.approx(token_loss(engine, adapter.values, examples), rel=1e-6)
    assert result.gradient is not None
    np.testing.assert_allclose(result.gradient, expected, atol=1e-4)


@settings(max_examples=10)
@given(steps())
def test_projected_gradients_are_derivatives_of_the_mean_over_tokens(examples: list[Example]) -> None:
    """This holds for differences along a direction, and for tangents, whose mean over examples it is."""
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    gradient = gradients_of(lambda values: token_loss(engine, values, examples), adapter.values)
    step = Step(adapter, by_tokens(examples), SEED, STEP)
    result = Differences(Antithetic(2, 1e-3)).measure(engine, step)
    directions = DirectionSampler(SEED, STEP, adapter.size)
    expected = [float(gradient @ directions(query)) for query in range(2)]
    np.testing.assert_allclose(result.projected_gradients, expected, atol=1e-3)

    tangents = TangentEstimator(2, shared=True)
    measured = tangents.measure(engine, step)
    along = RankOneDirections(SEED, STEP, 2, len(examples), tuple(adapter.modules), shared=True)
    expected = [float(gradient @ along(query).astype(float)) for query in range(2)]
    np.testing.assert_allclose(measured.projected_gradients.mean(-1), expected, atol=1e-3)


def test_rows_of_equal_length_have_the_same_bits_with_each_normalisation() -> None:
    examples = [completion(row, [row, 2, 3, 4], 2) for row in range(1, 5)]
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    gradients = []
    for batch in (Sampler(examples, 4, SEED).batch(STEP), by_tokens(examples)):
        result = Exact().measure(engine, Step(adapter, batch, SEED, STEP)).gradient
        assert result is not None
        gradients.append(result.tobytes())
    assert gradients[0] == gradients[1]


def test_the_loss_of_an_evaluation_is_the_logarithm_of_the_perplexity() -> None:
    examples = [completion(row, [row, 2, 3, 4, 5][: 2 + row], 1) for row in range(1, 4)]
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    by_token, _ = evaluate(engine, adapter, examples, None, select="loss", normalisation="token")
    by_example, _ = evaluate(engine, adapter, examples, None, select="loss")
    assert np.log(by_token["perplexity"]) == pytest.approx(by_token["loss"])
    assert by_token["loss"] == pytest.approx(token_loss(engine, adapter.values, examples), rel=1e-5)
    assert by_example["loss"] != pytest.approx(by_token["loss"], rel=1e-3)
    assert by_token["value"] == -by_token["loss"]
    assert MODULE in adapter.lora_b
