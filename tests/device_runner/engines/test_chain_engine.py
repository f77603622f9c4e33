"""A chain of blocks computes what the whole model computes, for calls of any size, on both engines."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.engines import planning
from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.opening import OpenEngine, open_engine
from prge.engine import Array, Call
from prge.errors import EngineError
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from server_export.oracle import TorchEngine
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    bits,
    call_of,
    computed,
    counted_loads,
    directions_of,
    loss_gradient_of,
    opened,
    oracle_of,
    split,
)
from tests.refusals import raises
from tests.tiers import second_tier

pytestmark = needs_compiler

# More copies, sequences, queries and targets than the bounds of programs: 8, 4, 8 and 128.
STACKS = [(1, 3), (3, 2), (1, 37), (10, 5)]
TANGENTS = [(2, 3), (9, 6)]
ROLES = [FORWARD, JVP, BACKWARD]


@pytest.fixture(scope="module", params=["llama", *second_tier("llama lora", "bert", "bert lora", "gemma4")])
def folder(request: pytest.FixtureRequest, make_chain: Callable[[str], Path]) -> Path:
    return make_chain(request.param)


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> TorchEngine:
    return oracle_of(folder)


def call_for(bundle: Bundle, role: str, sequences: int) -> Call:
    """Return a call for a role, with copies if the role takes them."""
    return call_of(bundle.chain.model, sequences, 3 if role == FORWARD else 1)


def close(result: Array, expected: Array, tolerance: float = 2e-5) -> bool:
    return bool(np.abs(result - expected).max() <= tolerance * max(1, float(np.abs(expected).max())))


@pytest.mark.parametrize(("copies", "sequences"), STACKS)
def test_outputs_equal_those_of_the_model_with_every_copys_adapter(
    bundle: Bundle, oracle: TorchEngine, copies: int, sequences: int
) -> None:
    call = call_of(bundle.chain.model, sequences, copies)
    result = opened(bundle, FORWARD).engine.forward(call)
    assert len(result) == copies
    assert all(close(*pair) for pair in zip(result, oracle.forward(call), strict=True))
    assert opened(bundle, FORWARD, "torch").engine.forward(call).tobytes() == result.tobytes()


@pytest.mark.parametrize(("queries", "sequences"), TANGENTS)
def test_tangents_equal_derivatives_of_the_model(
    bundle: Bundle, oracle: TorchEngine, queries: int, sequences: int
) -> None:
    model = bundle.chain.model
    call, directions = call_of(model, sequences), directions_of(model, queries, sequences)
    result = opened(bundle, JVP).engine.jvp(call, directions)
    outputs, exact = oracle.jvp(call, directions)
    assert close(result[0], outputs)
    tangents, expected = (split(model, call, each) for each in (result[1], exact))
    for query, number in [(0, 0), (queries - 1, sequences - 1), (queries - 1, 0)]:
        # The reference's own float32 rounding error is 6e-5.
        assert close(tangents[number][query], expected[number][query], 1e-4)
    assert bits(opened(bundle, JVP, "torch").engine.jvp(call, directions)) == bits(result)


def test_a_gradient_of_another_shape_than_the_outputs_is_refused(bundle: Bundle) -> None:
    engine, call = opened(bundle, BACKWARD).engine, call_of(bundle.chain.model, 3)
    with raises(EngineError, "gradient-of-other-shape", containing="[]"):
        engine.vjp(call, lambda outputs: outputs.sum())
    assert computed(engine, BACKWARD, call)


def test_a_sequence_has_the_same_outputs_alone_and_among_others(bundle: Bundle) -> None:
    call, model = call_of(bundle.chain.model, 7), bundle.chain.model
    engine = opened(bundle, FORWARD).engine
    among = engine.forward(call)
    for number, expected in enumerate(split(model, call, among)):
        (result,) = split(model, alone := only(call, number), engine.forward(alone))
        assert np.abs(result - expected).max() <= 1e-5 * np.abs(among).max()


def only(call: Call, *numbers: int) -> Call:
    """Return a call of some of its sequences."""
    return replace(call, sequences=tuple(call.sequences[number] for number in numbers))


def test_a_sequence_of_one_token(bundle: Bundle, oracle: TorchEngine) -> None:
    call = call_of(bundle.chain.model, 2, lengths=[1])
    assert close(opened(bundle, FORWARD).engine.forward(call)[0], oracle.forward(call)[0])


@pytest.fixture
def decoder(make_chain: Callable[[str], Path]) -> Bundle:
    return open_bundle(make_chain("llama") / "bundle")


def test_a_decoders_sequence_without_targets_adds_nothing(decoder: Bundle) -> None:
    engine, call = opened(decoder, BACKWARD).engine, call_of(decoder.chain.model, 5)
    silent = [replace(sequence, targets=()) for sequence in call.sequences]
    pairs = zip(silent, call.sequences, strict=True)
    among = replace(call, sequences=tuple(sequence for pair in pairs for sequence in pair))
    assert bits(computed(engine, BACKWARD, among)) == bits(computed(engine, BACKWARD, call))
    for role in ROLES:
        outputs, *_ = computed(engine, role, replace(call, sequences=tuple(silent)))
        assert outputs.size == 0
    _, gradient = computed(engine, BACKWARD, replace(call, sequences=tuple(silent)))
    assert not gradient.any()


def test_tokens_after_a_decoders_last_target_change_nothing(decoder: Bundle) -> None:
    engine, call = opened(decoder, BACKWARD).engine, call_of(decoder.chain.model, 3)
    cut = [
        replace(each, tokens=each.tokens[: 1 + max(target.position for target in each.targets)])
        for each in call.sequences
    ]
    longer = [
        replace(each, tokens=(each.tokens + (7,) * 16)[: decoder.chain.model.sequence_length]) for each in cut
    ]
    assert cut != longer
    result = [
        bits(computed(engine, BACKWARD, replace(call, sequences=tuple(some)))) for some in (cut, longer)
    ]
    assert result[0] == result[1]


def test_any_layout_of_adapters_and_directions_is_accepted(bundle: Bundle) -> None:
    model = bundle.chain.model
    call, directions = call_of(model, 3, 2), directions_of(model, 2, 3)
    engine = opened(bundle, BACKWARD).engine
    strange = replace(call, adapters=np.repeat(np.asfortranarray(call.adapters), 2, 1)[:, ::2])
    strange.adapters.flags.writeable = False
    assert engine.forward(strange).tobytes() == engine.forward(call).tobytes()
    call, strange = (replace(each, adapters=each.adapters[1:]) for each in (call, strange))
    reordered = {name: np.asfortranarray(array) for name, array in reversed(directions.items())}
    assert bits(engine.jvp(strange, reordered)) == bits(engine.jvp(call, directions))
    result = engine.vjp(strange, lambda outputs: np.asfortranarray(loss_gradient_of(outputs)))
    assert bits(result) == bits(computed(engine, BACKWARD, call))


def test_calls_are_computed_in_micro_batches(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of any number of sequences, copies and queries change no bit."""
    engine = opened(bundle, BACKWARD).engine
    calls = [(role, call_for(bundle, role, 9)) for role in (FORWARD, JVP)]
    before = [bits(computed(engine, role, call)) for role, call in calls]
    for max_hidden_states in (1, 100):
        monkeypatch.setattr(planning, "MAX_HIDDEN_STATES", max_hidden_states)
        assert [bits(computed(engine, role, call)) for role, call in calls] == before


