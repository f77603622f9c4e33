"""A block runs eagerly at any size: the sizes of a call are those of its inputs."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from prge.formats.signatures import Port
from server_export.ir.block import Block, is_input, new_input, port_of
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.shapes import fill_in_values

aten = torch.ops.aten

WIDTH, RANK = 8, 2


def adapted_block() -> Block:
    """Hidden states [copies x batch, tokens, width] by a frozen layer, and an adapter for each copy."""
    graph = Graph()
    rows = COPIES * BATCH
    state = new_input(graph, Port("hidden_states"), torch.empty(rows, TOKENS, WIDTH, device="meta"))
    lora_b = new_input(graph, Port("lora_b", 0), torch.empty(COPIES, WIDTH, WIDTH, device="meta"))
    weight = graph.get_attr("weight")
    layer = graph.call_function(aten.linear.default, (state, weight))
    by_copy = graph.call_function(aten.reshape.default, (state, [COPIES, BATCH * TOKENS, WIDTH]))
    product = graph.call_function(aten.bmm.default, (by_copy, lora_b))
    together = graph.call_function(aten.reshape.default, (product, [rows, TOKENS, WIDTH]))
    graph.output((graph.call_function(aten.add.Tensor, (layer, together)),))
    root = torch.nn.Module()
    root.register_buffer("weight", torch.eye(WIDTH))
    graph_module = GraphModule(root, graph)
    fill_in_values(graph_module)
    return Block(graph_module, (Port("hidden_states"),), ("weight",))


@pytest.mark.parametrize(("copies", "batch", "tokens"), [(1, 1, 1), (1, 3, 5), (4, 2, 3)])
def test_a_block_computes_at_the_sizes_of_its_inputs(copies: int, batch: int, tokens: int) -> None:
    block = adapted_block()
    state, lora_b = torch.randn(copies * batch, tokens, WIDTH), torch.randn(copies, WIDTH, WIDTH)
    by_copy = state.reshape(copies, batch, tokens, WIDTH) @ lora_b[:, None]
    (found,) = block.call({"hidden_states": state, "lora_b.0": lora_b, "another": state}).values()
    torch.testing.assert_close(found, state + by_copy.reshape(state.shape))
    # A program has copies and rows on axes of their own.
    apart = {"hidden_states": state.reshape(copies, batch, tokens, WIDTH), "lora_b.0": lora_b}
    assert torch.equal(block.call(apart)["hidden_states"], found)
    assert (
        block.sized((COPIES, copies), (BATCH, batch), (TOKENS, tokens)).value(Port("hidden_states")).shape
        == found.shape
    )


def test_tensors_take_the_place_of_the_graphs_own() -> None:
    state, none = torch.randn(1, 2, WIDTH), torch.zeros(1, WIDTH, WIDTH)
    found = adapted_block().call({"hidden_states": state, "lora_b.0": none}, {"weight": 3 * torch.eye(WIDTH)})
    torch.testing.assert_close(found["hidden_states"], 3 * state)


def test_what_layers_read_can_be_watched_and_operators_replaced() -> None:
    seen: list[tuple[list[str], torch.Tensor]] = []
    state, none = torch.randn(3, 2, WIDTH), torch.zeros(1, WIDTH, WIDTH)
    adapted_block().call(
        {"hidden_states": state, "lora_b.0": none},
        watch=lambda names, value: seen.append(([*names], value)),
        operators={aten.linear.default: lambda source, weight: source},
    )
    ((names, value),) = seen
    assert names == ["weight"] and torch.equal(value, state)


@pytest.mark.parametrize(
    ("state", "lora_b"), [((3, 2, WIDTH), (2, WIDTH, WIDTH)), ((1, 2, WIDTH + 1), (1, WIDTH, WIDTH))]
)
def test_inputs_whose_sizes_contradict_each_other_are_refused(
    state: tuple[int, ...], lora_b: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"entries|multiple"):
        adapted_block().call({"hidden_states": torch.zeros(state), "lora_b.0": torch.zeros(lora_b)})


def test_an_input_knows_its_port() -> None:
    block = adapted_block()
    assert [port.name for port in block.inputs] == ["hidden_states", "lora_b.0"]
    assert block.has_input("lora_b") and not block.has_input("table")
    state, *others = block.graph_module.graph.nodes
    assert port_of(state) == Port("hidden_states") and is_input(state, "hidden_states")
    assert not any(is_input(node, "hidden_states") for node in others)
