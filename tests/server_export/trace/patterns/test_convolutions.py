"""Causal convolutions become operators with a recurrent state."""

from __future__ import annotations

import pytest
import torch

from server_export.ir.recurrences import CONVOLUTION
from server_export.trace.patterns.convolutions import write_convolutions
from tests.server_export.trace.graphs import model_graph


@pytest.mark.parametrize(
    ("padding", "groups", "cut", "is_replaced"),
    [(2, 4, slice(None, 6), True), (2, 1, slice(None, 6), False), (2, 4, slice(2, None), False)],
    ids=["causal", "not depthwise", "anticausal"],
)
def test_a_causal_convolution_has_a_state(padding: int, groups: int, cut: slice, is_replaced: bool) -> None:
    layer = torch.nn.Conv1d(4, 4, 3, padding=padding, groups=groups).requires_grad_(False)
    state = torch.randn(2, 4, 6)
    graph = model_graph(lambda x: layer(x)[..., cut], state)
    write_convolutions(graph)
    assert any(node.target is CONVOLUTION for node in graph.graph_module.graph.nodes) is is_replaced
    assert [table.type for table in graph.tables.all] == is_replaced * [
        "behind",
        "entering",
        "entering",
        "leaving",
        "staying",
    ]


@pytest.mark.parametrize(
    ("pads", "is_replaced"), [((0, 0, 1, -1), True), ((0, 0, -1, 1), False), ((0, 0, 1, 0), False)], ids=str
)
def test_a_shift_to_earlier_tokens_has_a_state(pads: tuple[int, ...], is_replaced: bool) -> None:
    state = torch.randn(2, 6, 4)
    graph = model_graph(lambda x: torch.nn.functional.pad(x, pads), state)
    write_convolutions(graph)
    convolutions = [node for node in graph.graph_module.graph.nodes if node.target is CONVOLUTION]
    assert len(convolutions) == is_replaced
    assert [table.type for table in graph.tables.all] == is_replaced * [
        "behind",
        "entering",
        "leaving",
        "staying",
    ]
