"""Traversals of a graph: descendants, ancestors, and users through layouts."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from server_export.ir.traversal import ancestors, descendants, origin, readers

aten = torch.ops.aten


@pytest.fixture
def nodes() -> dict[str, Node]:
    """Return nodes by name: a -> flat -> b -> c, d -> c -> output, and e, which nothing reads."""
    graph = Graph()
    a, d = graph.placeholder("a"), graph.placeholder("d")
    flat = graph.call_function(aten.reshape.default, (a, [-1]))
    b = graph.call_function(aten.exp.default, (flat,))
    c = graph.call_function(aten.add.Tensor, (b, d))
    e = graph.call_function(aten.exp.default, (a,))
    return {"a": a, "b": b, "c": c, "d": d, "e": e, "flat": flat, "output": graph.output((c,))}


def names(nodes: dict[str, Node], selected: set[Node]) -> set[str]:
    return {name for name, node in nodes.items() if node in selected}


def test_descendants_reach_the_output(nodes: dict[str, Node]) -> None:
    assert names(nodes, descendants([nodes["flat"]])) == {"flat", "b", "c", "output"}
    assert names(nodes, descendants([nodes["e"], nodes["d"]])) == {"e", "d", "c", "output"}


def test_descendants_stop_at_given_nodes(nodes: dict[str, Node]) -> None:
    reached = descendants([nodes["a"]], until=lambda node: node.target is aten.exp.default)
    assert names(nodes, reached) == {"a", "flat", "b", "e"}


def test_ancestors_reach_the_inputs(nodes: dict[str, Node]) -> None:
    assert names(nodes, ancestors([nodes["c"]])) == {"a", "flat", "b", "c", "d"}
    assert names(nodes, ancestors([nodes["c"]], without=[nodes["b"]])) == {"c", "d"}


def test_layouts_are_not_readers(nodes: dict[str, Node]) -> None:
    assert [*readers(nodes["a"], [aten.reshape.default])] == [nodes["b"], nodes["e"]]
    assert [*readers(nodes["a"], [])] == [nodes["flat"], nodes["e"]]


def test_origin_looks_through_layouts(nodes: dict[str, Node]) -> None:
    assert origin(nodes["flat"], [aten.reshape.default]) == (nodes["a"], [nodes["flat"]])
    assert origin(nodes["b"], [aten.reshape.default]) == (nodes["b"], [])
    assert origin(1.0, [aten.reshape.default]) == (1.0, [])
