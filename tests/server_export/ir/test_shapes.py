"""Shapes, dtypes and strides of operators' results, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from server_export.ir.shapes import OperatorShapes, to_meta, with_size

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operator that counts its calls."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target, self.calls = target, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self.target(*arguments, **named)


def test_equal_calls_are_evaluated_once() -> None:
    shapes, add = OperatorShapes(), Counted(aten.add.Tensor)
    first = shapes.of(add, (empty(2, 3), empty(3)), {})
    assert shapes.of(add, (empty(2, 3), empty(3)), {}) is first
    assert (first.shape, first.device.type, add.calls) == ((2, 3), "meta", 1)


@pytest.mark.parametrize(
    ("target", "arguments", "others"),
    [
        (aten.add.Tensor, (empty(2, 3), empty(3)), (empty(2, 3), empty(1))),
        (aten.add.Tensor, (empty(4, dtype=torch.int64), 1), (empty(4, dtype=torch.int64), 1.0)),
        (aten.neg.default, (empty(2, 3),), (empty(3, 2).t(),)),
        (aten.neg.default, (empty(2),), (empty(2, dtype=torch.int32),)),
        (aten.cat.default, ([empty(2), empty(3)],), ([empty(3), empty(3)],)),
    ],
)
def test_different_calls_have_their_own_results(
    target: Any, arguments: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    shapes = OperatorShapes()
    for arguments_of_call in (arguments, others):
        result, expected = shapes.of(target, arguments_of_call, {}), target(*arguments_of_call)
        assert (result.shape, result.dtype, result.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )


def test_named_arguments_matter() -> None:
    shapes = OperatorShapes()
    plain = shapes.of(aten.sum.default, (empty(2),), {})
    assert plain.dtype == torch.float32
    assert shapes.of(aten.sum.default, (empty(2),), {"dtype": torch.float64}).dtype == torch.float64


def test_several_results_are_meta_tensors_too() -> None:
    result = OperatorShapes().of(aten.split.Tensor, (empty(4, 2), 2), {})
    assert [tuple(part.shape) for part in result] == [(2, 2), (2, 2)]
    assert to_meta([torch.ones(2), torch.ones(3)])[1].device.type == "meta"


def test_a_size_is_replaced_wherever_it_is_a_factor() -> None:
    copies, rows = 5003, 7919

    class Stack(torch.nn.Module):
        def forward(self, state: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            grouped = state.reshape(copies, rows, 4) * 2
            return torch.bmm(grouped, matrices).reshape(copies * rows, 3)

    with torch.device("meta"):
        inputs = torch.empty(copies * rows, 4), torch.empty(copies, 4, 3)
    graph_module = torch.export.export(Stack(), inputs, strict=False).module(check_guards=False)
    two = with_size(graph_module, copies, 2)
    assert [tuple(node.meta["val"].shape) for node in two.graph.nodes if node.op == "placeholder"] == [
        (2 * rows, 4),
        (2, 4, 3),
    ]
    state, matrices = torch.randn(2 * rows, 4), torch.randn(2, 4, 3)
    expected = (state * 2).reshape(2, rows, 4) @ matrices
    torch.testing.assert_close(two(state, matrices)[0], expected.reshape(2 * rows, 3))
    # The original graph still has the marker.
    assert tuple(graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape) == (copies * rows, 4)
