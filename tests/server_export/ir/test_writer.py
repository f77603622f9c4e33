"""Writing operators into a graph, and applying rules that replace operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from server_export.ir.writer import GraphWriter, apply_rules

aten = torch.ops.aten
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * (x + 2)


@pytest.fixture
def graph_module() -> GraphModule:
    return torch.export.export(Sums(), (X,)).module(check_guards=False)


def output(graph_module: GraphModule) -> torch.Tensor:
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module(X)


def test_a_rule_replaces_its_operator(graph_module: GraphModule) -> None:
    def twice(writer: GraphWriter, node: Node, left: Node, right: Any) -> Node:
        return writer.times(writer.plus(left, right), 2.0)

    apply_rules(graph_module, {"aten.add.Tensor": twice})
    # Nodes that a rule writes are not rewritten again.
    torch.testing.assert_close(output(graph_module), 4 * (X + 1) * (X + 2))


def test_a_rule_may_keep_its_operator(graph_module: GraphModule) -> None:
    def only_ones(writer: GraphWriter, node: Node, left: Node, right: Any) -> Node | None:
        return writer.minus(left, left) if right == 1 else None

    apply_rules(graph_module, {"aten.add.Tensor": only_ones})
    assert torch.equal(output(graph_module), torch.zeros(2, 3))


def test_a_rule_may_return_an_existing_node(graph_module: GraphModule) -> None:
    apply_rules(graph_module, {"aten.add.Tensor": lambda writer, node, left, right: left})
    torch.testing.assert_close(output(graph_module), X * X)
    assert [node.target for node in graph_module.graph.nodes if node.op == "call_function"] == [
        aten.mul.Tensor
    ]


def test_a_rule_gets_named_arguments_by_name(graph_module: GraphModule) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.add(x, x, alpha=3)

    def with_product(writer: GraphWriter, node: Node, left: Node, right: Node, *, alpha: float = 1) -> Node:
        return writer.plus(left, writer.times(right, alpha))

    scaled = torch.export.export(Scaled(), (X,)).module(check_guards=False)
    apply_rules(scaled, {"aten.add.Tensor": with_product})
    torch.testing.assert_close(output(scaled), 4 * X)


def test_written_nodes_have_a_shape_and_dtype(graph_module: GraphModule) -> None:
    written: list[Node] = []

    def rule(writer: GraphWriter, node: Node, left: Node, right: Any) -> Node:
        row = writer.constant(torch.ones(1, 3))
        total = writer.call(aten.linear.default, left, row)
        written.extend([row, total, writer.reshape(total, [2, 1]), writer.times(left, total)])
        return written[-1]

    apply_rules(graph_module, {"aten.add.Tensor": rule})
    values = [node.meta["val"] for node in written[:4]]
    assert [tuple(value.shape) for value in values] == [(1, 3), (2, 1), (2, 1), (2, 3)]
    assert {(value.dtype, value.device.type) for value in values} == {(torch.float32, "meta")}
    torch.testing.assert_close(output(graph_module), (X * X.sum(1, keepdim=True)) ** 2)
    assert [name for name, _ in graph_module.named_buffers()] == ["constant_0"]
