"""Experts on the engine: only those that tokens ask for are loaded, whatever a budget allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, STACK
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    Inputs,
    Whole,
    computed,
    counted_loads,
    inputs_of,
    opened,
)

pytestmark = [needs_compiler, pytest.mark.whole]


@pytest.fixture(scope="module")
def folder(make_chain: Callable[[str], Path]) -> Path:
    return make_chain("olmoe")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "bundle")


def test_a_step_loads_the_experts_that_its_tokens_ask_for(folder: Path, bundle: Bundle) -> None:
    chain = bundle.chain
    layers = [turn for turn in chain.turns(range(chain.end)) if chain.is_expert(turn.start)]
    # No padding, which asks for experts too.
    contract = chain.contract(BACK, 1, length=8)
    given = inputs_of(contract)
    given["tokens"][0] = np.resize(given["tokens"][0, :2], 8)
    expected = _experts_of(Whole.of(folder), given)
    assert all(0 < len(experts) < 8 for experts in expected)
    least = max(chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    found = []
    for memory in (None, least):
        engines = opened(bundle, contract, loaded=memory)
        with counted_loads(engines) as loads:
            found.append({name: array.tobytes() for name, array in computed(engines.step, given).items()})
        for layer, experts in zip(layers, expected, strict=True):
            for role in (STACK, BACK):
                loaded = [number - layer.start for number, each in loads if number in layer and each == role]
                assert sorted(loaded) == experts
    assert found[0] == found[1]


def _experts_of(whole: Whole, given: Inputs) -> list[list[int]]:
    """The experts that transformers' routers choose for a row, by layer."""
    chosen: list[list[int]] = []

    def keep(_router: object, _given: object, found: tuple[torch.Tensor, ...]) -> None:
        chosen.append(found[2].unique().tolist())

    for name, module in whole.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(keep)
    whole.answers(given, {name: torch.from_numpy(each) for name, each in given.items() if "lora" in name})
    return chosen


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
