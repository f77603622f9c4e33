"""Convolutions over the tokens before are operators with a memory."""

from __future__ import annotations

import pytest
import torch

from server_export.ir.recurrences import CONVOLUTION
from server_export.trace.patterns.convolutions import write_convolutions
from tests.server_export.trace.graphs import model_graph


@pytest.mark.parametrize(
    ("padding_mask", "groups", "cut", "is_found"),
    [(2, 4, slice(None, 6), True), (2, 1, slice(None, 6), False), (2, 4, slice(2, None), False)],
    ids=["the tokens before", "numbers of others", "the tokens behind"],
)
def test_a_convolution_of_the_tokens_before_has_a_memory(
    padding: int, groups: int, cut: slice, is_found: bool
) -> None:
    layer = torch.nn.Conv1d(4, 4, 3, padding=padding, groups=groups).requires_grad_(False)
    state = torch.randn(2, 4, 6)
    graph = model_graph(lambda x: layer(x)[..., cut], state)
    write_convolutions(graph)
    assert any(node.target is CONVOLUTION for node in graph.graph_module.graph.nodes) is is_found
    assert [table.type for table in graph.tables.all] == is_found * [
        "behind",
        "entering",
        "entering",
        "leaving",
        "staying",
    ]


@pytest.mark.parametrize(
    ("pads", "is_found"), [((0, 0, 1, -1), True), ((0, 0, -1, 1), False), ((0, 0, 1, 0), False)], ids=str
)
def test_tokens_that_are_moved_back_have_a_memory(pads: tuple[int, ...], is_found: bool) -> None:
    state = torch.randn(2, 6, 4)
    graph = model_graph(lambda x: torch.nn.functional.pad(x, pads), state)
    write_convolutions(graph)
    found = [node for node in graph.graph_module.graph.nodes if node.target is CONVOLUTION]
    assert len(found) == is_found
    assert [table.type for table in graph.tables.all] == is_found * [
        "behind",
        "entering",
        "leaving",
        "staying",
    ]
