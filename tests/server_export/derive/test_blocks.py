"""Tangents and the way back of blocks: a chain of them computes what the whole model does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("executorch")

import torch
import torch.nn.functional as F
from eager_engine import EagerEngine

from prge.contract import LORA_B_PREFIX, U_PREFIX, V_PREFIX
from server_export.derive.backprop.joint import backpropagate, backpropagate_block
from server_export.derive.tangent.transform import RankOne, Slots, differentiate_block
from server_export.lower.lowering import rewritten_graph
from server_export.model.loss import answer_slopes
from server_export.model.program import example_inputs
from tests.server_export.derive.blocks import Blocks, call
from tests.server_export.derive.tangent.graphs import (
    program_with_tangents,
    relative_difference,
    tangents_by_gradients,
)
from tests.tiny_models import ARCHITECTURES

torch.set_num_threads(1)

QUANTIZED = [("llama", "8da4w"), ("qwen3", "8da8w"), ("gpt2", "8da4w"), ("bert", "8da8w")]


def tangents_of_chain(blocks: Blocks) -> torch.Tensor:
    """All slots of the answer, [1 + queries, rows, width of the answer]."""
    contract = blocks.contract
    rows, tokens = blocks.state.shape[:2]
    queries = contract.queries

    def slot_mask(tokens: int) -> torch.Tensor:
        return (torch.arange(1 + queries) > 0).float().reshape(-1, 1, 1, 1).expand(-1, 1, tokens, 1)

    state = torch.cat([blocks.state[None], torch.zeros(queries, *blocks.state.shape)])
    for block in blocks.blocks:
        seeds: dict[str, Any] = {"state": Slots(), **dict.fromkeys(block.adapter, RankOne(rows))}
        graph = differentiate_block(block.graph(), seeds, queries, tokens)
        (state,) = call(
            graph, {"state": state, "slot_mask": slot_mask(tokens), **block.inputs(), **factors(blocks)}
        )
    if contract.is_encoder:
        graph = differentiate_block(blocks.head_graph(0), {"state": Slots()}, queries, tokens)
        return call(graph, {"state": state, "mask": blocks.inputs["attention_mask"].float()})[0]
    state = blocks.at_positions(state)
    count = state.shape[1]
    graph = differentiate_block(blocks.head_graph(count), {"state": Slots()}, queries, count)
    targets = blocks.inputs["targets"].flatten()
    (answer,) = call(graph, {"state": state, "targets": targets, "slot_mask": slot_mask(count)})
    return answer.reshape(1 + queries, rows, -1)


def factors(blocks: Blocks) -> dict[str, torch.Tensor]:
    """Directions of the adapter by the names that they have in a block."""
    return {
        f"{prefix[0]}_lora_b_{module.name.replace('.', '_')}": blocks.inputs[prefix + module.name]
        for module in blocks.contract.modules
        for prefix in (U_PREFIX, V_PREFIX)
    }


@pytest.mark.export
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tangents_of_a_chain_are_those_of_the_model(architecture: str) -> None:
    blocks = Blocks(architecture, "tangent")
    found = tangents_of_chain(blocks)
    answer, _ = call_whole(program_with_tangents(blocks.built), blocks)
    assert relative_difference(found[0], answer) < 1e-6
    assert relative_difference(found[1:], tangents_by_gradients(blocks.built, blocks.values).float()) < 1e-5


@pytest.mark.export
@pytest.mark.parametrize(("architecture", "scheme"), QUANTIZED)
def test_tangents_of_a_quantized_chain_are_those_of_the_whole_graph(architecture: str, scheme: str) -> None:
    blocks = Blocks(architecture, "tangent", quantize=scheme)
    found = tangents_of_chain(blocks)
    answer, tangents = call_whole(program_with_tangents(blocks.built), blocks)
    assert relative_difference(found[0], answer) < 1e-6
    assert relative_difference(found[1:], tangents) < 1e-5


def call_whole(graph: Any, blocks: Blocks) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return graph(*blocks.values)


def gradients_of_chain(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Answer, slope of the first state, and gradients [rank, out] by input name."""
    contract = blocks.contract
    tokens = blocks.state.shape[1]
    states = [blocks.state]
    with torch.no_grad():
        for block in blocks.blocks:
            states.append(block.module(states[-1], block.tables, block.lora_b))
    *states, last = states
    count = last.shape[0] * contract.positions
    head = backpropagate_block(
        blocks.head_graph(count), ["state"], [], tokens if contract.is_encoder else count, returns_answer=True
    )
    inputs = {"state": last, "mask": blocks.inputs.get("attention_mask", torch.zeros(0)).float()}
    if not contract.is_encoder:
        inputs = {"state": blocks.at_positions(last), "targets": blocks.inputs["targets"].flatten()}
    answer, _ = call(head, {**inputs, "slope": torch.zeros(last.shape[0], last.shape[2])} if contract.is_encoder else {**inputs, "slope": torch.zeros(count)})
    described = [value for name, value in blocks.inputs.items() if name in described_names(blocks)]
    answer = answer.reshape(contract.outputs[0].shape)
    by_answer = answer_slopes(contract, answer, described)
    _, slope = call(head, {**inputs, "slope": by_answer if contract.is_encoder else by_answer.flatten()})
    if not contract.is_encoder:
        rows = torch.arange(contract.rows).unsqueeze(1).expand_as(blocks.inputs["positions"]).flatten()
        places = rows, blocks.inputs["positions"].flatten()
        slope = torch.zeros_like(last).index_put(places, slope, accumulate=True)
    gradients = {}
    for block, state in zip(reversed(blocks.blocks), reversed(states), strict=True):
        graph = backpropagate_block(block.graph(), ["state", *block.adapter], block.adapter, tokens)
        inputs = {"state": state, "slope": slope, "ones": torch.ones(1, tokens, 1), **block.inputs()}
        slope, *found = call(graph, inputs)
        gradients |= dict(zip(block.adapter, found, strict=True))
    return answer, slope, gradients


