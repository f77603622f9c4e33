"""Operators that select elements by index, or write elements at an index."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators.layouts import linear_jvp, shift_dims
from server_export.ir.operators.table import Category, row
from server_export.ir.tangents import Dual, GraphTangents, Number, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


class Gather(torch.autograd.Function):
    """aten.gather with a backward pass whose zeros get their size from an input.

    The zeros of autograd's own backward pass have a size that no input has.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        """Return the gathered elements."""
        ctx.dim = dim
        ctx.save_for_backward(source, index)
        return aten.gather.default(source, dim, index)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradient of the source from the gradient of the gathered elements."""
        source, index = ctx.saved_tensors
        return aten.zeros_like.default(source).scatter_add(ctx.dim, index, grad_output), None, None


def _largest(
    scores: torch.Tensor, count: int, dim: int = -1, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return aten.topk, whose choice of indices has no derivative."""
    _, index = aten.topk.default(scores.detach(), count, dim, *rest)
    return Gather.apply(scores, dim, index), index


def _gather_jvp(t: GraphTangents, node: Node, source: Dual, dim: int, index: Node) -> Dual:
    index_of_primal = t.as_primal(index)

    def gather(part: Node, count: int) -> Node:
        expanded = t.call(aten.expand.default, index_of_primal, [count, *shape_of(index)])
        return t.call(aten.gather.default, part, shift_dims(dim), expanded)

    return source.map(gather)


def _topk_jvp(
    t: GraphTangents, node: Node, source: Dual, count: int, dim: int = -1, *rest: Any
) -> tuple[Dual, Node]:
    """Gather the tangents of the chosen values at their indices; the indices have no tangents."""
    chosen = t.call(node.target, source.value, count, dim, *rest)
    index = t.call(operator.getitem, chosen, 1)
    return _gather_jvp(t, node, source, dim, index), index


def _scatter_jvp(t: GraphTangents, node: Node, source: Dual, dim: int, index: Node, value: Number) -> Dual:
    """Scatter values that have no tangents."""
    index_of_primal = t.as_primal(index)

    def put(part: Node, count: int, number: Number) -> Node:
        expanded = t.call(aten.expand.default, index_of_primal, [count, *shape_of(index)])
        return t.call(node.target, part, shift_dims(dim), expanded, number)

    return Dual(t, put(source.primal, 1, value), put(source.tangents, t.queries, 0.0))


def _max(writer: GraphWriter, node: Node, source: Node, dim: int, keepdim: bool = False) -> Node:
    """Write max as topk with k = 1, which has the same derivative."""
    parts = {user.args[1]: user for user in node.users}
    largest = writer.call(aten.topk.default, source, 1, dim)
    for index, part in parts.items():
        if not keepdim:
            chosen = writer.reshape(writer.call(operator.getitem, largest, index), shape_of(part))
            part.replace_all_uses_with(chosen)
    return largest


def _index_add(
    writer: GraphWriter, node: Node, target: Node, dim: int, index: Node, source: Node
) -> Node | None:
    return writer.call(aten.index_put.default, target, [index], source, True) if dim == 0 else None


row(aten.index_select.default, category=Category.SELECT, jvp=linear_jvp(0))
row(aten.index_add.default, category=Category.GRADIENT, backward=_index_add)
row(aten.gather.default, category=Category.SELECT, jvp=_gather_jvp, autograd=Gather.apply)
row(aten.topk.default, category=Category.SELECT, jvp=_topk_jvp, autograd=_largest)
row(aten.max.dim, category=Category.SELECT, rewrite=_max)
row(aten.scatter.value, category=Category.JOIN, jvp=_scatter_jvp)
