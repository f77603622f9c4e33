"""Sums, means, and functions of a whole row.

XNNPACK has no mean over the last dimension, which would end the delegate at every normalization, so the mean
is written as a linear layer with a constant row of 1/d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators.layouts import linear_jvp, shift_dims
from server_export.ir.operators.table import Category, row
from server_export.ir.tangents import Dual, GraphTangents, Interleaved, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def _is_last(dims: Sequence[int] | None, source: Node) -> bool:
    rank = len(shape_of(source))
    return dims is not None and [dim % rank for dim in dims] == [rank - 1]


def _mean_weight(writer: GraphWriter, source: Node) -> Node:
    """Return the weight of a linear layer that computes the mean over the last dimension."""
    value = source.meta["val"]
    width = value.shape[-1]
    return writer.constant(torch.full((1, width), 1.0 / width, dtype=value.dtype))


def _centred(writer: GraphWriter, source: Node) -> tuple[Node, Node]:
    """Return a row minus its mean, and its variance.

    The variance is computed from the centred row, because E[x^2] - E[x]^2 would cancel.
    """
    weight = _mean_weight(writer, source)
    centred = writer.minus(source, writer.call(aten.linear.default, source, weight))
    return centred, writer.call(aten.linear.default, writer.times(centred, centred), weight)


# Rewrite and core rules


def _mean(
    writer: GraphWriter, node: Node, source: Node, dims: Sequence[int] | None, keepdim: bool = False, **_: Any
) -> Node | None:
    if not _is_last(dims, source) or not source.meta["val"].dtype.is_floating_point:
        return None
    mean = writer.call(aten.linear.default, source, _mean_weight(writer, source))
    return mean if keepdim else writer.reshape(mean, shape_of(node))


def _layer_norm(
    writer: GraphWriter,
    node: Node,
    source: Node,
    shape: Sequence[int],
    weight: Node | None = None,
    bias: Node | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> Node | None:
    if len(shape) != 1:
        return None
    centred, variance = _centred(writer, source)
    result = writer.times(centred, writer.call(aten.rsqrt.default, writer.plus(variance, epsilon)))
    result = result if weight is None else writer.times(result, weight)
    return result if bias is None else writer.plus(result, bias)


def _norm(
    writer: GraphWriter, node: Node, source: Node, order: float = 2, dims: Any = None, keepdim: bool = False
) -> Node | None:
    if order != 2 or not dims:
        return None
    total = writer.call(aten.sum.dim_IntList, writer.times(source, source), dims, keepdim)
    return writer.call(aten.sqrt.default, total)


def _variance(
    writer: GraphWriter,
    node: Node,
    source: Node,
    dims: Any = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> Node | None:
    if not dims or not _is_last(dims, source):
        return None
    _, variance = _centred(writer, source)
    width = shape_of(source)[-1]
    return writer.reshape(writer.times(variance, width / (width - correction)), shape_of(node))


def _deviation(
    writer: GraphWriter,
    node: Node,
    source: Node,
    dims: Sequence[int] | None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> Node | None:
    if unbiased or not _is_last(dims, source):
        return None
    _, variance = _centred(writer, source)
    return writer.reshape(writer.call(aten.sqrt.default, variance), shape_of(node))


def _softmax_in_core(writer: GraphWriter, node: Node, source: Node, dim: int, *_: Any) -> Node:
    return writer.call(aten._softmax.default, source, dim, False)


def _log_total(writer: GraphWriter, node: Node, source: Node, dims: list[int], keepdim: bool = False) -> Node:
    largest = writer.call(aten.amax.default, source, dims, True)
    exponentials = writer.exp(writer.minus(source, largest))
    total = writer.call(aten.sum.dim_IntList, exponentials, dims, True)
    result = writer.plus(writer.call(aten.log.default, total), largest)
    return result if keepdim else writer.reshape(result, shape_of(node))


# Backward


def _sum_backward(
    writer: GraphWriter, node: Node, source: Node, dims: Sequence[int], keepdim: bool = False, **_: Any
) -> Node | None:
    shape = shape_of(source)
    summed = [dim % len(shape) for dim in dims if shape[dim] > 1]
    if not summed:
        return writer.reshape(source, shape_of(node))
    if summed != [len(shape) - 1]:
        return None
    # Summed as in the forward pass, so that a head that saves residuals has the same bits.
    return writer.reshape(writer.total(source), shape_of(node))


def _softmax_backward(
    writer: GraphWriter, node: Node, grad_output: Node, result: Node, dim: int, *_: Any
) -> Node:
    weighted = writer.times(grad_output, result)
    return writer.minus(weighted, writer.times(result, _total(writer, weighted, dim)))


def _total(writer: GraphWriter, source: Node, dim: int) -> Node:
    """Sum over one dimension, which is kept with size 1."""
    if _is_last([dim], source):
        return writer.total(source)
    return writer.call(aten.sum.dim_IntList, source, [dim], True)


# Forward mode


def _reduce_jvp(
    t: GraphTangents, node: Node, source: Dual, dims: list[int] | None, keepdim: bool = False, **named: Any
) -> Dual:
    shifted_dims = shift_dims(dims or list(range(len(source.shape))))
    return source.map(lambda part, _: t.call(node.target, part, shifted_dims, keepdim, **named))


def _softmax_jvp(t: GraphTangents, node: Node, source: Dual, dim: int, *_: Any) -> Dual:
    shifted_dim = shift_dims(dim)
    primal = t.call(aten.softmax.int, source.primal, shifted_dim)
    if isinstance(source, Interleaved) and dim % len(source.shape) == len(source.shape) - 1:
        probability, inside = source.broadcastable(primal)
        weighted = t.times(probability, inside)
        return Interleaved(t, primal, t.minus(weighted, t.times(t.total(weighted), probability)))
    weighted = t.product(t.product(source.factor, primal), source.unscaled)
    return Dual(t, primal, t.minus(weighted, t.times(_total(t, weighted, shifted_dim), primal)))


def _log_softmax_jvp(t: GraphTangents, node: Node, source: Dual, dim: int, *_: Any) -> Dual:
    shifted_dim = shift_dims(dim)
    primal = t.call(aten._log_softmax.default, source.primal, shifted_dim, False)
    mean = _total(t, t.times(t.exp(primal), source.tangents), shifted_dim)
    return Dual(t, primal, t.minus(source.tangents, mean))


def _log_total_jvp(
    t: GraphTangents, node: Node, source: Dual, dims: list[int], keepdim: bool = False
) -> Dual:
    if dims not in ([-1], [len(source.shape) - 1]):
        raise NotImplementedError("logsumexp over a dimension that is not the last one")
    primal = t.call(aten.logsumexp.default, source.primal, [-1], keepdim)
    weights = t.call(aten.softmax.int, source.primal, -1)
    total = t.total(t.times(weights, source.tangents))
    return Dual(t, primal, t.reshape(total, [t.queries, *shape_of(node)]))


REDUCE, NORMALIZE = Category.REDUCE, Category.NORMALIZE

row(aten.sum.dim_IntList, category=REDUCE, jvp=_reduce_jvp, backward=_sum_backward)
row(aten.mean.dim, category=REDUCE, jvp=_reduce_jvp, rewrite=_mean)
row(aten.cumsum.default, category=REDUCE, jvp=linear_jvp(0))
row(aten.var.correction, category=REDUCE, rewrite=_variance)
row(aten.std.dim, category=REDUCE, rewrite=_deviation)
row(aten.linalg_vector_norm.default, category=REDUCE, rewrite=_norm)
row(aten.logsumexp.default, category=REDUCE, jvp=_log_total_jvp, core=_log_total)

row(aten.layer_norm.default, category=NORMALIZE, rewrite=_layer_norm)
row(aten.softmax.int, category=NORMALIZE, jvp=_softmax_jvp, core=_softmax_in_core)
row(aten._softmax_backward_data.default, category=Category.GRADIENT, backward=_softmax_backward)
row(aten._log_softmax.default, category=NORMALIZE, jvp=_log_softmax_jvp)
