"""What every engine does before it calls a program: inputs are checked, and refusals are told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from device_runner.engines.base import CheckedEngine, check_threads
from device_runner.engines.refusals import RefusedError
from prge.contract import Contract
from prge.engine import Array, FloatArray
from prge.errors import EngineError
from tests.bundles import make_contract


class Zeros(CheckedEngine):
    """An engine that answers zeros, or with a token 63 what the runtime says when it refuses."""

    given: dict[str, Array]

    def _call(self, inputs: dict[str, Array]) -> Sequence[Array]:
        if inputs["tokens"].flat[0] == 63:
            raise RefusedError("error 0x12", "", 0x12)
        self.given = inputs
        return [np.zeros(spec.shape, np.float32) for spec in self.contract.outputs]

    def _back(
        self, inputs: dict[str, Array], slope: Callable[[FloatArray], FloatArray]
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        (answers,) = self._call(inputs)
        return answers, {"slope": slope(answers)}


CONTRACTS = {
    "stack": make_contract(),
    "exact": make_contract(role="back", copies=1),
    "encoder": make_contract(readout="pooled", positions=0, width=8),
}
LIMITS = {
    ("stack", "tokens"): 64,
    ("stack", "positions"): 16,
    ("stack", "targets"): 64,
    ("encoder", "attention_mask"): 2,
}


def inputs_of(contract: Contract) -> dict[str, Array]:
    return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in contract.inputs}


@pytest.mark.parametrize(("program", "name"), LIMITS)
def test_an_index_out_of_range_never_reaches_the_program(program: str, name: str) -> None:
    engine, limit = Zeros(CONTRACTS[program], 1), LIMITS[program, name]
    inputs = inputs_of(engine.contract)
    inputs[name].flat[-1] = limit - 1
    engine.forward(inputs)
    for bad in (limit, -1):
        inputs[name] = np.full_like(inputs[name], bad)
        with pytest.raises(EngineError, match=f"the input {name} holds {bad}, must be in 0 to {limit - 1}"):
            engine.forward(inputs)


def test_every_integer_input_has_a_limit() -> None:
    for contract in CONTRACTS.values():
        for spec in contract.inputs:
            if spec.dtype == "int64":
                inputs = inputs_of(contract)
                inputs[spec.name] = np.full(spec.shape, -1)
                with pytest.raises(EngineError, match=f"the input {spec.name} holds -1"):
                    Zeros(contract, 1).forward(inputs)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", None, r"tokens is missing.*\n.*int64 \[8, 16\]"),
        ("tokens", np.zeros((8, 16), np.int32), r"tokens is int32 \[8, 16\], must be int64 \[8, 16\]"),
        ("targets", np.zeros((8, 4), np.int64), r"targets is int64 \[8, 4\], must be int64 \[8, 3\]"),
        ("lora_b.layers.0.q_proj", np.zeros((4, 4, 8)), r"is float64 \[4, 4, 8\], must be float32"),
        ("positions", [[0]], r"positions is a list, must be a numpy array"),
        ("extra", np.zeros(1), r"no input extra"),
    ],
)
def test_a_wrong_input_is_named_and_the_engine_stays_usable(name: str, value: Any, message: str) -> None:
    engine = Zeros(make_contract(), 1)
    good = inputs_of(engine.contract)
    bad = {**good, name: value}
    if value is None:
        del bad[name]
    with pytest.raises(EngineError, match=message):
        engine.forward(bad)
    engine.forward(good)
    assert engine.calls == 1 and engine.seconds > 0


def test_any_order_and_layout_is_taken() -> None:
    engine = Zeros(make_contract(), 1)
    strange = {name: np.asfortranarray(array) for name, array in reversed(inputs_of(engine.contract).items())}
    strange["tokens"].flags.writeable = False
    assert list(engine.forward(strange)) == ["logprobs"]
    assert all(array.flags.c_contiguous for array in engine.given.values())


def test_what_the_runtime_refuses_is_told_in_words() -> None:
    engine = Zeros(make_contract(), 1)
    refused = {**inputs_of(engine.contract), "tokens": np.full((8, 16), 63)}
    with pytest.raises(EngineError, match=r"an argument is invalid \(ExecuTorch 0x12\)"):
        engine.forward(refused)
    engine.forward(inputs_of(engine.contract))


def test_the_pool_is_of_one_size_while_an_engine_is_used() -> None:
    engine = Zeros(make_contract(), 2)
    assert not check_threads(None, 2) and not check_threads(2, 2)
    with pytest.raises(EngineError, match="was opened with 2 threads, this one asks for 1"):
        check_threads(1, 2)
    # As a traceback that holds its own frame keeps it.
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    del engine, cycle
    assert check_threads(1, 2)
