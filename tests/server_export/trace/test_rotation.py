"""The rotation of halves of a head becomes a linear layer, and the layer becomes copies of the halves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from server_export.ir.core import write_core_operators
from server_export.trace.rotation import write_rotations_as_copies, write_rotations_as_linear

torch.set_num_threads(1)


def test_halves_are_rotated_by_a_linear_layer() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            rotated = torch.cat([-x[..., 3:], x[..., :3]], -1)
            return x * cos + rotated * sin

    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module = torch.export.export(Rotary(), inputs, strict=False).module(check_guards=False)
    write_rotations_as_linear(graph_module)
    linear, cat = (
        graph_module.graph.find_nodes(op="call_function", target=target)
        for target in (torch.ops.aten.linear.default, torch.ops.aten.cat.default)
    )
    assert len(linear) == 1 and not cat
    assert torch.equal(graph_module(*inputs), Rotary()(*inputs))


@pytest.mark.parametrize("parts", [(0, 3, 3, 6), (3, 6, 3, 6), (2, 6, 0, 2)])
def test_other_concatenations_stay(parts: tuple[int, int, int, int]) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d = parts
            return torch.cat([-x[..., a:b], x[..., c:d]], -1)

    x = torch.randn(2, 3, 5, 6)
    graph_module = torch.export.export(Other(), (x,), strict=False).module(check_guards=False)
    write_rotations_as_linear(graph_module)
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)


ROTATION = torch.kron(torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(3))


class Layer(torch.nn.Module):
    """Rotates by a linear layer, and scales the result."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos + F.linear(x, self.matrix) * sin) * 0.125


def as_copies(module: torch.nn.Module, *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, list[object]]:
    """Return the graph of a module with rotations as copies, and its operators on values of full size."""
    graph_module = torch.export.export(module, inputs, strict=False).module(check_guards=False)
    write_core_operators(graph_module)
    write_rotations_as_copies(graph_module)
    operators = [
        node.target
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.meta["val"].shape == inputs[0].shape
    ]
    return graph_module, operators


@pytest.mark.parametrize("matrix", [ROTATION, ROTATION.T], ids=["forward", "backward"])
def test_a_rotation_by_a_layer_becomes_a_copy_with_signs_and_scale_in_the_tables(
    matrix: torch.Tensor,
) -> None:
    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module, operators = as_copies(Layer(matrix.contiguous()), *inputs)
    assert sorted(map(str, operators)) == [
        *("aten.add.Tensor", "aten.cat.default", "aten.mul.Tensor", "aten.mul.Tensor"),
    ]
    assert torch.equal(graph_module(*inputs), Layer(matrix)(*inputs))


def test_signs_are_a_product_where_no_table_follows() -> None:
    class Alone(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, ROTATION)

    x = torch.randn(2, 3, 5, 6)
    graph_module, operators = as_copies(Alone(), x)
    assert torch.ops.aten.linear.default not in operators
    assert torch.equal(graph_module(x), F.linear(x, ROTATION))


@pytest.mark.parametrize("matrix", [torch.randn(6, 6), torch.eye(6), 2 * ROTATION])
def test_other_layers_stay(matrix: torch.Tensor) -> None:
    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module, operators = as_copies(Layer(matrix), *inputs)
    assert torch.ops.aten.linear.default in operators and torch.ops.aten.cat.default not in operators
    assert torch.allclose(graph_module(*inputs), Layer(matrix)(*inputs))


def test_the_scale_of_a_sum_that_is_read_twice_stays() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            total = x * cos + F.linear(x, ROTATION) * sin
            return total * 0.125 + total

    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module, _ = as_copies(Twice(), *inputs)
    assert torch.equal(graph_module(*inputs), Twice()(*inputs))
