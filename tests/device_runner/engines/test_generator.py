"""A generation engine continues sequences as the whole model does that reads them from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_runner.engines import generator as generation
from device_runner.engines.generator import ChainGenerationEngine, open_generation_engine
from prge.engine import FloatArray
from prge.errors import BundleError, EngineError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from server_export.oracle import TorchEngine
from tests.device_runner.engines.chains import POSITIONS, logits_of, oracle_of
from tests.refusals import raises
from tests.templates import random_adapter
from tests.tiers import second_tier

# Architectures that differ in the engine; tests/server_export/derive/test_continuation.py covers all graphs.
ARCHITECTURES = ("gemma2", "gemma3", "opt", "gpt2", "gemma4")
# In the model's float32 attention, relative to the largest logit; logits of these models reach 10.
TOLERANCE = 2e-5
# Multiple of the model's float32 error against double precision, if that is larger.
CANCELLING = {"gemma4_text": 4}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches grow often."""
    monkeypatch.setattr(generation, "GROWTH", 16)


@pytest.fixture
def bundle(make_chain: Callable[[str], Path]) -> Bundle:
    """Return a Llama's bundle; rows and chunks of a prompt have up to 16 tokens."""
    return open_bundle(make_chain("llama") / "bundle")


@pytest.fixture
def oracle(make_chain: Callable[[str], Path]) -> TorchEngine:
    return oracle_of(make_chain("llama"))


def adapter_of(bundle: Bundle, seed: int) -> Adapter:
    return random_adapter(bundle.chain.modules, seed, 0.3)


def tokens_of(bundle: Bundle, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, bundle.chain.vocabulary_size, count).tolist()
    return tokens


def difference(result: FloatArray, expected: FloatArray) -> float:
    return float(np.abs(result - expected).max() / np.abs(expected).max())


@pytest.fixture(params=["llama", *second_tier("llama lora", *ARCHITECTURES)])
def folder(request: pytest.FixtureRequest, make_chain: Callable[[str], Path]) -> Path:
    return make_chain(request.param)


def test_logits_equal_those_of_the_model_token_by_token(folder: Path) -> None:
    """The models have grouped keys, sliding windows, rotations, learned positions, or soft caps."""
    bundle = open_bundle(folder / "bundle")
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, POSITIONS)
    expected, exact = (
        logits_of(oracle_of(folder, dtype), adapter, tokens) for dtype in (torch.float32, torch.float64)
    )
    times = CANCELLING.get(bundle.manifest["model"]["model_type"], 0)
    tolerance = max(TOLERANCE, times * difference(expected, exact))
    generation_engine = open_generation_engine(bundle)
    assert (generation_engine.context, generation_engine.vocabulary_size) == (
        POSITIONS,
        bundle.chain.vocabulary_size,
    )
    read, written = generation_engine.open(adapter), tokens[21:]
    assert difference(generation_engine.feed(read, tokens[:21]), expected[20]) < tolerance
    for position, token in enumerate(written, 21):
        assert difference(generation_engine.step({read: token})[read], expected[position]) < tolerance
    generation_engine.close(read)
    # In chunks, with one token left over, and token by token from the first.
    other = generation_engine.open(adapter)
    assert difference(generation_engine.feed(other, tokens[:1]), expected[0]) < tolerance
    assert difference(generation_engine.feed(other, tokens[1:3]), expected[2]) < tolerance
    assert difference(generation_engine.feed(other, tokens[3:200]), expected[199]) < tolerance


