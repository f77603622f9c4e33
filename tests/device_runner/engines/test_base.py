"""All engines check calls before they compute, and explain errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from device_runner.engines.base import CheckedEngine, Store, check_threads
from device_runner.engines.errors import EngineRefusalError
from prge.engine import Call, Directions, FloatArray, Target, TokenSequence
from prge.errors import EngineError
from prge.formats.adapter import adapter_size
from prge.model_spec import ModelSpec, matrices
from tests.bundles import make_spec
from tests.refusals import raises


class Zeros(CheckedEngine):
    """An engine that outputs zeros, or raises the runtime's error for a first token of 63."""

    def _forward(self, call: Call) -> FloatArray:
        if call.sequences[0].tokens[0] == 63:
            raise EngineRefusalError("error 0x12", "", 0x12)
        outputs = (len(call.sequences), self.model.width) if self.model.is_encoder else (call.target_count,)
        return np.zeros((len(call.adapters), *outputs), np.float32)

    def _jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        (outputs,) = self._forward(call)
        return outputs, np.zeros((len(next(iter(directions.values()))), *outputs.shape), np.float32)

    def _vjp(self, call: Call, grad_fn: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        (outputs,) = self._forward(call)
        return outputs, grad_fn(outputs)


DECODER = make_spec()
ENCODER = make_spec(readout="pooled", width=8)
SIZE = adapter_size(DECODER.modules)
VOCABULARY_SIZE, LENGTH = DECODER.vocabulary_size, DECODER.sequence_length
FIRST = TokenSequence((5,), (Target(0, 6, 1.0, 0),))


def sequence(tokens: int = 4, token: int = 0, position: int = 0, target: int = 0) -> TokenSequence:
    """Return a sequence with the given last token and last target."""
    return TokenSequence(
        (*[0] * (tokens - 1), *[token][:tokens]), (Target(0, 0, 1.0, 0), Target(position, target, 1.0, 0))
    )


def call_with(*sequences: TokenSequence, copies: int = 1) -> Call:
    return Call(sequences, np.zeros((copies, SIZE), np.float32))


def directions_of(model: ModelSpec, queries: int = 2, sequences: int = 1) -> dict[str, FloatArray]:
    return {
        name: np.zeros((queries, sequences, width), np.float32)
        for matrix in matrices(model.modules)
        for name, width in ((matrix.u, matrix.rank), (matrix.v, matrix.width))
    }


def compute(engine: Zeros, method: str, call: Call) -> object:
    """Call a method with valid arguments."""
    if method == "forward":
        return engine.forward(call)
    if method == "jvp":
        return engine.jvp(call, directions_of(engine.model, 2, len(call.sequences)))
    return engine.vjp(call, np.ones_like)


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
@pytest.mark.parametrize(
    ("model", "good", "bad", "code", "value"),
    [
        *(
            (
                model,
                sequence(token=VOCABULARY_SIZE - 1),
                sequence(token=token),
                "token-out-of-bounds",
                str(VOCABULARY_SIZE - 1),
            )
            for model in (DECODER, ENCODER)
            for token in (VOCABULARY_SIZE, -1)
        ),
        *(
            (
                DECODER,
                sequence(target=VOCABULARY_SIZE - 1),
                sequence(target=target),
                "target-out-of-bounds",
                f"{target} at 0",
            )
            for target in (VOCABULARY_SIZE, -1)
        ),
        *(
            (
                DECODER,
                sequence(position=3),
                sequence(position=at),
                "target-out-of-bounds",
                f"0 at {at}",
            )
            for at in (4, -1)
        ),
        *(
            (model, sequence(LENGTH), sequence(count), "sequence-of-other-length", f"{count} tokens")
            for model in (DECODER, ENCODER)
            for count in (LENGTH + 1, 0)
        ),
        (DECODER, sequence(), replace(sequence(), branches=(1, 2)), "branched-too-long", "at most 0"),
        *(
            (
                replace(DECODER, max_branched=LENGTH),
                replace(sequence(), branches=(1, 3)),
                replace(sequence(), branches=branches),
                "branches-out-of-order",
                f"{list(branches)}",
            )
            for branches in ((0, 2), (2, 2), (1, 4))
        ),
    ],
)
def test_an_index_out_of_range_never_reaches_the_program(
    method: str, model: ModelSpec, good: TokenSequence, bad: TokenSequence, code: str, value: str
) -> None:
    engine = Zeros(model, 1)
    compute(engine, method, call_with(FIRST, good))
    with raises(EngineError, code, containing=value) as caught:
        compute(engine, method, call_with(FIRST, bad))
    assert caught.value.what.startswith("Sequence 1 ")
    assert engine.calls == 1


ADAPTERS = call_with(FIRST).adapters


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
@pytest.mark.parametrize(
    ("adapters", "value"),
    [
        (ADAPTERS.astype(np.float64), f"float64 [1, {SIZE}]"),
        (ADAPTERS[:, :-1], f"float32 [1, {SIZE - 1}]"),
        (ADAPTERS[0], f"float32 [{SIZE}]"),
        (ADAPTERS[None], f"float32 [1, 1, {SIZE}]"),
        (ADAPTERS[:0], f"float32 [0, {SIZE}]"),
        (np.float32(0), "float32 []"),
    ],
)
def test_adapters_that_dont_fit_are_reported_and_the_engine_stays_usable(
    method: str, adapters: Any, value: str
) -> None:
    engine = Zeros(DECODER, 1)
    good = call_with(FIRST)
    with raises(EngineError, "adapters-of-other-shape", containing=value):
        compute(engine, method, replace(good, adapters=adapters))
    compute(engine, method, good)
    assert engine.calls == 1 and engine.seconds > 0


@pytest.mark.parametrize("method", ["jvp", "vjp"])
def test_derivatives_are_of_one_copy(method: str) -> None:
    call = call_with(FIRST, copies=2)
    with raises(EngineError, "adapters-of-other-shape", containing=f"float32 [2, {SIZE}]"):
        compute(Zeros(DECODER, 1), method, call)
    assert compute(Zeros(DECODER, 1), "forward", call) is not None


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
def test_a_call_without_sequences_is_refused(method: str) -> None:
    with raises(EngineError, "call-empty"):
        compute(Zeros(DECODER, 1), method, call_with())


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("u.layers.0.q_proj", None, "3 factors"),
        ("extra", np.zeros((2, 1, 4), np.float32), "5 factors"),
        ("u.layers.0.q_proj", np.zeros((2, 1, 4)), "float64 [2, 1, 4]"),
        ("v.layers.0.v_proj", np.zeros((2, 1, 7), np.float32), "float32 [2, 1, 7]"),
        ("v.layers.0.v_proj", np.zeros((2, 2, 6), np.float32), "float32 [2, 2, 6]"),
        ("v.layers.0.v_proj", np.zeros((3, 1, 6), np.float32), "float32 [3, 1, 6]"),
        ("v.layers.0.v_proj", np.zeros((2, 6), np.float32), "float32 [2, 6]"),
    ],
)
def test_directions_that_dont_fit_are_reported_and_the_engine_stays_usable(
    name: str, value: Any, result: str
) -> None:
    engine, call = Zeros(DECODER, 1), call_with(FIRST)
    directions = {**directions_of(DECODER), name: value}
    if value is None:
        del directions[name]
    with raises(EngineError, "directions-of-other-shape", containing=result):
        engine.jvp(call, directions)
    with raises(EngineError, "directions-of-other-shape", containing="[0, 1, "):
        engine.jvp(call, directions_of(DECODER, queries=0))
    compute(engine, "jvp", call)
    assert engine.calls == 1


