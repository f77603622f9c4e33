"""Tangents and the way back of blocks: a chain of them computes what the whole model does, at any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("executorch")

import torch
from eager_engine import EagerEngine
from torch.fx import GraphModule

from prge.contract import LORA_B_PREFIX, U_PREFIX, V_PREFIX, Contract
from prge.errors import BundleError
from server_export.derive.backprop.joint import backpropagate, backpropagate_block
from server_export.derive.backprop.layers import TRANSPOSED
from server_export.derive.tangent.transform import Dense, RankOne, differentiate_block
from server_export.lower.lowering import rewritten_graph
from server_export.model.loss import answer_slopes
from server_export.model.program import example_inputs
from tests.server_export.derive.blocks import Block, Blocks, Tensors, call
from tests.server_export.derive.sizes import FIRST, SECOND, Sizes, described
from tests.server_export.derive.tangent.graphs import (
    Function,
    inputs_of,
    program_with_tangents,
    relative_difference,
    tangents_by_gradients,
)

torch.set_num_threads(1)

# Grouped attention with rotations, soft caps, biases, projections beside the blocks, padding.
CHAINED = ("llama", "gemma2", "gpt2", "opt", "bert")
QUANTIZED = [("llama", "8da4w"), ("qwen3", "8da8w"), ("gpt2", "8da4w"), ("bert", "8da8w")]


def share_beyond(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """How many numbers differ by more than a part of the largest."""
    return float(((found - expected).abs() > tolerance * expected.abs().max()).float().mean())


# Tangents


def with_tangents(block: Block, graph: GraphModule, queries: int, enter: bool = True) -> GraphModule:
    rows, tokens = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[:2]
    seeds: dict[str, Any] = dict.fromkeys(block.adapter, RankOne(rows))
    return differentiate_block(graph, {**({"state": Dense()} if enter else {}), **seeds}, queries, tokens)


def entering(blocks: Blocks) -> Tensors:
    """The first state with tangents of zero."""
    return {"state": blocks.state, "d_state": torch.zeros(blocks.contract.queries, *blocks.state.shape)}


def inputs_with_tangents(blocks: Blocks, block: Block) -> Tensors:
    factors = {
        f"{prefix[0]}_lora_b_{module.name.replace('.', '_')}": blocks.inputs[prefix + module.name]
        for module in blocks.contract.modules
        for prefix in (U_PREFIX, V_PREFIX)
    }
    return {**block.inputs(), **factors, "ones": torch.ones(1, block.state.shape[1], 1)}


def tangents_of_chain(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer [rows, width of the answer] and its tangents [queries, rows, width of the answer]."""
    queries, states = blocks.contract.queries, entering(blocks)
    for block in blocks.blocks:
        graph = with_tangents(block, block.graph(), queries)
        found = call(graph, {**states, **inputs_with_tangents(blocks, block)})
        states = dict(zip(states, found, strict=True))
    if not blocks.contract.is_encoder:
        states = {name: blocks.at_positions(state) for name, state in states.items()}
    graph = differentiate_block(blocks.head_graph(), {"state": Dense()}, queries, blocks.states)
    answer, tangents = call(graph, {**states, **blocks.head_inputs()})
    shape = blocks.contract.outputs[0].shape
    return answer.reshape(shape), tangents.reshape(queries, *shape)


@pytest.mark.export
@pytest.mark.parametrize("architecture", CHAINED)
def test_tangents_of_a_chain_are_those_of_the_model(architecture: str) -> None:
    blocks = Blocks(architecture, "tangent")
    found, tangents = tangents_of_chain(blocks)
    with torch.no_grad():
        answer, _ = program_with_tangents(blocks.built)(*blocks.values)
    assert relative_difference(found, answer) < 1e-5
    assert relative_difference(tangents, tangents_by_gradients(blocks.built, blocks.values).float()) < 1e-5


@pytest.mark.export
@pytest.mark.parametrize(("architecture", "scheme"), QUANTIZED)
def test_tangents_of_a_quantized_chain_are_those_of_the_whole_graph(architecture: str, scheme: str) -> None:
    blocks = Blocks(architecture, "tangent", quantize=scheme)
    found = tangents_of_chain(blocks)
    with torch.no_grad():
        expected = program_with_tangents(blocks.built)(*blocks.values)
    # A number that lies between two codes may be rounded to the other one.
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-2
        assert share_beyond(ours, theirs, 1e-5) < 0.1


