"""Values that a model computes from positions alone become tables or constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from prge.errors import Refusal
from server_export.ir.rewriting import remove_identities
from server_export.trace.tables import ModelTables
from tests.refusals import raises
from tests.server_export.trace.graphs import with_tables

torch.set_num_threads(1)

LONGEST, WIDTH = 9, 4


def folded(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[GraphModule, ModelTables]:
    graph = with_tables(function, WIDTH, LONGEST, decoder=False)
    return graph.graph_module, graph.tables


def names(graph_module: GraphModule) -> list[str]:
    remove_identities(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    return [str(node.target).split(".")[1] for node in graph_module.graph.nodes if node.op == "call_function"]


def sines(state: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(state.shape[1], device=state.device).float()
    return state + torch.sin(positions[:, None] * torch.arange(WIDTH, device=state.device))


def test_sines_of_positions_are_rows_of_a_table() -> None:
    graph_module, tables = folded(sines)
    (table,) = tables.all
    assert (table.type, names(graph_module)) == ("rotary", ["table", "reshape", "add"])
    assert torch.equal(table.of(5)[0], sines(torch.zeros(1, 5, WIDTH))[0])


def test_booleans_of_positions_are_used_as_1_or_0() -> None:
    def after_the_first(state: torch.Tensor) -> torch.Tensor:
        is_first = torch.arange(state.shape[1], device=state.device)[None, :, None] == 0
        return is_first + state * ~is_first

    graph_module, tables = folded(after_the_first)
    assert names(graph_module).count("table") == 2
    first, later = (table.of(3).flatten().tolist() for table in tables.all)
    assert (first, later) in (([1, 0, 0], [0, 1, 1]), ([0, 1, 1], [1, 0, 0]))


@pytest.mark.parametrize("first", [0, 2])
def test_position_ids_count_from_the_first_one(first: int) -> None:
    def looked_up(state: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(first, first + state.shape[1], device=state.device)
        return torch.gather(state, 1, positions[None, :, None].expand(state.shape))

    _, tables = folded(looked_up)
    assert [(table.type, table.first) for table in tables.all] == [("positions", first)]


@pytest.mark.parametrize(("window", "expected_window"), [(LONGEST, None), (3, 3)])
def test_a_triangle_is_a_causal_mask(window: int, expected_window: int | None) -> None:
    def masked(state: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(state.shape[1], device=state.device)
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, device=state.device).masked_fill(hidden, -1e9)
        return torch.softmax(state @ state.mT + mask, -1)

    _, tables = folded(masked)
    assert [(table.type, table.window) for table in tables.all] == [("causal", expected_window)]


def test_values_of_pairs_of_positions_are_refused() -> None:
    def with_noise(state: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(state.shape[1], device=state.device).float()
        return torch.softmax(state @ state.mT + torch.sin(positions[:, None] * positions), -1)

    with raises(Refusal, "computed-of-positions", containing="[9, 9] torch.float32"):
        folded(with_noise)
