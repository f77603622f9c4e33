"""The choice of layers that stay int8: those whose rounding has the largest effect, within the average
bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.calibrate.gptq import round_to_nearest
from server_export.calibrate.sensitivities import (
    Sensitivity,
    choose_int8,
    int4_layers,
    int8_of_block_type,
    mean_bits,
    measure_sensitivities,
)
from server_export.model.blockwise import BlockwiseForward
from server_export.model.eager import EagerBlock
from server_export.pipeline import with_int8, with_scheme
from tests.server_export.calibrate.chains import ROWS, int4_chain


def test_an_error_is_that_of_the_blocks_outputs(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "llama")
    sensitivities = measure_sensitivities(chain, ROWS)
    exact = with_scheme(chain, "fp32")
    walk = BlockwiseForward(exact, ROWS)
    walk.advance(EagerBlock(exact, 0))
    block = EagerBlock(exact, 1)
    outputs = walk.tokens(walk.outputs(block))
    names = int4_layers(chain, 1)
    assert [chain.weight_names(1)[name] for name in names] == list(sensitivities[1]) and len(names) == 7
    for name in names:
        weight = block.tensors[name]
        block.tensors[name] = round_to_nearest(weight).dequantize()
        changed = (walk.tokens(walk.outputs(block)) - outputs).square().sum(1)
        block.tensors[name] = weight
        squares = outputs.square().sum(1)
        sensitivity = sensitivities[1][chain.weight_names(1)[name]]
        expected = (changed / squares).mean() + changed.sum() / squares.sum()
        assert sensitivity.numel == weight.numel() and sensitivity.error == pytest.approx(float(expected))


@pytest.mark.parametrize("bits", [4.0, 4.25, 5.0, 8.0])
def test_the_average_bits_are_used_and_not_exceeded(tmp_path: Path, bits: float) -> None:
    chain = int4_chain(tmp_path, "llama", num_hidden_layers=4)
    sensitivities = measure_sensitivities(chain, ROWS)
    int8 = choose_int8(chain, sensitivities, bits)
    assert 4 <= mean_bits(sensitivities, int8) <= bits
    if bits == 4:
        assert not int8
    if bits == 8:
        assert mean_bits(sensitivities, int8) == 8
    changed = with_int8(chain, int8)
    assert len(set(changed.type_of)) <= len(set(chain.type_of)) + 1
    for number, names in int8.items():
        names_in_model = changed.weight_names(number)
        layers = changed.block_types[changed.type_of[number]].frozen.layers
        assert {names_in_model[name] for name, is_int4 in layers.items() if not is_int4} == names


def test_layers_with_the_largest_effect_per_element_come_first() -> None:
    """Two blocks of a type: `a` is small and sensitive in both, `b` in the second only."""
    first = {"a": Sensitivity(10, 5.0), "b": Sensitivity(50, 0.1), "c": Sensitivity(40, 0.2)}
    second = {"a": Sensitivity(10, 4.0), "b": Sensitivity(50, 9.0), "c": Sensitivity(40, 0.1)}
    blocks = {1: first, 2: second}
    assert int8_of_block_type(blocks, 0.1) == {1: {"a"}, 2: {"a"}}
    assert int8_of_block_type(blocks, 0.36) == {1: {"a"}, 2: {"a", "b"}}
    assert int8_of_block_type(blocks, 0.0) == {1: frozenset(), 2: frozenset()}


@pytest.mark.parametrize("architecture", ["albert", "zamba2"])
def test_a_reused_layer_has_the_bits_of_its_first_use(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    sensitivities = measure_sensitivities(chain, ROWS)
    int8 = choose_int8(chain, sensitivities, 5.0)
    uses: dict[str, set[bool]] = {}
    for number, layers in sensitivities.items():
        for name in layers:
            uses.setdefault(name, set()).add(name in int8.get(number, ()))
    assert len(uses) < sum(map(len, sensitivities.values())) and any(int8.values())
    assert all(len(bits) == 1 for bits in uses.values())


def test_experts_stay_int4(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "olmoe")
    sensitivities = measure_sensitivities(chain, ROWS)
    assert sensitivities and not any(chain.blocks[number].is_expert for number in sensitivities)
    assert all(
        torch.isfinite(torch.tensor([each.error for each in of.values()])).all()
        for of in sensitivities.values()
    )
