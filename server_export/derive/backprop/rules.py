"""What autograd writes for the backward pass, in operators that XNNPACK takes: one rule per operator.

A rule gets a node and its arguments, and writes what takes its place. Sums over the last dimension are
products with a row of ones: XNNPACK has no such sum. Where that dimension is the tokens and the graph has an
input `ones`, the row is that input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from server_export.derive.slopes import gelu_slope, relu_slope, sigmoid_slope
from server_export.ir.writer import Rule, Writer, registrar

aten = torch.ops.aten

ONES = "ones"

RULES: dict[str, Rule] = {}
rule = registrar(RULES)


def _total(writer: Writer, source: Node) -> Node:
    """Sum over the last dimension, kept as 1."""
    shape = source.meta["val"].shape
    width = shape[-1]
    if width == 1:
        return source
    for table in writer.graph_module.graph.find_nodes(op="placeholder", target=ONES):
        if table.meta["val"].shape[1] == width:
            rows = writer.reshape(source, [1, shape[:-1].numel(), width])
            return writer.reshape(writer.call(aten.bmm.default, rows, table), [*shape[:-1], 1])
    # As the forward pass adds up: a head that saves answers the same bits.
    return writer.total(source)


@rule(aten.view.default, aten._unsafe_view.default)
def _view(writer: Writer, node: Node, source: Node, *_: Any) -> Node:
    # Copies that only change strides go, and a view would miss them.
    return writer.reshape(source, node.meta["val"].shape)


@rule(aten.mul.Scalar)
def _times_number(writer: Writer, node: Node, source: Node, number: float) -> Node:
    return writer.times(source, number)


@rule(aten.div.Scalar)
def _over_number(writer: Writer, node: Node, source: Node, number: float) -> Node:
    return writer.times(source, 1 / number)


@rule(aten.sum.dim_IntList)
def _sum(
    writer: Writer, node: Node, source: Node, dims: Sequence[int], keepdim: bool = False, **_: Any
) -> Node | None:
    shape = source.meta["val"].shape
    summed = [dim % len(shape) for dim in dims if shape[dim] > 1]
    if not summed:
        return writer.reshape(source, node.meta["val"].shape)
    if summed != [len(shape) - 1]:
        return None
    return writer.reshape(_total(writer, source), node.meta["val"].shape)


@rule(aten._softmax_backward_data.default)
def _softmax(writer: Writer, node: Node, gradient: Node, result: Node, dim: int, *_: Any) -> Node:
    weighted = writer.times(gradient, result)
    if dim % weighted.meta["val"].dim() == weighted.meta["val"].dim() - 1:
        total = _total(writer, weighted)
    else:
        total = writer.call(aten.sum.dim_IntList, weighted, [dim], True)
    return writer.minus(weighted, writer.times(result, total))


@rule(aten.sigmoid_backward.default)
def _sigmoid(writer: Writer, node: Node, gradient: Node, result: Node) -> Node:
    return writer.times(gradient, sigmoid_slope(writer.call, result))


@rule(aten.tanh_backward.default)
def _hyperbolic_tangent(writer: Writer, node: Node, gradient: Node, result: Node) -> Node:
    return writer.minus(gradient, writer.times(gradient, writer.times(result, result)))


@rule(aten.softplus_backward.default)
def _softplus(writer: Writer, node: Node, gradient: Node, argument: Node, *_: Any) -> Node:
    return writer.times(gradient, writer.call(aten.sigmoid.default, argument))


@rule(aten.silu_backward.default)
def _silu(writer: Writer, node: Node, gradient: Node, argument: Node) -> Node:
    gate = writer.call(aten.sigmoid.default, argument)
    result = writer.times(argument, gate)
    rest = writer.minus(result, writer.times(result, gate))
    return writer.times(gradient, writer.call(aten.add.Tensor, gate, rest))


@rule(aten.threshold_backward.default)
def _relu(writer: Writer, node: Node, gradient: Node, result: Node, threshold: float) -> Node | None:
    if threshold != 0:
        return None
    return writer.times(gradient, relu_slope(writer.call, result))


@rule(aten.gelu_backward.default)
def _gelu(
    writer: Writer, node: Node, gradient: Node, argument: Node, *, approximate: str = "none"
) -> Node | None:
    if approximate != "none":
        return None
    result = writer.call(aten.gelu.default, argument)
    return writer.times(gradient, gelu_slope(writer.call, argument, result))


@rule(aten.logical_and_.default, aten.masked_fill_.Scalar)
def _in_place(writer: Writer, node: Node, *arguments: Any) -> Node:
    # Of what autograd has just made; no program changes a value that is there.
    is_mask = node.target is aten.logical_and_.default
    return writer.call(aten.logical_and.default if is_mask else aten.masked_fill.Scalar, *arguments)


@rule(aten.slice_backward.default)
def _slice(
    writer: Writer,
    node: Node,
    gradient: Node,
    sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> Node | None:
    size, dim = sizes[dim], dim % len(sizes)
    if step != 1:
        gradient = _spread(writer, gradient, dim, step)
    begin = start % size if start < 0 else min(start, size)
    behind = size - begin - gradient.meta["val"].shape[dim]
    if not (begin or behind):
        return gradient
    padding = [0, 0] * (len(sizes) - 1 - dim) + [begin, behind]
    return writer.call(aten.constant_pad_nd.default, gradient, padding, 0.0)


def _spread(writer: Writer, source: Node, dim: int, step: int) -> Node:
    """With zeros between the entries of a dimension, none behind the last."""
    shape = list(source.meta["val"].shape)
    behind = shape[dim + 1 :]
    apart = writer.reshape(source, [*shape[: dim + 1], 1, *behind])
    padded = writer.call(aten.constant_pad_nd.default, apart, [*[0, 0] * len(behind), 0, step - 1], 0.0)
    whole = writer.reshape(padded, [*shape[:dim], shape[dim] * step, *behind])
    return writer.call(aten.slice.Tensor, whole, dim, 0, (shape[dim] - 1) * step + 1)


@rule(aten.index_add.default)
def _index_add(writer: Writer, node: Node, target: Node, dim: int, index: Node, source: Node) -> Node | None:
    if dim != 0:
        return None
    return writer.call(aten.index_put.default, target, [index], source, True)
