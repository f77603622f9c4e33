"""Experts on the engine: only those that tokens ask for are loaded, whatever a budget allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, STACK
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import computed, counted_loads, inputs_of, opened

pytestmark = [needs_compiler, pytest.mark.whole]


@pytest.fixture(scope="module")
def bundle(make_chain: Callable[[str], Path]) -> Bundle:
    return open_bundle(make_chain("olmoe") / "bundle")


def test_a_step_loads_the_experts_that_its_tokens_ask_for(bundle: Bundle) -> None:
    chain = bundle.chain
    layers = [turn for turn in chain.turns(range(chain.end)) if chain.is_expert(turn.start)]
    contract = chain.contract(BACK, 1, length=2)
    given = inputs_of(contract)
    least = max(chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    found = []
    for memory in (None, least):
        engines = opened(bundle, contract, loaded=memory)
        with counted_loads(engines) as loads:
            found.append({name: array.tobytes() for name, array in computed(engines.step, given).items()})
        for layer in layers:
            # Two tokens choose two of eight each; the way back asks for the same.
            forward = [number for number, role in loads if number in layer and role == STACK]
            back = [number for number, role in loads if number in layer and role == BACK]
            assert 2 <= len(forward) <= 4 and sorted(forward) == sorted(back) and len({*back}) == len(back)
    assert found[0] == found[1]


def test_a_row_has_the_same_answers_among_other_tokens(bundle: Bundle) -> None:
    """An expert's tokens are of many rows and copies, and more than a call of its program takes."""
    contract = bundle.chain.contract(STACK, 40, copies=3)
    given = inputs_of(contract)
    (among,) = opened(bundle, contract).step.forward(given).values()
    one = bundle.chain.contract(STACK, 1)
    engine = opened(bundle, one).step
    for place in (0, 17, 119):
        alone = {name: array[place : place + 1] for name, array in given.items() if "lora" not in name}
        alone |= {name: array[place // 40][None] for name, array in given.items() if "lora" in name}
        (answer,) = engine.forward(alone).values()
        np.testing.assert_allclose(answer[0], among[place], rtol=1e-5, atol=1e-5)
