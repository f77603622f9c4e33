"""Only experts with tokens are loaded, for any memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prge.engine import Call
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.signatures import BACKWARD, FORWARD
from server_export.oracle import TorchEngine
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    bits,
    call_of,
    computed,
    counted_loads,
    opened,
    oracle_of,
    split,
)

pytestmark = [needs_compiler, pytest.mark.whole]


@pytest.fixture(scope="module")
def folder(make_chain: Callable[[str], Path]) -> Path:
    return make_chain("olmoe")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "bundle")


def test_a_step_loads_only_the_experts_that_its_tokens_are_routed_to(folder: Path, bundle: Bundle) -> None:
    chain = bundle.chain
    layers = [turn for turn in chain.block_groups(range(chain.head_start)) if chain.is_expert(turn.start)]
    # Without padding, which is routed to experts too.
    call = call_of(chain.model, 1, lengths=[8])
    (sequence,) = call.sequences
    call = replace(call, sequences=(replace(sequence, tokens=sequence.tokens[:2] * 4),))
    expected = _experts_of(oracle_of(folder), call)
    assert all(0 < len(experts) < 8 for experts in expected)
    min_bytes = max(chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    result = []
    for memory in (None, min_bytes):
        programs = opened(bundle, BACKWARD, loaded=memory)
        with counted_loads(programs) as loads:
            result.append(bits(computed(programs.engine, BACKWARD, call)))
        for layer, experts in zip(layers, expected, strict=True):
            for role in (FORWARD, BACKWARD):
                loaded = [number - layer.start for number, each in loads if number in layer and each == role]
                assert sorted(loaded) == experts
    assert result[0] == result[1]


def _experts_of(oracle: TorchEngine, call: Call) -> list[list[int]]:
    """Return the experts that transformers' routers choose for a sequence, by layer."""
    chosen: list[list[int]] = []

    def keep(_router: object, _given: object, result: tuple[torch.Tensor, ...]) -> None:
        chosen.append(result[2].unique().tolist())

    for name, module in oracle.network.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(keep)
    oracle.forward(call)
    return chosen


def test_a_row_has_the_same_outputs_among_other_tokens(bundle: Bundle) -> None:
    """An expert's tokens come from many rows and copies, and exceed one call of its program."""
    call, engine = call_of(bundle.chain.model, 40, copies=3), opened(bundle, FORWARD).engine
    among = split(bundle.chain.model, call, engine.forward(call))
    for copy, number in ((0, 0), (0, 17), (2, 39)):
        alone = Call((call.sequences[number],), call.adapters[copy : copy + 1])
        np.testing.assert_allclose(engine.forward(alone)[0], among[number][copy], rtol=1e-5, atol=1e-5)
