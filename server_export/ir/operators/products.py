"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators.table import Category, row
from server_export.ir.tangents import Dual, GraphTangents, Interleaved, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def product_jvp(t: GraphTangents, left: Any, right: Any) -> Dual:
    """Return left right and its tangents d(left) right + left d(right).

    The shapes are [batch, rows, inner] and [batch, inner, width].

    Tangents on the left are more rows of one product, tangents on the right are more columns of another.
    """
    left, right = (Interleaved.of(side) if isinstance(side, Dual) else side for side in (left, right))
    first, second = (side.value if isinstance(side, Dual) else side for side in (left, right))
    primal = t.call(aten.bmm.default, first, second)
    batch, rows, width = shape_of(primal)
    terms = []
    if isinstance(left, Interleaved):
        inside = t.reshape(left.inside, [batch, rows * t.queries, left.shape[-1]])
        product = t.call(aten.bmm.default, inside, second)
        terms.append(t.reshape(product, [batch, rows, t.queries * width]))
    if isinstance(right, Interleaved):
        inside = t.reshape(right.inside, [batch, right.shape[-2], t.queries * width])
        terms.append(t.call(aten.bmm.default, first, inside))
    tangents = terms[0] if len(terms) == 1 else t.plus(*terms)
    return Interleaved(t, t.as_primal(primal), tangents)


def _linear_jvp(t: GraphTangents, node: Node, source: Dual, weight: Node, bias: Node | None = None) -> Dual:
    """Write two calls, because the bias affects the primal only."""
    if isinstance(weight, Dual) or isinstance(bias, Dual):
        raise NotImplementedError("a linear layer whose weight or bias depends on the adapter")
    primal = t.call(node.target, source.primal, *filter(None, (weight, bias)))
    return Dual(t, primal, t.call(node.target, source.tangents, weight))


def _mm(writer: GraphWriter, node: Node, left: Node, right: Node) -> Node:
    stacked = [writer.reshape(each, [1, *shape_of(each)]) for each in (left, right)]
    return writer.reshape(writer.call(aten.bmm.default, *stacked), shape_of(node))


def _matmul(writer: GraphWriter, node: Node, left: Node, right: Node) -> Node | None:
    """Write a batched product, a product with matrices shared by all rows, or a weight times a matrix."""
    first, second = shape_of(left), shape_of(right)
    if left.op == "get_attr" and len(first) == 2 < len(second):
        turned = writer.call(aten.transpose.int, right, -2, -1)
        return writer.call(aten.transpose.int, writer.call(aten.linear.default, turned, left), -2, -1)
    if len(first) == len(second) == 4 and second[0] == 1 != first[0] and first[1] == second[1]:
        rows, heads, length, width = first
        by_head = writer.call(aten.permute.default, left, [1, 0, 2, 3])
        stacked = [writer.reshape(by_head, [heads, rows * length, width]), writer.reshape(right, second[1:])]
        product = writer.reshape(writer.call(aten.bmm.default, *stacked), [heads, rows, length, second[-1]])
        return writer.call(aten.permute.default, product, [1, 0, 2, 3])
    if len(first) < 3 or first[:-2] != second[:-2]:
        return None
    stacked = [writer.reshape(each, [-1, *shape_of(each)[-2:]]) for each in (left, right)]
    return writer.reshape(writer.call(aten.bmm.default, *stacked), shape_of(node))


row(aten.linear.default, category=Category.PRODUCT, jvp=_linear_jvp)
row(
    aten.bmm.default,
    category=Category.PRODUCT,
    jvp=lambda t, node, left, right: product_jvp(t, left, right),
)
row(aten.mm.default, category=Category.PRODUCT, rewrite=_mm)
row(aten.matmul.default, category=Category.PRODUCT, rewrite=_matmul)