@pytest.mark.export
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_lowest_adapted_block_needs_no_tangents_of_its_state(architecture: str) -> None:
    blocks = Blocks(architecture, "tangent")
    block, inputs = blocks.blocks[0], inputs_with_tangents(blocks, blocks.blocks[0])
    with_them, without = (
        with_tangents(block, block.graph(), blocks.contract.queries, enter) for enter in (True, False)
    )
    expected = call(with_them, {**entering(blocks), **inputs})
    found = call(without, {"state": blocks.state, **inputs})
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_difference(ours, theirs) < 1e-5


# The way back


def plain(contract: Contract) -> Contract:
    """The contract without the loss."""
    return replace(contract, kind="stack", classes=0)


def slopes_of_loss(blocks: Blocks, answer: torch.Tensor) -> torch.Tensor:
    contract = blocks.contract
    names = [spec.name for spec in contract.inputs[len(plain(contract).inputs) :]]
    return answer_slopes(contract, answer, [blocks.inputs[name] for name in names])


def gradients_of_chain(blocks: Blocks) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Answer, and gradients [rank, out] in the order of the contract's modules."""
    contract, states = blocks.contract, [blocks.state]
    with torch.no_grad():
        for block in blocks.blocks:
            states.append(block.module(states[-1], block.tables, block.lora_b))
    last = states.pop()
    entered = last if contract.is_encoder else blocks.at_positions(last)
    head = backpropagate_block(blocks.head_graph(), ["state"], [], blocks.states, returns_answer=True)
    inputs = {"state": entered, **blocks.head_inputs()}
    shape = (entered.shape[0], last.shape[2]) if contract.is_encoder else entered.shape[:1]
    answer = call(head, {**inputs, "slope": torch.zeros(shape)})[0].reshape(contract.outputs[0].shape)
    slope = call(head, {**inputs, "slope": slopes_of_loss(blocks, answer).reshape(shape)})[1]
    if not contract.is_encoder:
        slope = blocks.from_positions(slope)
    gradients: dict[str, torch.Tensor] = {}
    for block, state in zip(reversed(blocks.blocks), reversed(states), strict=True):
        graph = backpropagate_block(block.graph(), ["state", *block.adapter], block.adapter, state.shape[1])
        slope, *found = call(graph, way_back_inputs(block, state, slope))
        gradients |= dict(zip(block.adapter, found, strict=True))
    return answer, [gradients["lora_b_" + module.name.replace(".", "_")] for module in contract.modules]


def way_back_inputs(block: Block, state: torch.Tensor, slope: torch.Tensor) -> Tensors:
    return {"state": state, "slope": slope, "ones": torch.ones(1, state.shape[1], 1), **block.inputs()}


@pytest.mark.export
@pytest.mark.parametrize("architecture", CHAINED)
def test_the_way_back_through_a_chain_gives_the_gradient_of_autograd(architecture: str) -> None:
    blocks = Blocks(architecture, "exact")
    answer, gradients = gradients_of_chain(blocks)
    stack = plain(blocks.contract)
    arrays = {spec.name: blocks.inputs[spec.name].numpy() for spec in stack.inputs}
    arrays = {name: a[None] if name.startswith(LORA_B_PREFIX) else a for name, a in arrays.items()}
    eager = EagerEngine(blocks.built.module, stack)
    (theirs,) = (torch.from_numpy(value) for value in eager.forward(arrays).values())
    assert relative_difference(answer, theirs) < 1e-5
    by_name = eager.gradients(arrays, slopes_of_loss(blocks, theirs).numpy())
    expected = [torch.from_numpy(by_name[module.input_name][0]) for module in blocks.contract.modules]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for module, ours, autograd in zip(blocks.contract.modules, gradients, expected, strict=True):
        assert ours.shape == autograd.shape
        assert float((ours - autograd).abs().max()) < 1e-5 * largest, module.name