# Memory


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_with_room_for_one_block_the_bits_are_the_same(bundle: Bundle, role: str, engine: str) -> None:
    call = call_for(bundle, role, 3)
    sizes_of_blocks = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    largest = max(sizes_of_blocks)
    want = bits(computed(opened(bundle, role, engine).engine, role, call))
    for memory in (largest, 3 * largest // 2):
        programs = opened(bundle, role, engine, loaded=memory)
        with counted_loads(programs) as loads:
            result = [bits(computed(programs.engine, role, call)) for _ in range(3)]
        assert result == [want] * 3
        if engine == "native":
            assert len(loads) == len(set(loads))
            assert 0 < sum(sizes_of_blocks[number] for number in resident(programs)) <= memory
        else:
            assert len(loads) > len(set(loads)), "nothing was unloaded"


def resident(programs: OpenEngine) -> set[int]:
    """Return the blocks whose packed weights are in this process's memory."""
    gc.collect()  # engines of before have them too
    numbers = {str(file.packed): number for number, file in programs.blocks.files.items()}
    result, path = set[int](), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        columns = line.split()
        if not columns[0].endswith(":"):
            path = columns[-1]
        elif columns[0] == "Rss:" and path in numbers and int(columns[1]):
            result.add(numbers[path])
    return result


def test_without_a_bound_every_method_is_loaded_once(bundle: Bundle) -> None:
    programs = opened(bundle, BACKWARD)
    with counted_loads(programs) as loads:
        for _ in range(3):
            computed(programs.engine, BACKWARD, call_of(bundle.chain.model, 9))
    assert len(loads) == len(set(loads))


def test_a_bound_below_the_largest_block_names_the_minimum(bundle: Bundle) -> None:
    with raises(EngineError, "memory-too-little", containing="1000"):
        opened(bundle, FORWARD, loaded=1000)


@pytest.mark.parametrize("role", ROLES)
def test_many_calls_take_no_more_buffers_than_the_first(
    bundle: Bundle, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, mapping = opened(bundle, role), mmap.mmap
    buffers: list[weakref.ref[mmap.mmap]] = []

    def noted(descriptor: int, length: int, *settings: Any) -> mmap.mmap:
        mapped = mapping(descriptor, length, *settings)
        buffers.append(weakref.ref(mapped))
        return mapped

    monkeypatch.setattr(mmap, "mmap", noted)
    call, counts = call_for(bundle, role, 9), []
    expected = bits(computed(programs.engine, role, call))
    for _ in range(200 if role == FORWARD else 20):
        assert bits(computed(programs.engine, role, call)) == expected
        counts.append(sum(buffer() is not None for buffer in buffers))
    assert counts[0] == counts[-1] > 0


def test_checkpoints_in_a_file_change_no_bit_and_in_float16_little(bundle: Bundle, tmp_path: Path) -> None:
    call = call_of(bundle.chain.model, 9)
    programs = opened(bundle, BACKWARD)
    in_file = ActivationStore(programs.blocks, folder=tmp_path, checkpoint_bytes=0)
    half = ActivationStore(programs.blocks, precision="float16")
    expected, in_a_file, rounded = (
        computed(ChainEngine(programs.blocks, 1, store), BACKWARD, call)
        for store in (programs.store, in_file, half)
    )
    assert bits(in_a_file) == bits(expected)
    assert rounded[0].tobytes() == expected[0].tobytes()
    exact, approximate = expected[1], rounded[1]
    assert 0 < np.linalg.norm(approximate - exact) < 5e-3 * np.linalg.norm(exact)


def test_a_short_call_follows_one_of_exactly_the_bounds(bundle: Bundle) -> None:
    bounds, model = bundle.chain.bounds, bundle.chain.model
    engine = opened(bundle, BACKWARD).engine
    assert model.sequence_length == bounds.tokens
    long = call_of(model, bounds.batch, lengths=[bounds.tokens])
    short = call_of(model, bounds.batch, lengths=[5], seed=1)
    expected = bits(computed(engine, BACKWARD, short))
    for _ in range(2):
        computed(engine, BACKWARD, long)
        assert bits(computed(engine, BACKWARD, short)) == expected


def test_outputs_are_not_changed_by_later_calls(bundle: Bundle) -> None:
    engine, model = opened(bundle, BACKWARD).engine, bundle.chain.model
    first = computed(engine, BACKWARD, call_of(model, 5))
    before = bits(first)
    computed(engine, BACKWARD, call_of(model, 5, seed=1))
    assert bits(first) == before


def test_outputs_are_those_of_the_calls_adapter(bundle: Bundle) -> None:
    """Buffers are filled anew between calls."""
    engine, call = opened(bundle, FORWARD).engine, call_of(bundle.chain.model, 2)
    before, after = (engine.forward(each) for each in (call, replace(call, adapters=2 * call.adapters)))
    assert np.abs(after - before).max() > 1e-3


def test_a_failure_of_the_engine_is_reported_and_the_engine_stays_usable(bundle: Bundle) -> None:
    programs, call = opened(bundle, FORWARD), call_of(bundle.chain.model, 2)
    want = programs.engine.forward(call).tobytes()
    method: Any = programs.blocks.method(1, FORWARD)
    run, method.run = method.run, lambda inputs, outputs: run(inputs[:-1], outputs)
    with raises(EngineError, "engine-failed"):
        programs.engine.forward(call)
    method.run = run
    assert programs.engine.forward(call).tobytes() == want


def test_another_number_of_threads_is_refused_while_engines_live(bundle: Bundle) -> None:
    programs = open_engine(bundle, engine="native")
    with raises(EngineError, "threads-differ", containing="7"):
        open_engine(bundle, threads=7, engine="native")
    with raises(EngineError, "threads-out-of-bounds", containing="0"):
        open_engine(bundle, threads=0, engine="native")
    assert programs.threads >= 1


def test_with_little_memory_the_next_block_is_read_while_one_computes(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    programs, call = opened(bundle, BACKWARD, loaded=largest), call_of(bundle.chain.model, 2)
    computed(programs.engine, BACKWARD, call)
    advised: list[int] = []
    order = [
        (file.stat().st_dev, file.stat().st_ino)
        for file in (each.packed for each in programs.blocks.files.values())
    ]

    def advise(descriptor: int, *_: int) -> None:
        facts = os.fstat(descriptor)
        advised.append(order.index((facts.st_dev, facts.st_ino)))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    computed(programs.engine, BACKWARD, call)
    last = len(order) - 1
    # Forward to the last block, and backward from it.
    assert last in advised
    assert (
        advised
        == sorted(advised[: advised.index(last) + 1]) + sorted(advised[advised.index(last) + 1 :])[::-1]
    )
