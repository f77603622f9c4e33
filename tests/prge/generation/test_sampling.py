"""Which token follows, against plain definitions of the filters and those of transformers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prge.engine import FloatArray
from prge.errors import ConfigError, EngineError
from prge.generation.sampling import SamplingSettings, TokenSampler
from tests.refusals import raises

VOCABULARY = 40
# Few distinct values, so that many are equal.
LOGITS = st.lists(st.integers(-8, 8), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda values: np.array(values, np.float32) / 2
)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCABULARY, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0.02, 0.4, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
    }
)


def logits_of(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def sampled(logits: FloatArray, history: list[int], count: int = 200, **given: Any) -> list[int]:
    choice = TokenSampler(SamplingSettings(**{"temperature": 1.0, "seed": 1, **given}))
    return [choice.sample(logits, history) for _ in range(count)]


def allowed(logits: FloatArray, history: list[int], chosen: SamplingSettings) -> dict[int, float]:
    """Return the probability of each token that passes the filters, computed by their definitions."""
    scores = {token: float(value) for token, value in enumerate(logits)}
    penalty = chosen.repetition_penalty
    for token in set(history):
        scores[token] = float(
            np.float32(scores[token] / penalty if scores[token] > 0 else scores[token] * penalty)
        )
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    weights = {token: np.exp((scores[token] - scores[ranked[0]]) / chosen.temperature) for token in ranked}
    if chosen.top_k:
        ranked = ranked[: chosen.top_k]
    total = sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= chosen.top_p * total - 1e-12:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= chosen.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def test_without_temperature_the_most_likely_token_and_of_equal_ones_the_lowest_id() -> None:
    choice = TokenSampler(SamplingSettings())
    assert choice.sample(logits_of(0, 3, 1, 3), []) == 1
    assert choice.sample(logits_of(-1, -1), []) == 0


def test_rare_tokens_are_sampled_only_without_min_p() -> None:
    # Each of the five is rare; together they are sampled once in five times.
    logits = np.log(np.array([0.8, *[0.04 * 0.99] * 5], np.float32))
    assert set(sampled(logits, [], 300, temperature=1.0)) == {0}
    assert len(set(sampled(logits, [], 300, temperature=1.0, min_p=0.0))) == 6


@given(logits=LOGITS, history=st.lists(st.integers(0, VOCABULARY - 1), max_size=5), filters=FILTERS)
@settings(max_examples=100)
def test_only_tokens_that_pass_the_filters_are_sampled(
    logits: FloatArray, history: list[int], filters: dict[str, Any]
) -> None:
    expected = allowed(logits, history, SamplingSettings(**filters))
    tokens = sampled(logits, history, 40, **filters)
    assert set(tokens) <= set(expected)
    likely = [token for token, probability in expected.items() if probability > 0.3]
    assert set(likely) <= set(tokens)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"temperature": 0.5, "top_k": 9, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 1.2},
        {"temperature": 3.0, "top_k": 12, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_filters_leave_the_tokens_that_transformers_leaves(filters: dict[str, Any]) -> None:
    import torch
    import transformers

    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    chosen |= filters
    logits = np.random.default_rng(5).normal(0, 3, 50).astype(np.float32)
    history = [int(np.argmax(logits)), 3, 4, 4]
    steps = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(chosen["repetition_penalty"]),
            transformers.TemperatureLogitsWarper(chosen["temperature"]),
            *([transformers.TopKLogitsWarper(chosen["top_k"])] if chosen["top_k"] else []),
            transformers.TopPLogitsWarper(chosen["top_p"]),
            transformers.MinPLogitsWarper(chosen["min_p"]),
        ]
    )
    left = steps(torch.tensor([history]), torch.tensor(logits)[None])[0]
    probabilities = torch.softmax(left.double(), 0).numpy()
    count = 20_000
    result = np.bincount(sampled(logits, history, count, **chosen), minlength=50) / count
    assert set(np.flatnonzero(result)) <= set(np.flatnonzero(probabilities))
    assert np.abs(result - probabilities).max() < 0.015


def test_the_same_seed_gives_the_same_tokens() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert sampled(logits, [], seed=7) == sampled(logits, [], seed=7) != sampled(logits, [], seed=8)
    # Other machines and versions of numpy are compared with these tokens.
    assert sampled(logits_of(*range(8)), [], 12, seed=7, temperature=4.0) == [*map(int, "774561606404")]


def test_without_a_seed_every_completion_differs() -> None:
    logits = np.zeros(1000, np.float32)
    assert sampled(logits, [], 20, seed=None) != sampled(logits, [], 20, seed=None)


def test_sampling_does_not_change_the_logits() -> None:
    logits = logits_of(2, 1, -1)
    sampled(logits, [0, 2], 3, repetition_penalty=2.0, top_p=0.5)
    assert logits.tolist() == [2, 1, -1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_nan_are_an_error(bad: float) -> None:
    for temperature in (0.0, 1.0):
        with raises(EngineError, "logits-not-finite", containing=str(bad)):
            TokenSampler(SamplingSettings(temperature)).sample(logits_of(0, bad, 1), [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.5}, "--temperature is -0.5, must be at least 0"),
        ({"temperature": float("nan")}, "--temperature is nan, must be a finite number"),
        ({"temperature": "hot"}, "--temperature is 'hot', must be a number"),
        ({"top_k": -1}, "--top-k is -1, must be at least 0"),
        ({"top_k": 1.5}, "--top-k is 1.5, must be a whole number"),
        ({"top_p": 0.0}, "--top-p is 0.0, must be more than 0"),
        ({"top_p": 1.5}, "--top-p is 1.5, must be at most 1"),
        ({"min_p": True}, "--min-p is True, must be a number"),
        ({"repetition_penalty": 0}, "--repetition-penalty is 0, must be at least 0.001"),
        ({"seed": -1}, "--seed is -1, must be at least 0"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingSettings(**given)
    assert caught.value.problems == [message]


def test_sampling_from_a_large_vocabulary_is_fast() -> None:
    logits: NDArray[np.float32] = np.random.default_rng(0).normal(0, 3, 262_144).astype(np.float32)
    for chosen in (
        SamplingSettings(),
        SamplingSettings(0.8, 40, 0.95, 0.05),
        SamplingSettings(0.8, top_p=0.95),
    ):
        choice = TokenSampler(chosen)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            choice.sample(logits, [1, 2, 3])
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.1