@pytest.mark.export
@pytest.mark.parametrize(("architecture", "scheme"), QUANTIZED)
def test_the_way_back_through_a_quantized_chain_is_that_of_the_whole_graph(
    architecture: str, scheme: str
) -> None:
    blocks = Blocks(architecture, "exact", quantize=scheme)
    answer, gradients = gradients_of_chain(blocks)
    forward = rewritten_graph(blocks.built.module, example_inputs(plain(blocks.contract)))
    with torch.no_grad():
        theirs, *expected = backpropagate(forward, blocks.contract)(*blocks.values)
    assert relative_difference(answer, theirs) < 1e-2
    ours, whole = (torch.cat([part.ravel() for part in parts]) for parts in (gradients, expected))
    assert relative_difference(ours, whole) < 1e-2
    assert share_beyond(ours, whole, 1e-5) < 0.1


@pytest.mark.export
def test_the_lowest_adapted_block_gives_gradients_alone_and_has_fewer_transposed_weights() -> None:
    blocks = Blocks("llama", "exact", target_modules=[r".*layers\.\d+\.mlp\.down_proj"])
    block = blocks.blocks[0]
    tokens, graph = blocks.state.shape[1], block.graph()
    whole = backpropagate_block(graph, ["state", *block.adapter], block.adapter, tokens)
    lowest = backpropagate_block(graph, block.adapter, block.adapter, tokens)
    inputs = way_back_inputs(block, blocks.state, torch.randn_like(blocks.state))
    (gradient,) = call(lowest, inputs)
    assert torch.equal(gradient, call(whole, inputs)[1])
    assert transposed(whole) > transposed(lowest) == set()
    # What the forward pass reads keeps its name, and the block's own graph is what it was.
    assert {str(node.target) for node in graph.graph.find_nodes(op="get_attr")} >= {
        name for name in inputs_of_constants(lowest) if name.startswith("layer.")
    }
    assert "ones" not in inputs_of(lowest)


def inputs_of_constants(graph: GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}


def transposed(graph: GraphModule) -> set[str]:
    return {name for name in inputs_of_constants(graph) if name.startswith(TRANSPOSED)}


@pytest.mark.export
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_block_without_adapter_passes_the_slope_on(architecture: str) -> None:
    last = {"llama": r".*layers\.0\..*q_proj", "bert": r".*layer\.0\..*query"}[architecture]
    blocks = Blocks(architecture, "exact", target_modules=[last])
    block = blocks.blocks[1]
    assert block.adapter == []
    state, slope = blocks.state.clone().requires_grad_(), torch.randn_like(blocks.state)
    answer = block.module(state, block.tables, {})
    (expected,) = torch.autograd.grad(answer, state, slope)
    graph = backpropagate_block(block.graph(), ["state"], [], state.shape[1])
    (found,) = call(graph, way_back_inputs(block, blocks.state, slope))
    assert relative_difference(found, expected) < 1e-5


def test_what_the_answer_does_not_depend_on_is_named() -> None:
    inputs = torch.randn(2, 3, 4), torch.randn(1, 2, 4)
    graph_module = rewritten_graph(Function(lambda state, matrix: state * 2), inputs)
    state, matrix = inputs_of(graph_module)
    with pytest.raises(BundleError, match=f"doesn't depend on {matrix}"):
        backpropagate_block(graph_module, [state, matrix], [matrix], 3)


# Sizes


@pytest.mark.export
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("llama", "fp32"),
        ("llama", "8da4w"),
        ("qwen3", "fp32"),
        ("gemma2", "fp32"),
        ("gpt2", "fp32"),
        ("bert", "fp32"),
    ],
)
def test_every_number_of_a_graph_follows_its_sizes(architecture: str, scheme: str) -> None:
    blocks = Blocks(architecture, "tangent", quantize=scheme)
    block = blocks.blocks[0]

    def graphs(sizes: Sizes) -> list[GraphModule]:
        graph, head = block.graph(sizes), blocks.head_graph(sizes)
        dense: dict[str, Any] = {"state": Dense()}
        return [
            with_tangents(block, graph, sizes.queries),
            with_tangents(block, graph, sizes.queries, enter=False),
            backpropagate_block(graph, ["state", *block.adapter], block.adapter, sizes.tokens),
            differentiate_block(head, dense, sizes.queries, sizes.tokens),
            backpropagate_block(head, ["state"], [], sizes.tokens, returns_answer=True),
        ]

    for first, second in zip(graphs(FIRST), graphs(SECOND), strict=True):
        nodes = list(described(first, FIRST))
        assert nodes == list(described(second, SECOND))
        # They are there.
        assert any("tokens" in str(node) or "rows" in str(node) for node in nodes)
