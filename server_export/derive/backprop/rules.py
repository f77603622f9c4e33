"""What autograd writes on the way back, in operators that XNNPACK takes: one rule per operator.

A rule gets a node and its arguments, and writes what takes its place. Sums over the last dimension are
products with a row of ones: XNNPACK has no such sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from server_export.graph.writing import Rule, Writer

aten = torch.ops.aten

# Keeps a quotient with a removable singularity at 0 finite there, and changes no other float32.
_TINY = 1e-20


RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule; it gets a writer, the node, and the operator's arguments. None keeps the node."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def _total(writer: Writer, source: Node) -> Node:
    """Sum over the last dimension, kept as 1."""
    width = source.meta["val"].shape[-1]
    if width == 1:
        return source
    return writer.call(aten.linear.default, source, writer.constant(torch.ones(1, width)))


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
    return writer.times(gradient, writer.minus(result, writer.times(result, result)))


@rule(aten.tanh_backward.default)
def _hyperbolic_tangent(writer: Writer, node: Node, gradient: Node, result: Node) -> Node:
    return writer.minus(gradient, writer.times(gradient, writer.times(result, result)))


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
    # 1 above 0, else 0, without a comparison, which would leave the delegate.
    step = writer.call(aten.clamp.default, writer.times(result, 1 / _TINY), 0.0, 1.0)
    return writer.times(gradient, step)


@rule(aten.gelu_backward.default)
def _gelu(
    writer: Writer, node: Node, gradient: Node, argument: Node, *, approximate: str = "none"
) -> Node | None:
    if approximate != "none":
        return None
    # y = x F(x), so F(x) = y / x, which is 1/2 at 0; its slope is F(x) + x f(x) with the normal density f.
    result = writer.call(aten.gelu.default, argument)
    above = writer.call(aten.add.Tensor, result, _TINY / 2)
    below = writer.call(aten.add.Tensor, argument, _TINY)
    distribution = writer.call(aten.div.Tensor, above, below)
    square = writer.times(writer.times(argument, argument), -0.5)
    density = writer.times(writer.call(aten.exp.default, square), 1 / math.sqrt(2 * math.pi))
    slope = writer.call(aten.add.Tensor, distribution, writer.times(argument, density))
    return writer.times(gradient, slope)


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
    if step != 1:
        return None
    size, dim = sizes[dim], dim % len(sizes)
    begin = start % size if start < 0 else min(start, size)
    behind = size - begin - gradient.meta["val"].shape[dim]
    if not (begin or behind):
        return gradient
    padding = [0, 0] * (len(sizes) - 1 - dim) + [begin, behind]
    return writer.call(aten.constant_pad_nd.default, gradient, padding, 0.0)


@rule(aten.index_add.default)
def _index_add(writer: Writer, node: Node, target: Node, dim: int, index: Node, source: Node) -> Node | None:
    if dim != 0:
        return None
    return writer.call(aten.index_put.default, target, [index], source, True)
