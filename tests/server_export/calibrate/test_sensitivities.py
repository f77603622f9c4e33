"""Which layers stay int8: those whose rounding changes most, within the bits that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.calibrate.gptq import nearest
from server_export.calibrate.sensitivities import (
    Sensitivity,
    choose_int8,
    int4_layers,
    int8_of_kind,
    mean_bits,
    measure,
)
from server_export.model.eager import EagerBlock
from server_export.model.inputs import Walk
from server_export.pipeline import in_scheme, with_int8
from tests.server_export.calibrate.chains import ROWS, int4_chain


def test_an_error_is_that_of_the_blocks_answer(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "llama")
    found = measure(chain, ROWS)
    exact = in_scheme(chain, "fp32")
    walk = Walk(exact, ROWS)
    walk.advance(EagerBlock(exact, 0))
    block = EagerBlock(exact, 1)
    answers = walk.tokens(walk.answers(block))
    names = int4_layers(chain, 1)
    assert [chain.own_names(1)[name] for name in names] == list(found[1]) and len(names) == 7
    for name in names:
        weight = block.tensors[name]
        block.tensors[name] = nearest(weight).dequantize()
        changed = (walk.tokens(walk.answers(block)) - answers).square().sum(1)
        block.tensors[name] = weight
        squares = answers.square().sum(1)
        each = found[1][chain.own_names(1)[name]]
        expected = (changed / squares).mean() + changed.sum() / squares.sum()
        assert each.numbers == weight.numel() and each.error == pytest.approx(float(expected))


@pytest.mark.parametrize("bits", [4.0, 4.25, 5.0, 8.0])
def test_bits_are_kept_and_spent(tmp_path: Path, bits: float) -> None:
    chain = int4_chain(tmp_path, "llama", num_hidden_layers=4)
    found = measure(chain, ROWS)
    int8 = choose_int8(chain, found, bits)
    assert 4 <= mean_bits(found, int8) <= bits
    if bits == 4:
        assert not int8
    if bits == 8:
        assert mean_bits(found, int8) == 8
    changed = with_int8(chain, int8)
    assert len(set(changed.kind_of)) <= len(set(chain.kind_of)) + 1
    for number, names in int8.items():
        own = changed.own_names(number)
        layers = changed.kinds[changed.kind_of[number]].frozen.layers
        assert {own[name] for name, is_int4 in layers.items() if not is_int4} == names


def test_layers_that_change_most_for_their_numbers_come_first() -> None:
    """Two blocks of a kind: `a` is small and sensitive in both, `b` in the second alone."""
    first = {"a": Sensitivity(10, 5.0), "b": Sensitivity(50, 0.1), "c": Sensitivity(40, 0.2)}
    second = {"a": Sensitivity(10, 4.0), "b": Sensitivity(50, 9.0), "c": Sensitivity(40, 0.1)}
    blocks = {1: first, 2: second}
    assert int8_of_kind(blocks, 0.1) == {1: {"a"}, 2: {"a"}}
    assert int8_of_kind(blocks, 0.36) == {1: {"a"}, 2: {"a", "b"}}
    assert int8_of_kind(blocks, 0.0) == {1: frozenset(), 2: frozenset()}


@pytest.mark.parametrize("architecture", ["albert", "zamba2"])
def test_a_layer_that_is_used_again_has_the_bits_of_its_first_use(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    found = measure(chain, ROWS)
    int8 = choose_int8(chain, found, 5.0)
    uses: dict[str, set[bool]] = {}
    for number, layers in found.items():
        for name in layers:
            uses.setdefault(name, set()).add(name in int8.get(number, ()))
    assert len(uses) < sum(map(len, found.values())) and any(int8.values())
    assert all(len(bits) == 1 for bits in uses.values())


def test_experts_stay_int4(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "olmoe")
    found = measure(chain, ROWS)
    assert found and not any(chain.blocks[number].is_expert for number in found)
    assert all(
        torch.isfinite(torch.tensor([each.error for each in of.values()])).all() for of in found.values()
    )
