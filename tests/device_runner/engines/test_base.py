"""What every engine does before it calls a program: inputs are checked, and refusals are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from device_runner.engines.base import ProgramEngine
from prge.contract import Contract
from prge.engine import Array
from prge.errors import EngineError
from tests.bundles import make_contract


class Zeros(ProgramEngine):
    """A program that answers zeros."""

    prepare = set_threads = open_program = staticmethod(lambda *_: None)

    def _prepared(self, array: Array) -> Any:
        return array

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        return [np.zeros(spec.shape, np.float32) for spec in self.contract.outputs]


CONTRACTS = {
    "stack": make_contract(),
    "verbalizer": make_contract(readout="verbalizer", label_tokens=(5, 6)),
    "exact": make_contract(kind="exact", copies=1),
    "encoder": make_contract(readout="pooled", positions=0, width=8),
}
LIMITS = {
    ("stack", "tokens"): 64,
    ("stack", "positions"): 16,
    ("stack", "targets"): 64,
    ("verbalizer", "targets"): 2,
    ("encoder", "attention_mask"): 2,
    ("exact", "cells"): 2 * 2 * 3,
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