def test_a_gradient_of_another_shape_than_the_outputs_is_refused() -> None:
    engine, call = Zeros(DECODER, 1), call_with(FIRST, sequence())
    with raises(EngineError, "gradient-of-other-shape", containing="[]"):
        engine.vjp(call, lambda outputs: outputs.sum())
    with raises(EngineError, "gradient-of-other-shape", containing="[1, 3]"):
        engine.vjp(call, lambda outputs: outputs[None])
    _, gradient = engine.vjp(call, lambda outputs: np.ones(outputs.shape))
    assert gradient.dtype == np.float32


def test_refusals_of_the_runtime_are_explained() -> None:
    engine = Zeros(DECODER, 1)
    with raises(EngineError, "engine-failed", containing="0x12"):
        engine.forward(call_with(TokenSequence((63,))))
    engine.forward(call_with(FIRST))


def test_the_number_of_threads_is_fixed_while_an_engine_is_used() -> None:
    engine = Zeros(DECODER, 2)
    assert not check_threads(None, 2) and not check_threads(2, 2)
    with raises(EngineError, "threads-differ", containing="2"):
        check_threads(1, 2)
    # Like a traceback that holds its own frame.
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    del engine, cycle
    assert check_threads(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_store_copies_each_row_to_its_current_position(dtype: str) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    cache, expected = (np.zeros((3, 3, 6, 4), dtype) for _ in range(2))
    positions = np.zeros(2, np.int64)
    store = Store(values, cache, positions)
    for first, second in ((5, 0), (1, 4)):
        positions[:] = first, second
        values += 1
        store.run()
        expected[0, :, first], expected[1, :, second] = values
        assert cache.tobytes() == expected.tobytes()
