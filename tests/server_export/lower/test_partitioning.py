"""Delegates by level: operators of XNNPACK are together unless another operator is between them."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch import nn
from torch.fx import Graph, Node

from server_export.lower.partitioning import LevelPartitioner, delegate_levels, split_delegate


def chain(*names: str) -> dict[str, Node]:
    """Return a graph of functions, each of which reads the previous one; the first reads an input."""
    graph = Graph()
    nodes = {"input": graph.placeholder("input")}
    last = nodes["input"]
    for name in names:
        last = nodes[name] = graph.call_function(torch.neg, (last,), name=name)
    graph.output(last)
    return nodes


def levels(nodes: dict[str, Node], *groups: tuple[str, ...]) -> dict[str, int]:
    by_node = delegate_levels(nodes["input"].graph, [[nodes[name] for name in group] for group in groups])
    return {node.name: level for node, level in by_node.items()}


def test_neighbours_share_a_level() -> None:
    assert levels(chain("a", "b"), ("a",), ("b",)) == {"a": 0, "b": 0}


def test_operators_after_one_outside_have_the_next_level() -> None:
    nodes = chain("a", "outside", "also_outside", "b", "c")
    assert levels(nodes, ("a",), ("b",), ("c",)) == {"a": 0, "b": 1, "c": 1}


def test_operators_outside_before_the_first_group_add_no_level() -> None:
    assert levels(chain("outside", "a"), ("a",)) == {"a": 0}


def test_branches_of_one_level_go_together() -> None:
    nodes = chain("a", "b")
    graph = nodes["input"].graph
    with graph.inserting_before(nodes["a"]):
        nodes["apart"] = graph.call_function(torch.neg, (nodes["input"],), name="apart")
    assert levels(nodes, ("apart",), ("a",), ("b",)) == {"apart": 0, "a": 0, "b": 0}


def test_a_group_has_the_level_of_its_last_operator() -> None:
    nodes = chain("a", "outside", "b")
    graph = nodes["input"].graph
    with graph.inserting_before(nodes["a"]):
        nodes["early"] = graph.call_function(torch.neg, (nodes["input"],), name="early")
    assert levels(nodes, ("a",), ("early", "b")) == {"a": 0, "early": 1, "b": 1}


def test_a_group_that_depends_on_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the group"):
        levels(chain("a", "outside", "b"), ("a", "b"))


def parts(nodes: dict[str, Node], limit: int, *groups: tuple[str, ...]) -> list[str]:
    split = split_delegate(
        [*nodes.values()][1:], [[nodes[name] for name in group] for group in groups], limit
    )
    return ["".join(node.name for node in part) for part in split]


def test_parts_have_the_same_size_and_keep_the_order_of_the_graph() -> None:
    assert parts(chain(*"abcdef"), 3) == ["abc", "def"]
    assert parts(chain(*"abcdefg"), 3) == ["abc", "de", "fg"]
    assert parts(chain(*"ab"), 3) == ["ab"]


def test_a_group_stays_together_and_its_readers_come_later() -> None:
    nodes = chain(*"abcdef")
    graph = nodes["input"].graph
    with graph.inserting_before(nodes["a"]):
        early = graph.call_function(torch.neg, (nodes["input"],), name="x")
    nodes["b"].args = (early,)
    nodes = {"input": nodes["input"], "x": early, **{name: nodes[name] for name in "abcdef"}}
    assert parts(nodes, 4) == ["xabc", "def"]
    assert parts(nodes, 4, ("x", "d")) == ["a", "xbcdef"]


class Broken(nn.Module):
    """Two layers with an operator between them that XNNPACK lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cumsum(self.first(source), 0)) + source


def test_delegates_of_a_module_are_its_levels() -> None:
    exported = torch.export.export(Broken(), (torch.ones(2, 4),))
    edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    lowered = edge.to_backend(LevelPartitioner()).exported_program().graph_module
    calls = [node for node in lowered.graph.nodes if "call_delegate" in str(node.target)]
    assert len(calls) == 2


def test_a_split_delegate_is_several() -> None:
    layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Sigmoid())))
    exported = torch.export.export(layers, (torch.ones(2, 4),))
    edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    lowered = edge.to_backend(LevelPartitioner(limit=4)).exported_program().graph_module
    calls = [node for node in lowered.graph.nodes if "call_delegate" in str(node.target)]
    assert len(calls) > 1
