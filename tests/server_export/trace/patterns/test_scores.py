"""Masks and biases that decoders compute from positions, and tokens that they select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from prge.errors import Refusal
from server_export.ir.rewriting import remove_identities
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.trace.patterns.alibi import biases_of_one_row
from server_export.trace.tables import ModelTables
from tests.refusals import raises
from tests.server_export.trace.graphs import with_tables
from tests.tiny_types import POSITIONS, make_tiny

torch.set_num_threads(1)

LONGEST, WIDTH, TOKENS = 9, 4, 100


def folded(
    function: Callable[[torch.Tensor], torch.Tensor], decoder: bool = True
) -> tuple[GraphModule, ModelTables]:
    graph = with_tables(function, WIDTH, LONGEST, decoder)
    return graph.graph_module, graph.tables


def read(weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the readout of a decoder's logits."""
    return SOFTMAX_PARTS(weights, state[..., :1].float(), torch.zeros_like(state[..., :1]).long())


def triangle(state: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(state.shape[1], device=state.device)
    return positions <= positions[:, None]


LOWEST = torch.finfo(torch.float32).min
MASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda scores, seen: torch.where(seen, scores, torch.full((), LOWEST, device=scores.device)),
    "masked_fill": lambda scores, seen: scores.masked_fill(~seen, LOWEST),
    "masked_fill and a sum": lambda scores, seen: scores.masked_fill(~seen, LOWEST) + (~seen).float() * -1e9,
    "a product and a sum": lambda scores, seen: scores * seen.float() + -1e4 * (1 - seen.float()),
    "no less than the lowest": lambda scores, seen: torch.maximum(
        scores + (~seen).float() * -1e9, torch.full((), LOWEST, device=scores.device)
    ),
}


@pytest.mark.parametrize("style", MASKED)
def test_masked_scores_become_the_sum_with_one_mask(style: str) -> None:
    def masked(state: torch.Tensor) -> torch.Tensor:
        return read(torch.softmax(MASKED[style](state @ state.mT, triangle(state)), -1), state)

    graph_module, tables = folded(masked)
    assert [table.type for table in tables.all] == ["causal"]
    (softmax,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    assert [str(softmax.args[0].target), str(softmax.args[0].args[0].target)] == [
        "aten.add.Tensor",
        "aten.matmul.default",
    ]


def test_alibi_factors_join_queries_and_positions_join_keys() -> None:
    def biased(state: torch.Tensor) -> torch.Tensor:
        heads = torch.stack([state, state * 2], 1)
        factors = 0.5 ** torch.arange(1, 3, device=state.device)[:, None, None]
        positions = torch.arange(1 - state.shape[1], 1, device=state.device)
        scores = heads @ heads.transpose(-1, -2) * 0.5 + factors * positions
        lowest = torch.full((), LOWEST, device=state.device)
        return read(torch.softmax(torch.where(triangle(state), scores, lowest), -1).sum(1), state)

    graph_module, tables = folded(biased)
    (positions,) = (table for table in tables.all if table.type == "rotary")
    assert torch.equal(positions.of(4), torch.arange(4.0).reshape(1, 4, 1))
    (product,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    query, keys = product.all_input_nodes
    assert (query.meta["val"].shape[-1], keys.meta["val"].shape[-2]) == (WIDTH + 1, WIDTH + 1)


def test_biases_are_computed_for_the_row_only() -> None:
    """MPT computes biases for all of its positions and uses the last ones."""
    config: Any = make_tiny("mpt").config
    with biases_of_one_row(config, TOKENS):
        assert config.max_seq_len == TOKENS
    assert config.max_seq_len == POSITIONS


def test_a_bias_of_each_key_joins_the_keys() -> None:
    """As with ALiBi, the scores only get a mask, wherever the bias comes from."""

    def biased(state: torch.Tensor) -> torch.Tensor:
        number = torch.tanh(state[..., 0])[:, None, :].expand(-1, state.shape[1], -1)
        hidden = (~triangle(state)).float() * -1e9
        return read(torch.softmax(state @ state.mT * 0.5 + hidden + number, -1), state)

    graph_module, tables = folded(biased)
    assert [table.type for table in tables.all] == ["causal"]
    (product,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    query, keys = product.all_input_nodes
    assert (query.meta["val"].shape[-1], keys.meta["val"].shape[-2]) == (WIDTH + 1, WIDTH + 1)
    (softmax,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    (scaled,) = (node for node in softmax.args[0].all_input_nodes if "mul" in node.name)
    assert scaled.args[0] is product


def test_a_bias_that_depends_on_the_scores_stays() -> None:
    def biased(state: torch.Tensor) -> torch.Tensor:
        scores = state @ state.mT
        hidden = (~triangle(state)).float() * -1e9
        return read(
            torch.softmax(scores + hidden + scores.sum(1, keepdim=True).expand(scores.shape), -1), state
        )

    graph_module, _ = folded(biased)
    (product,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    assert product.all_input_nodes[0].meta["val"].shape[-1] == WIDTH


@pytest.mark.parametrize("count", [LONGEST, LONGEST - 1])
def test_short_rows_select_all_tokens(count: int) -> None:
    def chosen(state: torch.Tensor) -> torch.Tensor:
        scores = state @ state.mT
        positions = torch.topk(scores, count, dim=-1).indices
        marks = torch.zeros(scores.shape, device=state.device).scatter(-1, positions, 1.0)
        return torch.softmax(scores.masked_fill(marks == 0, LOWEST), -1)

    if count < LONGEST:
        with raises(Refusal, "token-budget", containing="8 tokens") as caught:
            folded(chosen, decoder=False)
        assert "9 tokens" in caught.value.what
        return
    graph_module, _ = folded(chosen, decoder=False)
    remove_identities(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    assert [str(node.target).split(".")[1] for node in nodes] == ["mT", "matmul", "softmax"]
