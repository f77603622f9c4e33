"""Where several values are live, layers are blocks, and values that several layers read are shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from prge.model_spec import Matrix
from server_export.trace.cutting import ModelBlock, block_types, cut
from server_export.trace.functional import functional_graph

ROWS, TOKENS, WIDTH, VOCABULARY, STREAMS = 3, 5, 8, 16, 2


class Layer(nn.Module):
    """Modifies two streams in place, with its own input, and attends to its own or another layer's keys."""

    def __init__(self, has_keys: bool) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False) if has_keys else None
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, streams: torch.Tensor, own_input: torch.Tensor, keys: torch.Tensor, lora_b: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = streams[0]
        keys = keys if self.keys is None else self.keys(first)
        attended = torch.bmm(torch.softmax(torch.bmm(first, keys.transpose(1, 2)), -1), keys)
        mixed = (
            self.mix(attended * own_input)
            if lora_b is None
            else self.mix(attended * own_input) + attended @ lora_b
        )
        streams = streams * torch.tensor(0.5).sqrt()
        streams[1:] += mixed
        return streams, keys


class Model(nn.Module):
    """A model in which the last two of four layers read the keys of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inputs = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, 4 * WIDTH)
        self.layers = nn.ModuleList(Layer(has_keys) for has_keys in (True, True, False, False))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, *lora_b: torch.Tensor) -> torch.Tensor:
        state = self.table(tokens)
        streams, inputs = (
            torch.stack([state, state.sin()]),
            self.inputs(tokens).reshape(ROWS, TOKENS, 4, WIDTH),
        )
        keys, unadapted = state, [None] * (len(self.layers) - len(lora_b))
        for number, (layer, matrix) in enumerate(zip(self.layers, [*unadapted, *lora_b], strict=True)):
            streams, keys = layer(streams, inputs[:, :, number], keys, matrix)
        return self.head(streams.mean(0))


def cut_model(adapted: int) -> tuple[GraphModule, list[ModelBlock], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    lora_b = tuple(torch.randn(WIDTH, WIDTH) for _ in range(adapted))
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    with torch.no_grad():
        graph = functional_graph(torch.export.export(Model(), (tokens, *lora_b), strict=False))
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")][1:]
    adapter = {name: Matrix("b", name, WIDTH, WIDTH) for name in names}
    return graph, cut(graph, adapter, table=None), (tokens, *lora_b)


@pytest.mark.parametrize("adapted", [1, 3])
def test_the_blocks_in_order_compute_the_model(adapted: int) -> None:
    graph, blocks, arguments = cut_model(adapted)
    state, shared, adapter = arguments[0], dict[int, torch.Tensor](), iter(arguments[1:])
    for block in blocks:
        inputs = {"hidden_states": state, "tokens": arguments[0]}
        inputs |= {f"shared_in.{number}": shared[value] for number, value in enumerate(block.shared_in)}
        inputs |= {f"lora_b.{number}": next(adapter) for number, _ in enumerate(block.modules)}
        state, *shared_values = block.call(inputs).values()
        shared |= dict(zip(block.shared_out, shared_values, strict=True))
        assert state.shape[:2] == (ROWS, TOKENS)
        assert all(value.shape == (ROWS, TOKENS, WIDTH) for value in shared_values)
    torch.testing.assert_close(state, graph(*arguments))


def test_shared_values_come_from_the_block_that_computes_them() -> None:
    """Blocks share each layer's part of one value, and keys; the last block starts at a single live value."""
    _, blocks, _ = cut_model(4)
    assert [len(block.shared_out) for block in blocks] == [4, 0, 1, 0, 0, 0, 0]
    assert [block.shared_in for block in blocks] == [(), (0,), (1,), (2, 4), (3, 4), (), ()]
    widths = [block.value(block.outputs[0]).shape[-1] for block in blocks]
    assert widths == [STREAMS * WIDTH, *[STREAMS * WIDTH] * 4, WIDTH, VOCABULARY]
    assert block_types(blocks) == [0, 1, 2, 3, 3, 5, 6]


def test_a_block_whose_inputs_no_adapter_changes_has_another_type() -> None:
    """The keys of the second layer depend on its adapter."""
    below, above = (cut_model(adapted)[1][4] for adapted in (2, 3))
    assert below.signature[1:] == above.signature[1:]
    assert (below.signature[0], above.signature[0]) == ((False, False), (False, True))


class Flat(nn.Module):
    """Modifies streams, given also as one concatenated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(STREAMS * WIDTH, WIDTH, bias=False)

    def forward(self, streams: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        streams = streams + self.mix(flat).unsqueeze(2)
        return streams, streams.reshape(ROWS, TOKENS, STREAMS * WIDTH)


class Reshaping(nn.Module):
    """A model whose layers read the output of the previous layer in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, STREAMS * WIDTH)
        self.layers = nn.ModuleList(Flat() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = self.table(tokens)
        streams = flat.reshape(ROWS, TOKENS, STREAMS, WIDTH)
        for layer in self.layers:
            streams, flat = layer(streams, flat)
        return self.head(streams.mean(2))


def test_a_reshape_of_the_hidden_states_is_not_a_shared_value() -> None:
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    with torch.no_grad():
        graph = functional_graph(torch.export.export(Reshaping(), (tokens,), strict=False))
    expected = graph(tokens)
    blocks = cut(graph, {}, table=None)
    assert not any(block.shared_out for block in blocks[1:])
    state = tokens
    shared = dict[int, torch.Tensor]()
    for block in blocks:
        inputs = {f"shared_in.{number}": shared[value] for number, value in enumerate(block.shared_in)}
        state, *shared_values = block.call({"hidden_states": state, "tokens": tokens, **inputs}).values()
        shared |= dict(zip(block.shared_out, shared_values, strict=True))
    torch.testing.assert_close(state, expected)
