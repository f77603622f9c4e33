"""Codes of a chain's layers: they bring outputs closer to the model's, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.calibrate.rounding import calibrate_codes
from server_export.calibrate.rows import fill_up_rows
from server_export.calibrate.sensitivities import choose_int8, int4_layers, measure_sensitivities
from server_export.checkpoint.tokenization import device_tokenizer
from server_export.model.blockwise import BlockwiseForward
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.pipeline import with_int8, with_scheme
from server_export.quantize.frozen import codes_name, scale_name
from tests.server_export.calibrate.chains import ROWS, int4_chain
from tests.tiny_models import VOCABULARY, make_tokenizer


def outputs_of(chain: ModelChain, weights: ModelChain | None = None) -> torch.Tensor:
    """Return the last block's outputs, with the rounded weights of a chain or the float weights."""
    exact = with_scheme(chain, "fp32")
    walk = BlockwiseForward(exact, ROWS)
    for group in exact.block_groups(exact.head_start):
        if exact.blocks[group.start].is_expert:
            walk.advance_experts(group, lambda block, _: use_rounded(block, weights))
        else:
            use_rounded(block := EagerBlock(exact, group.start), weights)
            walk.advance(block)
    return walk.tokens(walk.states)


def use_rounded(block: EagerBlock, weights: ModelChain | None) -> None:
    """Let a block compute with the rounded weights of a chain."""
    if weights is None:
        return
    tensors = weights.tensors(block.number)
    for name in weights.block_types[weights.type_of[block.number]].frozen.layers:
        codes, scale = tensors[codes_name(name)], tensors[scale_name(name)]
        groups = codes.float().view(*scale.shape, -1) * scale.float().unsqueeze(2)
        block.tensors[name] = groups.view(codes.shape)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "albert"])
def test_outputs_of_a_calibrated_chain_are_closer_to_the_models(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    expected = outputs_of(chain)
    (tmp_path / "codes").mkdir()
    calibrated = calibrate_codes(chain, ROWS, tmp_path / "codes")
    errors = [float((outputs_of(each, each) - expected).square().mean()) for each in (chain, calibrated)]
    assert errors[1] < 0.9 * errors[0]
    number = next(number for number in range(chain.head_start) if int4_layers(chain, number))
    assert {chain.weight_names(number)[name] for name in int4_layers(chain, number)} == set(
        calibrated.rounded(number)
    )


@pytest.mark.parametrize("architecture", ["albert", "zamba2"])
def test_a_reused_layer_has_the_codes_of_its_first_use(architecture: str, tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, architecture)
    (tmp_path / "codes").mkdir()
    calibrated = calibrate_codes(chain, ROWS, tmp_path / "codes")
    codes: dict[str, torch.Tensor] = {}
    uses = 0
    for number in range(chain.head_start):
        for name, weight in calibrated.rounded(number).items():
            uses += 1
            assert torch.equal(codes.setdefault(name, weight.codes), weight.codes)
    assert 0 < len(codes) < uses


def test_int8_layers_are_not_calibrated(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "llama")
    chain = with_int8(chain, choose_int8(chain, measure_sensitivities(chain, ROWS), 5.0))
    (tmp_path / "codes").mkdir()
    calibrated = calibrate_codes(chain, ROWS, tmp_path / "codes")
    for number in range(1, chain.head_start):
        layers = chain.block_types[chain.type_of[number]].frozen.layers
        int8 = {chain.weight_names(number)[name] for name, is_int4 in layers.items() if not is_int4}
        assert int8 and not int8 & set(calibrated.rounded(number))


def test_experts_with_few_tokens_are_rounded_to_nearest(tmp_path: Path) -> None:
    chain = int4_chain(tmp_path, "olmoe")
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few, many = (
        calibrate_codes(chain, ROWS[:2], tmp_path / "few"),
        calibrate_codes(chain, ROWS * 8, tmp_path / "many"),
    )
    experts = [number for number in range(chain.head_start) if chain.blocks[number].is_expert]
    assert experts and not any(few.rounded(number) for number in experts)
    assert any(many.rounded(number) for number in experts)


def test_rows_are_filled_up_with_the_neutral_text() -> None:
    tokenizer = device_tokenizer(make_tokenizer(), "auto", VOCABULARY)
    rows = [(3, 4, 5)]
    filled = fill_up_rows(rows, tokenizer, 100, 16)
    assert filled[0] == (3, 4, 5) and sum(map(len, filled)) == 100 and max(map(len, filled)) == 16
    assert fill_up_rows([(3,) * 100], tokenizer, 100, 16) == [(3,) * 100]
