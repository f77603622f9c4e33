"""A speaker goes on with sequences as the whole model does that reads them from their beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_runner.engines import speaking
from device_runner.engines.speaking import ChainSpeaker, open_speaker
from prge.engine import FloatArray
from prge.errors import BundleError, EngineError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle, open_bundle
from server_export.oracle import TorchEngine
from tests.device_runner.engines.chains import POSITIONS, logits_of, oracle_of
from tests.refusals import raises
from tests.templates import random_adapter
from tests.tiers import rest

# What is different in the engine; tests/server_export/derive/test_continuing.py has the graphs of all.
ARCHITECTURES = ("gemma2", "gemma3", "opt", "gpt2", "gemma4")
# In the model's own float32 attention, as a part of the largest logit; logits of these models go up to 10.
TOLERANCE = 2e-5
# So many times what the model in float32 is away from itself in double precision, where that is more.
CANCELLING = {"gemma4_text": 4}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows again and again."""
    monkeypatch.setattr(speaking, "GROWTH", 16)


@pytest.fixture
def bundle(make_chain: Callable[[str], Path]) -> Bundle:
    """A Llama's; rows, and pieces of a prompt, have up to 16 tokens."""
    return open_bundle(make_chain("llama") / "bundle")


@pytest.fixture
def oracle(make_chain: Callable[[str], Path]) -> TorchEngine:
    return oracle_of(make_chain("llama"))


def adapter_of(bundle: Bundle, seed: int) -> Adapter:
    return random_adapter(bundle.chain.modules, seed, 0.3)


def tokens_of(bundle: Bundle, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, bundle.chain.vocabulary_size, count).tolist()
    return tokens


def difference(found: FloatArray, expected: FloatArray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(params=["llama", *rest("llama lora", *ARCHITECTURES)])
def folder(request: pytest.FixtureRequest, make_chain: Callable[[str], Path]) -> Path:
    return make_chain(request.param)


def test_logits_are_the_models_token_by_token(folder: Path) -> None:
    """Grouped keys, sliding windows, rotations, learnt positions, soft caps, up to the last position."""
    bundle = open_bundle(folder / "bundle")
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, POSITIONS)
    expected, exact = (
        logits_of(oracle_of(folder, dtype), adapter, tokens) for dtype in (torch.float32, torch.float64)
    )
    times = CANCELLING.get(bundle.manifest["model"]["model_type"], 0)
    tolerance = max(TOLERANCE, times * difference(expected, exact))
    speaker = open_speaker(bundle)
    assert (speaker.context, speaker.vocabulary_size) == (POSITIONS, bundle.chain.vocabulary_size)
    read, written = speaker.open(adapter), tokens[21:]
    assert difference(speaker.feed(read, tokens[:21]), expected[20]) < tolerance
    for place, token in enumerate(written, 21):
        assert difference(speaker.step({read: token})[read], expected[place]) < tolerance
    speaker.close(read)
    # In pieces, with one token left over, and token by token from the first.
    other = speaker.open(adapter)
    assert difference(speaker.feed(other, tokens[:1]), expected[0]) < tolerance
    assert difference(speaker.feed(other, tokens[1:3]), expected[2]) < tolerance
    assert difference(speaker.feed(other, tokens[3:200]), expected[199]) < tolerance


