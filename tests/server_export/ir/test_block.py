"""A block runs eagerly at any size, which follows from its inputs."""

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
    """Return a block of a frozen layer and an adapter per copy, for [copies x batch, tokens, width]."""
    graph = Graph()
    rows = COPIES * BATCH
    state = new_input(graph, Port("hidden_states"), torch.empty(rows, TOKENS, WIDTH, device="meta"))
    lora_b = new_input(graph, Port("lora_b", 0), torch.empty(COPIES, WIDTH, WIDTH, device="meta"))
    weight = graph.get_attr("weight")
    layer = graph.call_function(aten.linear.default, (state, weight))
    by_copy = graph.call_function(aten.reshape.default, (state, [COPIES, BATCH * TOKENS, WIDTH]))
    product = graph.call_function(aten.bmm.default, (by_copy, lora_b))
    merged = graph.call_function(aten.reshape.default, (product, [rows, TOKENS, WIDTH]))
    graph.output((graph.call_function(aten.add.Tensor, (layer, merged)),))
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
    (output,) = block.call({"hidden_states": state, "lora_b.0": lora_b, "another": state}).values()
    torch.testing.assert_close(output, state + by_copy.reshape(state.shape))
    # Programs have separate axes for copies and rows.
    separate = {"hidden_states": state.reshape(copies, batch, tokens, WIDTH), "lora_b.0": lora_b}
    assert torch.equal(block.call(separate)["hidden_states"], output)
    assert (
        block.sized((COPIES, copies), (BATCH, batch), (TOKENS, tokens)).value(Port("hidden_states")).shape
        == output.shape
    )


def test_tensors_replace_those_of_the_graph() -> None:
    state, none = torch.randn(1, 2, WIDTH), torch.zeros(1, WIDTH, WIDTH)
    output = adapted_block().call(
        {"hidden_states": state, "lora_b.0": none}, {"weight": 3 * torch.eye(WIDTH)}
    )
    torch.testing.assert_close(output["hidden_states"], 3 * state)


def test_inputs_of_layers_can_be_observed_and_operators_replaced() -> None:
    calls: list[tuple[list[str], torch.Tensor]] = []
    state, none = torch.randn(3, 2, WIDTH), torch.zeros(1, WIDTH, WIDTH)
    adapted_block().call(
        {"hidden_states": state, "lora_b.0": none},
        watch=lambda names, value: calls.append(([*names], value)),
        operators={aten.linear.default: lambda source, weight: source},
    )
    ((names, value),) = calls
    assert names == ["weight"] and torch.equal(value, state)


@pytest.mark.parametrize(
    ("state", "lora_b"), [((3, 2, WIDTH), (2, WIDTH, WIDTH)), ((1, 2, WIDTH + 1), (1, WIDTH, WIDTH))]
)
def test_inputs_whose_sizes_contradict_each_other_are_refused(
    state: tuple[int, ...], lora_b: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"contradicts|multiple"):
        adapted_block().call({"hidden_states": torch.zeros(state), "lora_b.0": torch.zeros(lora_b)})


def test_an_input_has_a_port() -> None:
    block = adapted_block()
    assert [port.name for port in block.inputs] == ["hidden_states", "lora_b.0"]
    assert block.has_input("lora_b") and not block.has_input("table")
    state, *others = block.graph_module.graph.nodes
    assert port_of(state) == Port("hidden_states") and is_input(state, "hidden_states")
    assert not any(is_input(node, "hidden_states") for node in others)