def described_names(blocks: Blocks) -> list[str]:
    return [spec.name for spec in blocks.contract.inputs[len(plain(blocks).inputs) :]]


def plain(blocks: Blocks) -> Any:
    return replace(blocks.contract, kind="stack", classes=0)


@pytest.mark.export
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_way_back_through_a_chain_gives_the_gradient_of_autograd(architecture: str) -> None:
    blocks = Blocks(architecture, "exact")
    answer, _, gradients = gradients_of_chain(blocks)
    stack = plain(blocks)
    arrays = {spec.name: blocks.inputs[spec.name].numpy() for spec in stack.inputs}
    arrays = {name: value[None] if name.startswith(LORA_B_PREFIX) else value for name, value in arrays.items()}
    eager = EagerEngine(blocks.built.module, stack)
    (theirs,) = (torch.from_numpy(value) for value in eager.forward(arrays).values())
    assert relative_difference(answer, theirs) < 1e-5
    described = [blocks.inputs[name] for name in described_names(blocks)]
    expected = eager.gradients(arrays, answer_slopes(blocks.contract, theirs, described).numpy())
    largest = max(float(torch.from_numpy(array).abs().max()) for array in expected.values())
    for module in blocks.contract.modules:
        found = gradients["lora_b_" + module.name.replace(".", "_")]
        assert float((found - torch.from_numpy(expected[module.input_name][0])).abs().max()) < 1e-5 * largest


@pytest.mark.export
@pytest.mark.parametrize(("architecture", "scheme"), QUANTIZED)
def test_the_way_back_through_a_quantized_chain_is_that_of_the_whole_graph(
    architecture: str, scheme: str
) -> None:
    blocks = Blocks(architecture, "exact", quantize=scheme)
    answer, _, gradients = gradients_of_chain(blocks)
    whole = backpropagate(
        rewritten_graph(blocks.built.module, example_inputs(plain(blocks))), blocks.contract
    )
    theirs, *expected = call_whole(whole, blocks)
    assert relative_difference(answer, theirs) < 1e-6
    ours = torch.cat([gradients["lora_b_" + m.name.replace(".", "_")].ravel() for m in blocks.contract.modules])
    whole_gradient = torch.cat([gradient.ravel() for gradient in expected])
    assert float(F.cosine_similarity(ours, whole_gradient, dim=0)) > 0.999
    assert relative_difference(ours, whole_gradient) < 1e-5
