"""Sums, products, quotients and selections of two values, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators.table import Category, row
from server_export.ir.tangents import Dual, GraphTangents, Number, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def primal_of(value: Any, rank: int) -> Any:
    """Return the primal of a dual, aligned to the rank of a result; other values are returned unchanged."""
    return value.aligned(rank).primal if isinstance(value, Dual) else value


def _rank(node: Node) -> int:
    return len(shape_of(node))


def _add(t: GraphTangents, node: Node, left: Any, right: Any, *, alpha: Number = 1) -> Dual:
    if alpha != 1:
        is_dual = isinstance(right, Dual)
        right = right.map(lambda part, _: t.times(part, alpha)) if is_dual else t.product(right, alpha)
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(_rank(node)), right.aligned(_rank(node))
        sums = (
            t.call(node.target, first, second)
            for first, second in ((left.primal, right.primal), (left.tangents, right.tangents))
        )
        return Dual(t, *sums)
    if isinstance(left, Dual):
        return _with_constant(t, node, left, right, node.target)
    if node.target is aten.sub.Tensor:
        right = right.map(lambda part, _: t.negative(part))
    return _with_constant(t, node, right, left, aten.add.Tensor)


def _with_constant(t: GraphTangents, node: Node, source: Dual, other: Any, target: Any) -> Dual:
    """Combine a dual with a value without tangents: the tangents of the dual stay the same."""
    shape = shape_of(node)
    source = source.aligned(len(shape))
    primal = t.call(target, source.primal, other)
    if source.shape == shape:
        return source.scaled(primal)
    return Dual(t, primal, t.call(aten.expand.default, source.tangents, [t.queries, *shape]))


def _multiply(t: GraphTangents, node: Node, left: Any, right: Any) -> Dual:
    shape = shape_of(node)
    if isinstance(left, Dual) and left is right:
        return left.scaled(t.times(left.primal, left.primal), t.plus(left.primal, left.primal))
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(len(shape)), right.aligned(len(shape))
        terms = [
            t.product(t.product(one.factor, other.primal), one.unscaled)
            for one, other in ((left, right), (right, left))
        ]
        return Dual(t, t.times(left.primal, right.primal), t.plus(*terms))
    source, other = (left, right) if isinstance(left, Dual) else (right, left)
    source = source.aligned(len(shape))
    if source.shape != shape:
        return source.map(lambda part, _: t.product(part, other))
    return source.scaled(t.product(source.primal, other), other)


def _divide(t: GraphTangents, node: Node, left: Any, right: Any) -> Dual:
    rank = _rank(node)
    if not isinstance(right, Dual):
        return left.aligned(rank).map(lambda part, _: t.call(node.target, part, right))
    right = right.aligned(rank)
    inverse, numerator = t.reciprocal(right.primal), primal_of(left, rank)
    # The primal uses the model's own operator, so that it has the same bits with and without tangents.
    is_node = isinstance(numerator, Node)
    primal = t.call(node.target, numerator, right.primal) if is_node else t.product(inverse, numerator)
    derivative = t.product(t.negative(inverse), primal)
    term = t.product(t.product(right.factor, derivative), right.unscaled)
    if isinstance(left, Dual):
        left = left.aligned(rank)
        term = t.plus(t.product(t.product(left.factor, inverse), left.unscaled), term)
    return Dual(t, primal, term)


def _where(t: GraphTangents, node: Node, condition: Node, left: Any, right: Any) -> Dual:
    shape = shape_of(node)
    active = [side.shape for side in (left, right) if isinstance(side, Dual)]
    # The shape of the result may come from a side without tangents.
    if torch.broadcast_shapes(shape_of(condition), *active) != shape:
        condition = t.call(aten.expand.default, condition, list(shape))
    return _select(t, node, condition, left, right)


def _select(t: GraphTangents, node: Node, condition: Node, left: Any, right: Any) -> Dual:
    """Select the left side where the condition holds, and the right side elsewhere."""
    sides = [side.aligned(_rank(node)) if isinstance(side, Dual) else side for side in (left, right)]
    dtype = next(side.primal.meta["val"].dtype for side in sides if isinstance(side, Dual))
    primals = [side.primal if isinstance(side, Dual) else side for side in sides]
    tangents = [
        side.tangents if isinstance(side, Dual) else t.constant(torch.zeros(1, dtype=dtype)) for side in sides
    ]
    return Dual(
        t, t.call(aten.where.self, condition, *primals), t.call(aten.where.self, condition, *tangents)
    )


def _masked_fill(t: GraphTangents, node: Node, source: Dual, mask: Node, value: Number) -> Dual:
    source = source.aligned(_rank(node))
    primal = t.call(node.target, source.primal, mask, value)
    return Dual(t, primal, t.call(node.target, source.tangents, mask, 0.0))


def _compare(t: GraphTangents, node: Node, left: Any, right: Any) -> Node:
    """Write a comparison of the primals; booleans have no tangents."""
    sides = (primal_of(side, _rank(node)) for side in (left, right))
    return t.reshape(t.call(node.target, *sides), shape_of(node))


def _extremum(t: GraphTangents, node: Node, left: Any, right: Any) -> Dual:
    compare = aten.lt.Tensor if node.target is aten.minimum.default else aten.gt.Tensor
    shape = shape_of(node)
    sides = (primal_of(side, len(shape)) for side in (left, right))
    condition = t.call(aten.expand.default, t.call(compare, *sides), [1, *shape])
    return _select(t, node, t.reshape(condition, shape), left, right)


def _filled(t: GraphTangents, node: Node, source: Dual, value: Number, **named: Any) -> Node:
    """Write the call without tangents, because the result depends on the shape of the source only."""
    return t.call(node.target, source.value, value, **named)


# Rewrite and backward rules


def _with_number(writer: GraphWriter, node: Node, source: Node, number: float) -> Node:
    of_tensors = {"add": aten.add, "sub": aten.sub, "mul": aten.mul, "div": aten.div}
    return writer.call(of_tensors[str(node.target).split(".")[1]].Tensor, source, number)


def _over_number(writer: GraphWriter, node: Node, source: Node, number: float) -> Node:
    return writer.times(source, 1 / number)


def _reversed_difference(writer: GraphWriter, node: Node, source: Node, other: float, *_: Any) -> Node:
    return writer.plus(writer.times(source, -1.0), other)


def _bounded(writer: GraphWriter, node: Node, source: Node, least: Any = None, most: Any = None) -> Node:
    above = source if least is None else writer.call(aten.maximum.default, source, least)
    return above if most is None else writer.call(aten.minimum.default, above, most)


def _functional(target: Any) -> Any:
    """Replace an in-place operator of autograd, because programs don't modify values."""
    return lambda writer, node, *arguments: writer.call(target, *arguments)


