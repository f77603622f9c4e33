"""Values that depend on no input are computed, and equal constants are stored once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from server_export.ir.constants import GraphConstants
from server_export.ir.folding import fold_constants


class Tables(nn.Module):
    """A function of an input and of a constant [4]."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.table)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def folded(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[GraphModule, list[str]]:
    """Return the folded graph of a function, and the names of its operators."""
    module = Tables(function)
    graph_module = torch.export.export(module, (X,)).module(check_guards=False)
    fold_constants(graph_module, GraphConstants(graph_module))
    graph_module.recompile()
    torch.testing.assert_close(graph_module(X), module(X))
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    return graph_module, [name.split(".")[1] for name in names]


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x, table: x + (table * 2).cos(), ["add"]),
        (lambda x, table: x + torch.arange(4) * table, ["add"]),
        (lambda x, table: x + table.reshape(2, 2).t().reshape(4), ["add"]),
        (lambda x, table: x + table.split(2)[1].sum(), ["add"]),
        (lambda x, table: (x + table) * 2, ["add", "mul"]),
        # As large as their inputs, or larger because they repeat them.
        (lambda x, table: x + table.expand(1, 4), ["add"]),
        (lambda x, table: x + (table + 1).expand(3, 4), ["expand", "add"]),
        (lambda x, table: x + table.repeat(3, 1), ["repeat", "add"]),
    ],
    ids=[
        "functions of a table",
        "a range",
        "other shapes",
        "a part",
        "values that depend on an input stay",
        "an expansion that adds a dimension",
        "a repetition stays",
        "another repetition stays",
    ],
)
def test_values_that_depend_on_no_input_are_folded(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], operators: list[str]
) -> None:
    assert folded(function)[1] == operators


def test_weights_without_values_are_not_folded() -> None:
    module = Tables(lambda x, table: x * (table * 2) + torch.ones(4).cos())
    graph_module = torch.export.export(module, (X,)).module(check_guards=False)
    fold_constants(graph_module, GraphConstants(graph_module), has_weights=False)
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    assert names.count("aten.mul.Tensor") == 2 and "aten.cos.default" not in names


def test_random_numbers_are_not_folded() -> None:
    graph_module = torch.export.export(Tables(lambda x, table: x + torch.rand_like(table)), (X,)).module(
        check_guards=False
    )
    fold_constants(graph_module, GraphConstants(graph_module))
    assert any("rand_like" in str(node.target) for node in graph_module.graph.nodes)


def test_equal_constants_are_stored_once() -> None:
    graph_module, _ = folded(lambda x, table: (x + table.cos()) * torch.arange(4.0).cos() - table.sin())
    assert [name for name, _ in graph_module.named_buffers()] == ["table", "constant_0", "constant_1"]
