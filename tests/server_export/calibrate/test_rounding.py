"""Codes of a chain's layers: blocks answer closer to the model, and every architecture has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.calibrate.rounding import calibrated
from server_export.calibrate.rows import filled_up
from server_export.calibrate.sensitivities import choose_int8, int4_layers, measure
from server_export.checkpoint.tokenization import on_device
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.model.inputs import Walk
from server_export.pipeline import in_scheme, with_int8
from server_export.quantize.frozen import codes_of, scale_of
from tests.server_export.calibrate.chains import ROWS, int4_chain
from tests.tiny_models import VOCABULARY, make_tokenizer


def answers_of(chain: ModelChain, weights: ModelChain | None = None) -> torch.Tensor:
    """What the last block answers to the rows, with the rounded weights of a chain or the float ones."""
    exact = in_scheme(chain, "fp32")
    walk = Walk(exact, ROWS)
    for turn in exact.turns(exact.end):
        if exact.blocks[turn.start].is_expert:
            walk.advance_experts(turn, lambda block, _: give(block, weights))
        else:
            give(block := EagerBlock(exact, turn.start), weights)
            walk.advance(block)
    return walk.tokens(walk.states)


def give(block: EagerBlock, weights: ModelChain | None) -> None:
    """Let a block compute with the rounded weights of a chain."""
    if weights is None:
        return
    made = weights.tensors(block.number)
    for name in weights.kinds[weights.kind_of[block.number]].frozen.layers:
        codes, scale = made[codes_of(name)], made[scale_of(name)]
        groups = codes.float().view(*scale.shape, -1) * scale.float().unsqueeze(2)
        block.tensors[name] = groups.view(codes.shape)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "albert"])
def test_a_calibrated_chain_answers_closer_to_the_model(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    expected = answers_of(chain)
    (tmp_path / "codes").mkdir()
    found = calibrated(chain, ROWS, tmp_path / "codes")
    errors = [float((answers_of(each, each) - expected).square().mean()) for each in (chain, found)]
    assert errors[1] < 0.9 * errors[0]
    number = next(number for number in range(chain.end) if int4_layers(chain, number))
    assert {chain.own_names(number)[name] for name in int4_layers(chain, number)} == set(
        found.rounded(number)
    )


@pytest.mark.parametrize("architecture", ["albert", "zamba2"])
def test_a_layer_that_is_used_again_has_the_codes_of_its_first_use(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    (tmp_path / "codes").mkdir()
    found = calibrated(chain, ROWS, tmp_path / "codes")
    codes: dict[str, torch.Tensor] = {}
    uses = 0
    for number in range(chain.end):
        for name, weight in found.rounded(number).items():
            uses += 1
            assert torch.equal(codes.setdefault(name, weight.codes), weight.codes)
    assert 0 < len(codes) < uses


def test_of_int8_layers_nothing_is_calibrated(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "llama")
    chain = with_int8(chain, choose_int8(chain, measure(chain, ROWS), 5.0))
    (tmp_path / "codes").mkdir()
    found = calibrated(chain, ROWS, tmp_path / "codes")
    for number in range(1, chain.end):
        layers = chain.kinds[chain.kind_of[number]].frozen.layers
        int8 = {chain.own_names(number)[name] for name, is_int4 in layers.items() if not is_int4}
        assert int8 and not int8 & set(found.rounded(number))


def test_experts_that_see_few_tokens_are_rounded_alone(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "olmoe")
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few, many = calibrated(chain, ROWS[:2], tmp_path / "few"), calibrated(chain, ROWS * 8, tmp_path / "many")
    experts = [number for number in range(chain.end) if chain.blocks[number].is_expert]
    assert experts and not any(few.rounded(number) for number in experts)
    assert any(many.rounded(number) for number in experts)


def test_rows_are_filled_up_with_the_text() -> None:
    tokenizer = on_device(make_tokenizer(), "auto", VOCABULARY)
    rows = [(3, 4, 5)]
    found = filled_up(rows, tokenizer, 100, 16)
    assert found[0] == (3, 4, 5) and sum(map(len, found)) == 100 and max(map(len, found)) == 16
    assert filled_up([(3,) * 100], tokenizer, 100, 16) == [(3,) * 100]