def test_a_prompt_has_the_same_logits_next_to_a_long_sequence(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks of a prompt are only short if the prompt itself is long."""
    monkeypatch.setattr(generation, "LONG", 48)
    monkeypatch.setattr(generation, "CHUNK_OF_LONG", 8)
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 45)
    alone, crowded = open_generation_engine(bundle), open_generation_engine(bundle, slots=2)
    crowded.feed(crowded.open(adapter), tokens_of(bundle, 120, 1))
    expected, result = (each.feed(each.open(adapter), tokens) for each in (alone, crowded))
    assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("engine", "precision", "tolerance"),
    [("native", "float32", TOLERANCE), ("torch", "float32", TOLERANCE), ("native", "float16", 2e-3)],
)
def test_every_sequence_of_a_step_has_its_own_adapter_and_length(
    bundle: Bundle, oracle: TorchEngine, engine: Any, precision: Any, tolerance: float
) -> None:
    generation_engine = open_generation_engine(bundle, engine=engine, slots=4, precision=precision)
    rows = {}
    for seed, length in enumerate((3, 17, 1, 8)):
        adapter, tokens = adapter_of(bundle, seed), tokens_of(bundle, 40, seed)
        sequence = generation_engine.open(adapter)
        generation_engine.feed(sequence, tokens[:length])
        rows[sequence] = tokens, logits_of(oracle, adapter, tokens)

    def step(*sequences: int) -> None:
        next_tokens = {
            sequence: rows[sequence][0][generation_engine.length(sequence)] for sequence in sequences
        }
        answers = generation_engine.step(next_tokens)
        assert answers.keys() == next_tokens.keys()
        for sequence, logits in answers.items():
            position = generation_engine.length(sequence) - 1
            assert difference(logits, rows[sequence][1][position]) < tolerance

    first, second, third, fourth = rows
    step(first, second, third, fourth)
    step(first, second, third, fourth)
    step(fourth, second)
    step(third, first, second)
    generation_engine.close(first)
    del rows[first]
    step(second, third, fourth)
    adapter, tokens = adapter_of(bundle, 9), tokens_of(bundle, 40, 9)
    fifth = generation_engine.open(adapter)
    rows[fifth] = tokens, logits_of(oracle, adapter, tokens)
    generation_engine.feed(fifth, tokens[:20])
    for _ in range(15):
        step(fifth, third, second, fourth)


def test_a_sequence_continues_after_a_rewind(bundle: Bundle, oracle: TorchEngine) -> None:
    generation_engine, adapter = open_generation_engine(bundle), adapter_of(bundle, 1)
    tokens, others = tokens_of(bundle, 30), tokens_of(bundle, 30, seed=5)
    sequence = generation_engine.open(adapter)
    generation_engine.feed(sequence, tokens)
    generation_engine.rewind(sequence, 12)
    assert generation_engine.length(sequence) == 12
    expected = logits_of(oracle, adapter, tokens[:12] + others)
    assert difference(generation_engine.feed(sequence, others[:9]), expected[20]) < TOLERANCE
    assert difference(generation_engine.step({sequence: others[9]})[sequence], expected[21]) < TOLERANCE


def test_a_sequence_begins_with_a_copy_of_another(bundle: Bundle, oracle: TorchEngine) -> None:
    generation_engine, adapter = open_generation_engine(bundle, slots=2), adapter_of(bundle, 1)
    tokens, others = tokens_of(bundle, 30), tokens_of(bundle, 30, seed=5)
    first, second = generation_engine.open(adapter), generation_engine.open(adapter)
    generation_engine.feed(first, tokens[:20])
    generation_engine.copy(first, second, 12)
    assert (generation_engine.length(first), generation_engine.length(second)) == (20, 12)
    generation_engine.feed(second, others[:9])
    results = generation_engine.step({first: tokens[20], second: others[9]})
    rows = {first: tokens[:21], second: tokens[:12] + others[:10]}
    for sequence, row in rows.items():
        assert difference(results[sequence], logits_of(oracle, adapter, row)[-1]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_check_has_logits_for_each_token_and_changes_nothing(
    bundle: Bundle, oracle: TorchEngine, dtype: Any
) -> None:
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 24)
    expected = logits_of(oracle, adapter, tokens)
    bound = TOLERANCE if dtype == "float32" else 1e-2
    generation_engine = open_generation_engine(bundle, slots=2, precision=dtype)
    other, text = generation_engine.open(adapter_of(bundle, 2)), generation_engine.open(adapter)
    generation_engine.feed(other, tokens)
    generation_engine.feed(text, tokens[:12])
    wrong = [tokens[12], *tokens_of(bundle, 7, seed=5)]
    assert difference(generation_engine.check(text, wrong)[0], expected[12]) < bound
    generation_engine.rewind(text, 13)
    result = generation_engine.check(text, tokens[13:20])
    assert result.shape == (7, bundle.chain.vocabulary_size)
    assert difference(result, expected[13:20]) < bound
    for position, token in enumerate(tokens[20:], 20):
        assert difference(generation_engine.step({text: token})[text], expected[position]) < bound


def test_a_check_takes_any_number_of_tokens(bundle: Bundle, oracle: TorchEngine) -> None:
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 30)
    expected = logits_of(oracle, adapter, tokens)
    generation_engine = open_generation_engine(bundle)
    sequence = generation_engine.open(adapter)
    first, rest = generation_engine.check(sequence, tokens[:1]), generation_engine.check(sequence, tokens[1:])
    assert difference(np.concatenate([first, rest]), expected) < TOLERANCE


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_with_little_memory_the_logits_are_the_same_bits(bundle: Bundle, precision: Any) -> None:
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 30)

    def logits(**settings: Any) -> list[bytes]:
        generation_engine = open_generation_engine(bundle, slots=2, precision=precision, **settings)
        both = [generation_engine.open(adapter) for _ in range(2)]
        result = [generation_engine.feed(sequence, tokens[:20]) for sequence in both]
        for token in tokens[20:]:
            result += generation_engine.step(dict.fromkeys(both, token)).values()
        return [array.tobytes() for array in result]

    largest = max(bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    assert logits() == logits(loaded=largest)


def test_a_text_ends_at_the_last_position(bundle: Bundle) -> None:
    generation_engine, adapter = open_generation_engine(bundle), adapter_of(bundle, 1)
    sequence = generation_engine.open(adapter)
    generation_engine.feed(sequence, tokens_of(bundle, POSITIONS))
    with raises(EngineError, "text-too-long", containing=str(POSITIONS + 1)):
        generation_engine.step({sequence: 5})
    with raises(EngineError, "text-too-long", containing=str(POSITIONS + 6)):
        generation_engine.feed(sequence, [5] * 6)
    assert generation_engine.length(sequence) == POSITIONS


def test_a_shorter_context_may_be_requested(bundle: Bundle) -> None:
    generation_engine = open_generation_engine(bundle, context=20)
    assert generation_engine.context == 20
    with raises(EngineError, "text-too-long", containing="21"):
        generation_engine.feed(generation_engine.open(adapter_of(bundle, 1)), tokens_of(bundle, 21))


def test_the_number_of_slots_is_a_limit(bundle: Bundle) -> None:
    generation_engine, adapter = open_generation_engine(bundle, slots=2), adapter_of(bundle, 1)
    assert generation_engine.slots == 2
    first = generation_engine.open(adapter)
    generation_engine.open(adapter)
    with raises(EngineError, "slots-full", containing="2"):
        generation_engine.open(adapter)
    generation_engine.close(first)
    generation_engine.open(adapter)


def test_a_bundle_without_the_roles_is_refused(bundle: Bundle) -> None:
    class Silent:
        chain = type("Chain", (), {"roles": ("forward", "backward")})

    with raises(BundleError, "role-missing", containing="forward, backward"):
        ChainGenerationEngine(Silent())  # type: ignore[arg-type]


def test_feeding_no_token_is_refused(bundle: Bundle) -> None:
    generation_engine = open_generation_engine(bundle)
    with raises(EngineError, "tokens-missing"):
        generation_engine.feed(generation_engine.open(adapter_of(bundle, 1)), [])


def test_a_sequence_may_have_an_adapter_with_another_lora_a(bundle: Bundle, make_chain: Any) -> None:
    """Sequences with the bundle's lora_a and with another one share a step."""
    folder = make_chain("llama")
    own, random = adapter_of(bundle, 1), np.random.default_rng(7)
    lora_a = {
        module.name: random.standard_normal((module.rank, module.in_features), np.float32) * 0.3
        for module in bundle.chain.modules
    }
    stranger = Adapter(own.modules, adapter_of(bundle, 2).values, lora_a)
    elsewhere = oracle_of(folder)
    elsewhere.lora_a = {name: torch.from_numpy(matrix) for name, matrix in lora_a.items()}
    generation_engine, tokens = open_generation_engine(bundle, slots=2), tokens_of(bundle, 30)
    expected = [logits_of(oracle_of(folder), own, tokens), logits_of(elsewhere, stranger, tokens)]
    both = [generation_engine.open(adapter) for adapter in (own, stranger)]
    for sequence, logits in zip(both, expected, strict=True):
        assert difference(generation_engine.feed(sequence, tokens[:20]), logits[19]) < TOLERANCE
    for position in range(20, 30):
        result = generation_engine.step(dict.fromkeys(both, tokens[position]))
        for sequence, logits in zip(both, expected, strict=True):
            assert difference(result[sequence], logits[position]) < TOLERANCE


def test_values_that_are_not_finite_stay_in_their_own_sequence(bundle: Bundle, oracle: TorchEngine) -> None:
    broken, adapter = adapter_of(bundle, 1), adapter_of(bundle, 2)
    broken.values[:] = np.inf
    generation_engine, tokens = open_generation_engine(bundle, slots=2), tokens_of(bundle, 20)
    sound, other = generation_engine.open(adapter), generation_engine.open(broken)
    generation_engine.feed(sound, tokens[:5])
    assert not np.isfinite(generation_engine.feed(other, tokens)).any()
    expected = logits_of(oracle, adapter, tokens)
    result = generation_engine.step({other: 5, sound: tokens[5]})
    assert difference(result[sound], expected[5]) < TOLERANCE
    generation_engine.close(other)
    generation_engine.feed(follower := generation_engine.open(adapter), tokens[:5])
    result = generation_engine.step({follower: tokens[5], sound: tokens[6]})
    assert difference(result[follower], expected[5]) < TOLERANCE
    assert difference(result[sound], expected[6]) < TOLERANCE