def test_a_prompt_is_read_alike_beside_a_long_text(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are as short as those of a long text only if it is long itself."""
    monkeypatch.setattr(speaking, "LONG", 48)
    monkeypatch.setattr(speaking, "PIECE_OF_LONG", 8)
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 45)
    alone, crowded = open_speaker(bundle), open_speaker(bundle, slots=2)
    crowded.feed(crowded.open(adapter), tokens_of(bundle, 120, 1))
    expected, found = (each.feed(each.open(adapter), tokens) for each in (alone, crowded))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("engine", "precision", "tolerance"),
    [("native", "float32", TOLERANCE), ("torch", "float32", TOLERANCE), ("native", "float16", 2e-3)],
)
def test_every_sequence_of_a_step_has_its_own_adapter_and_length(
    bundle: Bundle, oracle: TorchEngine, engine: Any, precision: Any, tolerance: float
) -> None:
    speaker = open_speaker(bundle, engine=engine, slots=4, precision=precision)
    rows = {}
    for seed, length in enumerate((3, 17, 1, 8)):
        adapter, tokens = adapter_of(bundle, seed), tokens_of(bundle, 40, seed)
        sequence = speaker.open(adapter)
        speaker.feed(sequence, tokens[:length])
        rows[sequence] = tokens, logits_of(oracle, adapter, tokens)

    def step(*sequences: int) -> None:
        asked = {sequence: rows[sequence][0][speaker.length(sequence)] for sequence in sequences}
        answers = speaker.step(asked)
        assert answers.keys() == asked.keys()
        for sequence, logits in answers.items():
            place = speaker.length(sequence) - 1
            assert difference(logits, rows[sequence][1][place]) < tolerance

    first, second, third, fourth = rows
    step(first, second, third, fourth)
    step(first, second, third, fourth)
    step(fourth, second)
    step(third, first, second)
    speaker.close(first)
    del rows[first]
    step(second, third, fourth)
    adapter, tokens = adapter_of(bundle, 9), tokens_of(bundle, 40, 9)
    fifth = speaker.open(adapter)
    rows[fifth] = tokens, logits_of(oracle, adapter, tokens)
    speaker.feed(fifth, tokens[:20])
    for _ in range(15):
        step(fifth, third, second, fourth)


def test_a_sequence_goes_on_from_where_it_was_cut(bundle: Bundle, oracle: TorchEngine) -> None:
    speaker, adapter = open_speaker(bundle), adapter_of(bundle, 1)
    tokens, others = tokens_of(bundle, 30), tokens_of(bundle, 30, seed=5)
    sequence = speaker.open(adapter)
    speaker.feed(sequence, tokens)
    speaker.rewind(sequence, 12)
    assert speaker.length(sequence) == 12
    expected = logits_of(oracle, adapter, tokens[:12] + others)
    assert difference(speaker.feed(sequence, others[:9]), expected[20]) < TOLERANCE
    assert difference(speaker.step({sequence: others[9]})[sequence], expected[21]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_check_answers_for_each_token_and_leaves_nothing_behind(
    bundle: Bundle, oracle: TorchEngine, dtype: Any
) -> None:
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 24)
    expected = logits_of(oracle, adapter, tokens)
    bound = TOLERANCE if dtype == "float32" else 1e-2
    speaker = open_speaker(bundle, slots=2, precision=dtype)
    beside, text = speaker.open(adapter_of(bundle, 2)), speaker.open(adapter)
    speaker.feed(beside, tokens)
    speaker.feed(text, tokens[:12])
    wrong = [tokens[12], *tokens_of(bundle, 7, seed=5)]
    assert difference(speaker.check(text, wrong)[0], expected[12]) < bound
    speaker.rewind(text, 13)
    found = speaker.check(text, tokens[13:20])
    assert found.shape == (7, bundle.chain.vocabulary_size)
    assert difference(found, expected[13:20]) < bound
    for place, token in enumerate(tokens[20:], 20):
        assert difference(speaker.step({text: token})[text], expected[place]) < bound


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_with_little_memory_the_logits_are_the_same_bits(bundle: Bundle, precision: Any) -> None:
    adapter, tokens = adapter_of(bundle, 1), tokens_of(bundle, 30)

    def logits(**settings: Any) -> list[bytes]:
        speaker = open_speaker(bundle, slots=2, precision=precision, **settings)
        both = [speaker.open(adapter) for _ in range(2)]
        found = [speaker.feed(sequence, tokens[:20]) for sequence in both]
        for token in tokens[20:]:
            found += speaker.step(dict.fromkeys(both, token)).values()
        return [array.tobytes() for array in found]

    largest = max(bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    assert logits() == logits(loaded=largest)


def test_a_text_ends_at_the_last_position(bundle: Bundle) -> None:
    speaker, adapter = open_speaker(bundle), adapter_of(bundle, 1)
    sequence = speaker.open(adapter)
    speaker.feed(sequence, tokens_of(bundle, POSITIONS))
    with raises(EngineError, "text-too-long", saying=str(POSITIONS + 1)):
        speaker.step({sequence: 5})
    with raises(EngineError, "text-too-long", saying=str(POSITIONS + 6)):
        speaker.feed(sequence, [5] * 6)
    assert speaker.length(sequence) == POSITIONS


def test_a_shorter_context_may_be_asked_for(bundle: Bundle) -> None:
    speaker = open_speaker(bundle, context=20)
    assert speaker.context == 20
    with raises(EngineError, "text-too-long", saying="21"):
        speaker.feed(speaker.open(adapter_of(bundle, 1)), tokens_of(bundle, 21))


def test_there_are_so_many_slots(bundle: Bundle) -> None:
    speaker, adapter = open_speaker(bundle, slots=2), adapter_of(bundle, 1)
    assert speaker.slots == 2
    first = speaker.open(adapter)
    speaker.open(adapter)
    with raises(EngineError, "slots-full", saying="2"):
        speaker.open(adapter)
    speaker.close(first)
    speaker.open(adapter)


def test_a_bundle_without_the_roles_is_refused(bundle: Bundle) -> None:
    class Silent:
        chain = type("Chain", (), {"roles": ("stack", "back")})

    with raises(BundleError, "role-missing", saying="stack, back"):
        ChainSpeaker(Silent())  # type: ignore[arg-type]


def test_no_token_is_no_question(bundle: Bundle) -> None:
    speaker = open_speaker(bundle)
    with raises(EngineError, "tokens-missing"):
        speaker.feed(speaker.open(adapter_of(bundle, 1)), [])


def test_a_sequence_may_have_an_adapter_from_elsewhere(bundle: Bundle, make_chain: Any) -> None:
    """Another lora_a beside the bundle's own, in one step."""
    folder = make_chain("llama")
    own, random = adapter_of(bundle, 1), np.random.default_rng(7)
    lora_a = {
        module.name: random.standard_normal((module.rank, module.in_features), np.float32) * 0.3
        for module in bundle.chain.modules
    }
    stranger = Adapter(own.modules, adapter_of(bundle, 2).values, lora_a)
    elsewhere = oracle_of(folder)
    elsewhere.lora_a = {name: torch.from_numpy(matrix) for name, matrix in lora_a.items()}
    speaker, tokens = open_speaker(bundle, slots=2), tokens_of(bundle, 30)
    expected = [logits_of(oracle_of(folder), own, tokens), logits_of(elsewhere, stranger, tokens)]
    both = [speaker.open(adapter) for adapter in (own, stranger)]
    for sequence, logits in zip(both, expected, strict=True):
        assert difference(speaker.feed(sequence, tokens[:20]), logits[19]) < TOLERANCE
    for place in range(20, 30):
        found = speaker.step(dict.fromkeys(both, tokens[place]))
        for sequence, logits in zip(both, expected, strict=True):
            assert difference(found[sequence], logits[place]) < TOLERANCE


def test_what_isnt_finite_stays_in_its_own_sequence(bundle: Bundle, oracle: TorchEngine) -> None:
    broken, adapter = adapter_of(bundle, 1), adapter_of(bundle, 2)
    broken.values[:] = np.inf
    speaker, tokens = open_speaker(bundle, slots=2), tokens_of(bundle, 20)
    sound, other = speaker.open(adapter), speaker.open(broken)
    speaker.feed(sound, tokens[:5])
    assert not np.isfinite(speaker.feed(other, tokens)).any()
    expected = logits_of(oracle, adapter, tokens)
    found = speaker.step({other: 5, sound: tokens[5]})
    assert difference(found[sound], expected[5]) < TOLERANCE
    speaker.close(other)
    speaker.feed(follower := speaker.open(adapter), tokens[:5])
    found = speaker.step({follower: tokens[5], sound: tokens[6]})
    assert difference(found[follower], expected[5]) < TOLERANCE
    assert difference(found[sound], expected[6]) < TOLERANCE
