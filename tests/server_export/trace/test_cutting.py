"""Graphs are cut into blocks where a single value is live, and repetitions become blocks of one type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from prge.formats.signatures import Port
from prge.model_spec import Matrix
from server_export.ir.rewriting import rewritten_graph
from server_export.trace.cutting import ModelBlock, block_types, cut
from server_export.trace.experts import EXPERTS

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 5, 8, 16


class Layer(nn.Module):
    """Two stretches: a mixture of tokens, adapted or not, and a gated MLP."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.mix, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = scale

    def forward(self, state: torch.Tensor, mask: torch.Tensor, lora_b: torch.Tensor | None) -> torch.Tensor:
        scores = torch.softmax(torch.bmm(state, state.transpose(1, 2)) * self.scale + mask, -1)
        mixed = self.mix(torch.bmm(scores, state))
        state = state + (mixed if lora_b is None else mixed + state @ lora_b)
        return state + self.down(torch.sigmoid(self.up(state)))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, *lora_b: torch.Tensor) -> torch.Tensor:
        state = self.table(tokens)
        unadapted = len(self.layers) - len(lora_b)
        for layer, matrix in zip(self.layers, [None] * unadapted + list(lora_b), strict=True):
            state = layer(state, mask, matrix)
        return self.head(state)


def graph_of(model: Model, adapted: int) -> GraphModule:
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    mask = torch.zeros(TOKENS, TOKENS)
    return rewritten_graph(model, (tokens, mask, *[torch.zeros(WIDTH, WIDTH)] * adapted))


def blocks_of(model: Model, adapted: int = 0) -> tuple[GraphModule, list[ModelBlock]]:
    graph = graph_of(model, adapted)
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")][2:]
    return graph, cut(graph, matrices_of(names), table=None)


def matrices_of(names: Sequence[str]) -> dict[str, Matrix]:
    """Return placeholders as matrices of an adapter, each of a layer with the placeholder's name."""
    return {name: Matrix("b", name, WIDTH, WIDTH) for name in names}


@pytest.mark.parametrize("adapted", [0, 1, 3])
def test_the_blocks_in_order_compute_the_model(adapted: int) -> None:
    torch.manual_seed(0)
    graph, blocks = blocks_of(Model(*(Layer() for _ in range(3))), adapted)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    mask = torch.randn(TOKENS, TOKENS)
    lora_b = [torch.randn(WIDTH, WIDTH) for _ in range(adapted)]
    placeholders = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    values_by_name: dict[str, Any] = dict(zip(placeholders, [tokens, mask, *lora_b], strict=True))
    state: torch.Tensor = tokens
    for block in blocks:
        inputs = values_by_name | {"hidden_states": state, "tokens": tokens}
        inputs |= {f"lora_b.{number}": values_by_name[module] for number, module in enumerate(block.modules)}
        (state,) = block.call(inputs).values()
    expected = graph(*values_by_name.values())
    assert torch.equal(state, expected)


def test_repeated_stretches_are_blocks_of_one_type() -> None:
    _, blocks = blocks_of(Model(*(Layer() for _ in range(4))))
    assert block_types(blocks) == [0, 1, 1, 1, 1, 5]
    assert [len(block.weights) for block in blocks] == [1, 3, 3, 3, 3, 2]
    assert blocks[2].weights == tuple(f"layers.1.{name}.weight" for name in ("mix", "up", "down"))


def test_an_adapter_gives_the_same_stretch_another_type() -> None:
    _, blocks = blocks_of(Model(*(Layer() for _ in range(4))), adapted=2)
    assert block_types(blocks) == [0, 1, 1, 3, 3, 5]
    assert [len(block.modules) for block in blocks] == [0, 0, 0, 1, 1, 0]


def test_another_number_gives_another_type() -> None:
    _, blocks = blocks_of(Model(Layer(), Layer(0.5), Layer()))
    assert block_types(blocks) == [0, 1, 2, 1, 4]


def test_without_a_cut_the_model_is_one_block() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.table(tokens)

    graph = rewritten_graph(Short(), (torch.zeros(ROWS, TOKENS, dtype=torch.long), torch.zeros(1)))
    assert len(cut(graph, {}, table=None)) == 1


class Mixture(nn.Module):
    """A layer with experts between two residual sums, and a shared part that bypasses the experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.mix, self.shared = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.router = nn.Linear(WIDTH, CHOICES, bias=False)

    def forward(self, state: torch.Tensor, mask: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        state = state + self.mix(torch.bmm(mask.expand(ROWS, TOKENS, TOKENS), state))
        expert_inputs = torch.tanh(state).reshape(-1, WIDTH)
        shares, index = torch.topk(torch.softmax(self.router(expert_inputs), -1), CHOSEN)
        outputs = EXPERTS(expert_inputs, shares, index.float(), self.number, WIDTH) + self.shared(
            expert_inputs
        )
        return state + outputs.reshape(state.shape)


CHOICES, CHOSEN = 6, 2


def test_a_layer_is_split_at_its_experts_and_joins_the_next_one() -> None:
    _, blocks = blocks_of(Model(*(Mixture(number) for number in range(3))))
    assert [block.experts for block in blocks] == [None, 0, 1, 2, None]
    assert block_types(blocks) == [0, 1, 2, 2, 4]
    widths = [
        tuple(
            value.shape[-1]
            for value in (block.inputs[Port("hidden_states")].meta["val"], block.value(block.outputs[0]))
        )
        for block in blocks[1:]
    ]
    # The input of experts, shares and index, followed by the hidden states and the shared part.
    before, after = WIDTH + 2 * CHOSEN + 2 * WIDTH, 3 * WIDTH
    assert widths == [(WIDTH, before), (after, before), (after, before), (after, VOCABULARY)]


def test_a_layer_without_experts_after_a_mixture_is_its_own_block() -> None:
    _, blocks = blocks_of(Model(Layer(), Mixture(0), Layer()))
    assert [block.experts for block in blocks] == [None, None, 0, None, None]


class FirstLayer(Layer):
    """A layer that differs from the others."""

    def forward(self, state: torch.Tensor, mask: torch.Tensor, lora_b: torch.Tensor | None) -> torch.Tensor:
        return super().forward(state, mask, lora_b) @ self.up.weight


def test_an_adapted_layer_unlike_the_others_is_not_part_of_the_embedding() -> None:
    for adapted in (3, 4):
        _, blocks = blocks_of(Model(FirstLayer(), *(Layer() for _ in range(3))), adapted)
        assert not blocks[0].modules
        assert sum(len(block.modules) for block in blocks) == adapted
