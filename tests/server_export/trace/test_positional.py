"""What a model computes of positions alone becomes a table or a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from prge.errors import BundleError
from server_export.ir.markers import BATCH, TOKENS
from server_export.ir.rewriting import remove_identities
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.trace.positional import fold_positions
from server_export.trace.tables import ModelTables
from tests.server_export.derive.tangent.graphs import Function

torch.set_num_threads(1)

LONGEST, WIDTH = 9, 4


def folded(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[GraphModule, ModelTables]:
    with torch.device("meta"):
        state = torch.empty(BATCH, TOKENS, WIDTH)
        graph_module = torch.export.export(Function(function), (state,), strict=False).module(
            check_guards=False
        )
    tables = ModelTables(LONGEST)
    fold_positions(graph_module, tables, {})
    return graph_module, tables


def names(graph_module: GraphModule) -> list[str]:
    remove_identities(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    return [str(node.target).split(".")[1] for node in graph_module.graph.nodes if node.op == "call_function"]


def sines(state: torch.Tensor) -> torch.Tensor:
    places = torch.arange(state.shape[1], device=state.device).float()
    return state + torch.sin(places[:, None] * torch.arange(WIDTH, device=state.device))


def test_sines_of_positions_are_rows_of_a_table() -> None:
    graph_module, tables = folded(sines)
    (table,) = tables.all
    assert (table.kind, names(graph_module)) == ("rotary", ["table", "reshape", "add"])
    assert torch.equal(table.of(5)[0], sines(torch.zeros(1, 5, WIDTH))[0])


def test_what_holds_of_positions_is_calculated_with_as_1_or_0() -> None:
    def after_the_first(state: torch.Tensor) -> torch.Tensor:
        is_first = torch.arange(state.shape[1], device=state.device)[None, :, None] == 0
        return is_first + state * ~is_first

    graph_module, tables = folded(after_the_first)
    assert names(graph_module).count("table") == 2
    first, later = (table.of(3).flatten().tolist() for table in tables.all)
    assert (first, later) in (([1, 0, 0], [0, 1, 1]), ([0, 1, 1], [1, 0, 0]))


@pytest.mark.parametrize("first", [0, 2])
def test_numbers_of_positions_are_counted_from_the_first(first: int) -> None:
    def looked_up(state: torch.Tensor) -> torch.Tensor:
        places = torch.arange(first, first + state.shape[1], device=state.device)
        return torch.gather(state, 1, places[None, :, None].expand(state.shape))

    _, tables = folded(looked_up)
    assert [(table.kind, table.first) for table in tables.all] == [("positions", first)]


@pytest.mark.parametrize(("window", "known"), [(LONGEST, None), (3, 3)])
def test_a_triangle_is_a_causal_mask(window: int, known: int | None) -> None:
    def masked(state: torch.Tensor) -> torch.Tensor:
        places = torch.arange(state.shape[1], device=state.device)
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, device=state.device).masked_fill(hidden, -1e9)
        return torch.softmax(state @ state.mT + mask, -1)

    _, tables = folded(masked)
    assert [(table.kind, table.window) for table in tables.all] == [("causal", known)]


def read(weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """As a decoder's logits."""
    return SOFTMAX_PARTS(weights, state[..., :1].float(), torch.zeros_like(state[..., :1]).long())


def triangle(state: torch.Tensor) -> torch.Tensor:
    places = torch.arange(state.shape[1], device=state.device)
    return places <= places[:, None]


LEAST = torch.finfo(torch.float32).min
HIDING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda scores, seen: torch.where(seen, scores, torch.full((), LEAST, device=scores.device)),
    "masked_fill": lambda scores, seen: scores.masked_fill(~seen, LEAST),
    "masked_fill and a sum": lambda scores, seen: scores.masked_fill(~seen, LEAST) + (~seen).float() * -1e9,
    "a product and a sum": lambda scores, seen: scores * seen.float() + -1e4 * (1 - seen.float()),
    "no less than the least": lambda scores, seen: torch.maximum(
        scores + (~seen).float() * -1e9, torch.full((), LEAST, device=scores.device)
    ),
}


