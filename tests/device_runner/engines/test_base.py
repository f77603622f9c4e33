"""What every engine does before it computes: calls are checked, and refusals are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from device_runner.engines.base import CheckedEngine, check_threads
from device_runner.engines.errors import EngineRefusalError
from prge.engine import Call, Directions, FloatArray, Target, TokenSequence
from prge.errors import EngineError
from prge.formats.adapter import adapter_size
from prge.model_spec import ModelSpec, matrices
from tests.bundles import make_spec


class Zeros(CheckedEngine):
    """An engine that answers zeros, or with a first token 63 what the runtime says when it refuses."""

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
WORDS, LENGTH = DECODER.vocabulary_size, DECODER.sequence_length
FIRST = TokenSequence((5,), (Target(0, 6, 1.0, 0),))


def sequence(tokens: int = 4, token: int = 0, position: int = 0, target: int = 0) -> TokenSequence:
    """One with a last token and a last target of a test's own."""
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
    """Call a method with arguments that fit."""
    if method == "forward":
        return engine.forward(call)
    if method == "jvp":
        return engine.jvp(call, directions_of(engine.model, 2, len(call.sequences)))
    return engine.vjp(call, np.ones_like)


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
@pytest.mark.parametrize(
    ("model", "good", "bad", "told"),
    [
        *(
            (model, sequence(token=WORDS - 1), sequence(token=token), "has a token that isn't one of 0 to 63")
            for model in (DECODER, ENCODER)
            for token in (WORDS, -1)
        ),
        *(
            (
                DECODER,
                sequence(target=WORDS - 1),
                sequence(target=target),
                f"has the target {target} at 0, must",
            )
            for target in (WORDS, -1)
        ),
        *(
            (
                DECODER,
                sequence(position=3),
                sequence(position=at),
                f"the target 0 at {at}, must .* at 0 to 3$",
            )
            for at in (4, -1)
        ),
        *(
            (model, sequence(LENGTH), sequence(count), f"has {count} tokens, must have 1 to {LENGTH}")
            for model in (DECODER, ENCODER)
            for count in (LENGTH + 1, 0)
        ),
    ],
)
def test_an_index_out_of_range_never_reaches_the_program(
    method: str, model: ModelSpec, good: TokenSequence, bad: TokenSequence, told: str
) -> None:
    engine = Zeros(model, 1)
    compute(engine, method, call_with(FIRST, good))
    with pytest.raises(EngineError, match=f"^sequence 1 .*{told}"):
        compute(engine, method, call_with(FIRST, bad))
    assert engine.calls == 1


ADAPTERS = call_with(FIRST).adapters


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
@pytest.mark.parametrize(
    ("adapters", "told"),
    [
        (ADAPTERS.astype(np.float64), rf"are float64 \[1, {SIZE}\], must be float32"),
        (ADAPTERS[:, :-1], rf"are float32 \[1, {SIZE - 1}\], must be float32 \[.*, {SIZE}\]"),
        (ADAPTERS[0], rf"are float32 \[{SIZE}\]"),
        (ADAPTERS[None], rf"are float32 \[1, 1, {SIZE}\]"),
        (ADAPTERS[:0], rf"are float32 \[0, {SIZE}\]"),
        (np.float32(0), r"are float32 \[\]"),
    ],
)
def test_adapters_that_dont_fit_are_told_and_the_engine_stays_usable(
    method: str, adapters: Any, told: str
) -> None:
    engine = Zeros(DECODER, 1)
    good = call_with(FIRST)
    with pytest.raises(EngineError, match=f"the adapters {told}"):
        compute(engine, method, replace(good, adapters=adapters))
    compute(engine, method, good)
    assert engine.calls == 1 and engine.seconds > 0


@pytest.mark.parametrize("method", ["jvp", "vjp"])
def test_derivatives_are_of_one_copy(method: str) -> None:
    call = call_with(FIRST, copies=2)
    with pytest.raises(EngineError, match=rf"are float32 \[2, {SIZE}\], must be float32 \[1, {SIZE}\]"):
        compute(Zeros(DECODER, 1), method, call)
    assert compute(Zeros(DECODER, 1), "forward", call) is not None


@pytest.mark.parametrize("method", ["forward", "jvp", "vjp"])
def test_a_call_without_sequences_is_refused(method: str) -> None:
    with pytest.raises(EngineError, match="no sequences"):
        compute(Zeros(DECODER, 1), method, call_with())


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("u.layers.0.q_proj", None, "directions are of 3 factors, must be of 4"),
        ("extra", np.zeros((2, 1, 4), np.float32), "directions are of 5 factors, must be of 4"),
        ("u.layers.0.q_proj", np.zeros((2, 1, 4)), r"q_proj is float64 \[2, 1, 4\], must be float32"),
        ("v.layers.0.v_proj", np.zeros((2, 1, 7), np.float32), r"\[2, 1, 7\].* float32 \[queries, 1, 6\]"),
        ("v.layers.0.v_proj", np.zeros((2, 2, 6), np.float32), r"v_proj is float32 \[2, 2, 6\]"),
        ("v.layers.0.v_proj", np.zeros((3, 1, 6), np.float32), r"v_proj is float32 \[3, 1, 6\]"),
        ("v.layers.0.v_proj", np.zeros((2, 6), np.float32), r"v_proj is float32 \[2, 6\]"),
    ],
)
def test_directions_that_dont_fit_are_told_and_the_engine_stays_usable(
    name: str, value: Any, told: str
) -> None:
    engine, call = Zeros(DECODER, 1), call_with(FIRST)
    directions = {**directions_of(DECODER), name: value}
    if value is None:
        del directions[name]
    with pytest.raises(EngineError, match=told):
        engine.jvp(call, directions)
    with pytest.raises(EngineError, match=r"\[0, 1, "):
        engine.jvp(call, directions_of(DECODER, queries=0))
    compute(engine, "jvp", call)
    assert engine.calls == 1


def test_a_gradient_of_another_shape_than_the_outputs_is_refused() -> None:
    engine, call = Zeros(DECODER, 1), call_with(FIRST, sequence())
    with pytest.raises(EngineError, match=r"gradient of the loss has the shape \[\], the outputs \[3\]"):
        engine.vjp(call, lambda outputs: outputs.sum())
    with pytest.raises(EngineError, match=r"has the shape \[1, 3\], the outputs \[3\]"):
        engine.vjp(call, lambda outputs: outputs[None])
    _, gradient = engine.vjp(call, lambda outputs: np.ones(outputs.shape))
    assert gradient.dtype == np.float32


def test_what_the_runtime_refuses_is_told_in_words() -> None:
    engine = Zeros(DECODER, 1)
    with pytest.raises(EngineError, match=r"an argument is invalid \(ExecuTorch 0x12\)"):
        engine.forward(call_with(TokenSequence((63,))))
    engine.forward(call_with(FIRST))


def test_the_pool_is_of_one_size_while_an_engine_is_used() -> None:
    engine = Zeros(DECODER, 2)
    assert not check_threads(None, 2) and not check_threads(2, 2)
    with pytest.raises(EngineError, match="was opened with 2 threads, this one asks for 1"):
        check_threads(1, 2)
    # As a traceback that holds its own frame keeps it.
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    del engine, cycle
    assert check_threads(1, 2)