ARITHMETIC, COMPARE = Category.ARITHMETIC, Category.COMPARE

row(aten.add.Tensor, aten.sub.Tensor, category=ARITHMETIC, jvp=_add)
row(aten.mul.Tensor, category=ARITHMETIC, jvp=_multiply)
row(aten.div.Tensor, category=ARITHMETIC, jvp=_divide)

row(aten.neg.default, category=Category.ELEMENTWISE, jvp=lambda t, node, x: x.map(lambda p, _: t.negative(p)))
row(
    aten.multiply.Tensor,
    category=ARITHMETIC,
    rewrite=lambda writer, node, left, right: writer.times(left, right),
)
row(aten.add.Scalar, aten.sub.Scalar, category=ARITHMETIC, rewrite=_with_number)
row(aten.mul.Scalar, category=ARITHMETIC, rewrite=_with_number, backward=_with_number)
row(aten.div.Scalar, category=ARITHMETIC, rewrite=_with_number, backward=_over_number)
row(aten.rsub.Scalar, category=ARITHMETIC, core=_reversed_difference)
row(aten.clamp.Tensor, category=ARITHMETIC, rewrite=_bounded)

row(aten.gt.Scalar, aten.lt.Scalar, aten.gt.Tensor, aten.lt.Tensor, category=COMPARE, jvp=_compare)
row(aten.where.self, category=COMPARE, jvp=_where)
row(aten.minimum.default, aten.maximum.default, category=COMPARE, jvp=_extremum)
row(aten.masked_fill.Scalar, category=COMPARE, jvp=_masked_fill)
row(aten.full_like.default, category=COMPARE, jvp=_filled)

row(aten.logical_and_.default, category=Category.GRADIENT, backward=_functional(aten.logical_and.default))
row(aten.masked_fill_.Scalar, category=Category.GRADIENT, backward=_functional(aten.masked_fill.Scalar))