@pytest.mark.parametrize("way", HIDING)
def test_scores_that_are_hidden_in_another_way_have_one_mask_added(way: str) -> None:
    def masked(state: torch.Tensor) -> torch.Tensor:
        return read(torch.softmax(HIDING[way](state @ state.mT, triangle(state)), -1), state)

    graph_module, tables = folded(masked)
    assert [table.kind for table in tables.all] == ["causal"]
    (softmax,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    assert [str(softmax.args[0].target), str(softmax.args[0].args[0].target)] == [
        "aten.add.Tensor",
        "aten.matmul.default",
    ]


def test_slopes_by_heads_become_numbers_of_queries_and_places_those_of_keys() -> None:
    def biased(state: torch.Tensor) -> torch.Tensor:
        heads = torch.stack([state, state * 2], 1)
        slopes = 0.5 ** torch.arange(1, 3, device=state.device)[:, None, None]
        places = torch.arange(1 - state.shape[1], 1, device=state.device)
        scores = heads @ heads.transpose(-1, -2) * 0.5 + slopes * places
        least = torch.full((), LEAST, device=state.device)
        return read(torch.softmax(torch.where(triangle(state), scores, least), -1).sum(1), state)

    graph_module, tables = folded(biased)
    (places,) = (table for table in tables.all if table.kind == "rotary")
    assert torch.equal(places.of(4), torch.arange(4.0).reshape(1, 4, 1))
    (product,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    query, keys = product.all_input_nodes
    assert (query.meta["val"].shape[-1], keys.meta["val"].shape[-2]) == (WIDTH + 1, WIDTH + 1)


def test_a_number_of_each_key_is_one_of_the_keys() -> None:
    """As with ALiBi, whatever the number comes from: scores get a mask and nothing else."""

    def biased(state: torch.Tensor) -> torch.Tensor:
        number = torch.tanh(state[..., 0])[:, None, :].expand(-1, state.shape[1], -1)
        hidden = (~triangle(state)).float() * -1e9
        return read(torch.softmax(state @ state.mT * 0.5 + hidden + number, -1), state)

    graph_module, tables = folded(biased)
    assert [table.kind for table in tables.all] == ["causal"]
    (product,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    query, keys = product.all_input_nodes
    assert (query.meta["val"].shape[-1], keys.meta["val"].shape[-2]) == (WIDTH + 1, WIDTH + 1)
    (softmax,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    (scaled,) = (node for node in softmax.args[0].all_input_nodes if "mul" in node.name)
    assert scaled.args[0] is product


def test_a_number_of_each_key_that_comes_of_the_scores_stays_where_it_is() -> None:
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
def test_tokens_that_are_chosen_are_all_where_a_row_has_no_more(count: int) -> None:
    def chosen(state: torch.Tensor) -> torch.Tensor:
        scores = state @ state.mT
        places = torch.topk(scores, count, dim=-1).indices
        marks = torch.zeros(scores.shape, device=state.device).scatter(-1, places, 1.0)
        return torch.softmax(scores.masked_fill(marks == 0, LEAST), -1)

    if count < LONGEST:
        with pytest.raises(BundleError, match="chooses 8 tokens of a row, and rows have up to 9"):
            folded(chosen)
    else:
        assert names(folded(chosen)[0]) == ["mT", "matmul", "softmax"]


def test_numbers_of_pairs_of_positions_are_refused() -> None:
    def with_noise(state: torch.Tensor) -> torch.Tensor:
        places = torch.arange(state.shape[1], device=state.device).float()
        return torch.softmax(state @ state.mT + torch.sin(places[:, None] * places), -1)

    with pytest.raises(BundleError, match=r"of positions, \[9, 9\] torch.float32 of a row of 9 tokens"):
        folded(with_noise)
