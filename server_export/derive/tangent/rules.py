"""One rule per operator: from the duals of its arguments to the dual of its result.

A rule is called only if some argument depends on the adapter; the others are plain nodes, numbers or None.
What a rule can't differentiate it refuses with NotImplementedError.
Derivatives are written in operators that XNNPACK takes, so that they stay in its delegate.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from server_export.derive.slopes import gelu_slope, relu_slope, sigmoid_slope, sign
from server_export.derive.tangent.builder import Builder, Number, aten
from server_export.derive.tangent.dual import Dual, Interleaved
from server_export.ir.writer import registrar


@dataclass(frozen=True, eq=False)
class Factors:
    """An adapter matrix [1, above, out] whose tangent of a query and row is the product u v^T.

    `u` [queries, rows, above] and `v` [queries, rows, out] are nodes. The products are never formed.
    """

    primal: Node
    u: Node
    v: Node
    rows: int
    above: int
    out: int

    def transposed(self, builder: Builder) -> Factors:
        """The matrix [1, out, above]."""
        primal = builder.call(aten.transpose.int, self.primal, 1, 2)
        builder.know_shape(primal, 1, self.out, self.above)
        return Factors(primal, self.v, self.u, self.rows, self.out, self.above)


Value = Any
Rule = Callable[..., Value]
# Operators that an adapter's matrix itself may go through.
OF_MATRICES = {"aten.transpose.int"}
RULES: dict[str, Rule] = {}
rule = registrar(RULES)


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _behind_queries(dim: int) -> int:
    """A dimension's number once the queries stand in front."""
    return dim + 1 if dim >= 0 else dim


# Linear in their one dual argument


@rule(aten.reshape.default, aten.view.default)
def _reshape(builder: Builder, node: Node, source: Dual, *_: Any) -> Dual:
    return source.reshaped(_shape(node))


@rule(aten.transpose.int)
def _transpose(
    builder: Builder, node: Node, source: Dual | Factors, first: int, second: int
) -> Dual | Factors:
    if isinstance(source, Factors):
        return source.transposed(builder)
    dims = _behind_queries(first), _behind_queries(second)
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, *dims))


@rule(aten.t.default)
def _matrix_transpose(builder: Builder, node: Node, source: Dual) -> Dual:
    if len(source.shape) < 2:
        return source
    return source.each(_shape(node), lambda part, _: builder.call(aten.transpose.int, part, -2, -1))


@rule(aten.permute.default)
def _permute(builder: Builder, node: Node, source: Dual, dims: list[int]) -> Dual:
    order = [0, *(dim % len(source.shape) + 1 for dim in dims)]
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, order))


@rule(aten.expand.default)
def _expand(builder: Builder, node: Node, source: Dual, *_: Any) -> Dual:
    shape = _shape(node)
    source = source.aligned(len(shape))
    return source.each(shape, lambda part, count: builder.call(node.target, part, [count, *shape]))


@rule(aten.slice.Tensor)
def _slice(builder: Builder, node: Node, source: Dual, dim: int = 0, *bounds: Any) -> Dual:
    at = _behind_queries(dim)
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, at, *bounds))


@rule(aten.index_select.default)
def _index_select(builder: Builder, node: Node, source: Dual, dim: int, index: Node) -> Dual:
    at = _behind_queries(dim)
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, at, index))


@rule(aten.gather.default)
def _gather(builder: Builder, node: Node, source: Dual, dim: int, index: Node) -> Dual:
    return _gathered(builder, source, dim, index, _shape(node))


@rule(aten.topk.default)
def _largest(
    builder: Builder, node: Node, source: Dual, count: int, dim: int = -1, *rest: Any
) -> tuple[Dual, Node]:
    """What is chosen has the tangents of its places; the choice has none."""
    value = builder.reshape(source.primal, *source.shape)
    index = builder.call(operator.getitem, builder.call(node.target, value, count, dim, *rest), 1)
    return _gathered(builder, source, dim, index, tuple(node.meta["val"][1].shape)), index


def _gathered(builder: Builder, source: Dual, dim: int, index: Node, shape: tuple[int, ...]) -> Dual:
    one = builder.reshape(index, 1, *shape)

    def gather(part: Node, count: int) -> Node:
        places = builder.call(aten.expand.default, one, [count, *shape])
        return builder.call(aten.gather.default, part, _behind_queries(dim), places)

    return source.each(shape, gather)


@rule(aten.cumsum.default)
def _running_sum(builder: Builder, node: Node, source: Dual, dim: int) -> Dual:
    at = _behind_queries(dim)
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, at))


@rule(aten.flip.default)
def _flip(builder: Builder, node: Node, source: Dual, dims: list[int]) -> Dual:
    at = [_behind_queries(dim) for dim in dims]
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, at))


@rule(aten.repeat.default)
def _repeat(builder: Builder, node: Node, source: Dual, times: list[int]) -> Dual:
    source = source.aligned(len(times))
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, [1, *times]))


@rule(aten.constant_pad_nd.default)
def _pad(builder: Builder, node: Node, source: Dual, widths: list[int], value: Number = 0.0) -> Dual:
    primal, tangents = (
        builder.call(node.target, part, widths, number)
        for part, number in ((source.primal, value), (source.tangents, 0.0))
    )
    return Dual(builder, _shape(node), primal, tangents)


@rule(aten.mean.dim, aten.sum.dim_IntList)
def _reduce(
    builder: Builder, node: Node, source: Dual, dims: list[int] | None, keepdim: bool = False, **named: Any
) -> Dual:
    every = dims if dims else range(len(source.shape))
    at = [_behind_queries(dim) for dim in every]
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part, at, keepdim, **named))


@rule(aten.neg.default)
def _negative(builder: Builder, node: Node, source: Dual) -> Dual:
    return source.each(_shape(node), lambda part, _: builder.call(node.target, part))


@rule(aten.linear.default)
def _linear(builder: Builder, node: Node, source: Dual, weight: Node, bias: Node | None = None) -> Dual:
    """Two calls: the bias moves the value alone."""
    if isinstance(weight, Dual) or isinstance(bias, Dual):
        raise NotImplementedError("a layer whose own weights depend on the adapter")
    shape = _shape(node)
    primal = builder.call(node.target, source.primal, *filter(None, (weight, bias)))
    return Dual(builder, shape, primal, builder.call(node.target, source.tangents, weight))


# Quantization of activations: every tangent of a token gets a scale and zero point of its own


@rule("torchao.choose_qparams_affine.default")
def _choose_scales(
    builder: Builder, node: Node, source: Dual, mapping: str, block: list[int], *rest: Any, **named: Any
) -> tuple[Dual, ...]:
    chosen = [
        builder.call(node.target, part, mapping, [1, *block], *rest, **named)
        for part in (source.primal, source.tangents)
    ]
    return tuple(
        Dual(builder, source.shape[:-1], *(builder.call(operator.getitem, both, index) for both in chosen))
        for index in range(2)
    )


@rule(operator.getitem)
def _item(builder: Builder, node: Node, source: tuple[Value, ...], index: int) -> Value:
    return source[index]


@rule("torchao.quantize_affine.default", "torchao.dequantize_affine.default")
def _quantize(
    builder: Builder, node: Node, source: Dual, block: list[int], scale: Dual, zero: Dual, *rest: Any
) -> Dual:
    parts = (
        builder.call(node.target, part, [1, *block], scales, zeros, *rest)
        for part, scales, zeros in (
            (source.primal, scale.primal, zero.primal),
            (source.tangents, scale.tangents, zero.tangents),
        )
    )
    return Dual(builder, source.shape, *parts)


# Sums and products


@rule(aten.add.Tensor, aten.sub.Tensor)
def _add(builder: Builder, node: Node, left: Value, right: Value, *, alpha: Number = 1) -> Dual:
    shape = _shape(node)
    if alpha != 1:
        right = _scaled(builder, right, alpha)
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(len(shape)), right.aligned(len(shape))
        parts = (
            builder.call(node.target, first, second)
            for first, second in ((left.primal, right.primal), (left.tangents, right.tangents))
        )
        return Dual(builder, shape, *parts)
    if isinstance(left, Dual):
        return _shifted(builder, shape, left, right, node.target)
    if node.target is aten.sub.Tensor:
        right = right.each(right.shape, lambda part, _: builder.call(aten.neg.default, part))
    return _shifted(builder, shape, right, left)


def _shifted(
    builder: Builder,
    shape: tuple[int, ...],
    source: Dual,
    other: Node | Number,
    target: Any = aten.add.Tensor,
) -> Dual:
    """source + other, which doesn't depend on the adapter: the tangents stay what they are."""
    source = source.aligned(len(shape))
    primal = builder.call(target, source.primal, other)
    if source.shape == shape:
        return source.behind(primal)
    spread = builder.call(aten.expand.default, source.tangents, [builder.queries, *shape])
    return Dual(builder, shape, primal, spread)


def _scaled(builder: Builder, value: Value, number: Number) -> Value:
    if isinstance(value, Dual):
        return value.each(value.shape, lambda part, _: builder.call(aten.mul.Tensor, part, number))
    return builder.product(value, number)


@rule(aten.mul.Tensor)
def _multiply(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if isinstance(left, Dual) and left is right:
        square = builder.call(aten.mul.Tensor, left.primal, left.primal)
        return left.behind(square, builder.call(aten.add.Tensor, left.primal, left.primal))
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(len(shape)), right.aligned(len(shape))
        terms = (
            builder.product(builder.product(one.factor, other.primal), one.unscaled)
            for one, other in ((left, right), (right, left))
        )
        primal = builder.call(aten.mul.Tensor, left.primal, right.primal)
        return Dual(builder, shape, primal, builder.call(aten.add.Tensor, *terms))
    source, other = (left, right) if isinstance(left, Dual) else (right, left)
    source = source.aligned(len(shape))
    if source.shape != shape:
        return source.each(shape, lambda part, _: builder.product(part, other))
    return source.behind(builder.product(source.primal, other), other)


@rule(aten.div.Tensor)
def _divide(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if not isinstance(right, Dual):
        source = left.aligned(len(shape))
        return source.each(shape, lambda part, _: builder.call(node.target, part, right))
    right = right.aligned(len(shape))
    inverse = builder.call(aten.reciprocal.default, right.primal)
    above = left.aligned(len(shape)).primal if isinstance(left, Dual) else left
    # The model's own operation, so that a call has the same bits with tangents and without.
    is_node = isinstance(above, Node)
    primal = builder.call(node.target, above, right.primal) if is_node else builder.product(inverse, above)
    slope = builder.product(builder.call(aten.neg.default, inverse), primal)
    term = builder.product(builder.product(right.factor, slope), right.unscaled)
    if isinstance(left, Dual):
        left = left.aligned(len(shape))
        other = builder.product(builder.product(left.factor, inverse), left.unscaled)
        return Dual(builder, shape, primal, builder.call(aten.add.Tensor, other, term))
    return Dual(builder, shape, primal, term)


@rule(aten.bmm.default)
def _batched_product(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if isinstance(right, Factors):
        return _adapter_product(builder, shape, left, right)
    return _product_rule(builder, shape, left, right)


def _product_rule(builder: Builder, shape: tuple[int, ...], left: Value, right: Value) -> Dual:
    """left right, and d(left) right + left d(right), of [batch, rows, inner] and [batch, inner, width].

    Tangents on the left are more rows of one product, those on the right more columns of the other.
    """
    batch, rows, width = shape
    queries = builder.queries
    left, right = (Interleaved.of(side) if isinstance(side, Dual) else side for side in (left, right))
    first, second = (
        builder.reshape(side.primal, *side.shape) if isinstance(side, Dual) else side
        for side in (left, right)
    )
    primal = builder.call(aten.bmm.default, first, second)
    builder.know_shape(primal, *shape)
    terms = []
    if isinstance(left, Interleaved):
        inside = builder.reshape(left.inside, batch, rows * queries, left.shape[-1])
        product = builder.call(aten.bmm.default, inside, second)
        builder.know_shape(product, batch, rows * queries, width)
        terms.append(builder.reshape(product, batch, rows, queries * width))
    if isinstance(right, Interleaved):
        inside = builder.reshape(right.inside, batch, right.shape[-2], queries * width)
        terms.append(builder.call(aten.bmm.default, first, inside))
    tangents = terms[0] if len(terms) == 1 else builder.call(aten.add.Tensor, *terms)
    builder.know_shape(tangents, batch, rows, queries * width)
    return Interleaved(builder, shape, builder.reshape(primal, 1, *shape), tangents)


def _adapter_product(builder: Builder, shape: tuple[int, ...], left: Value, right: Factors) -> Dual:
    """left right and its tangents d(left) right + left u v^T, of [1, rows x length, above]."""
    if right.above > right.out:
        return _reducing_product(builder, shape, left, right)
    queries, rows, rank, out = builder.queries, right.rows, right.above, right.out
    length = shape[1] // rows
    value = builder.reshape(left.primal, *left.shape) if isinstance(left, Dual) else left
    primal = builder.reshape(builder.call(aten.bmm.default, value, right.primal), 1, *shape)
    # One number for each token and query: the sum of left u over the rank.
    directions = builder.reshape(right.u, queries, rows, 1, rank)
    projected = builder.call(aten.mul.Tensor, builder.reshape(value, rows, length, rank), directions)
    projected = builder.total(projected, queries, rows, length, rank)
    projected = builder.reshape(projected, queries, rows, length, 1)
    directions = builder.reshape(right.v, queries, rows, 1, out)
    if isinstance(left, Dual):
        tangents = _joined_product(builder, left.tangents, projected, directions, right, length)
    else:
        tangents = builder.call(aten.mul.Tensor, projected, directions)
    return Dual(builder, shape, primal, builder.reshape(tangents, queries, *shape))


def _reducing_product(builder: Builder, shape: tuple[int, ...], left: Value, right: Factors) -> Dual:
    """The same of a matrix with few columns: sums of its results cost little, its copies would not."""
    queries, rows, above, out = builder.queries, right.rows, right.above, right.out
    length = shape[1] // rows
    value = builder.reshape(left.primal, *left.shape) if isinstance(left, Dual) else left
    primal = builder.reshape(builder.call(aten.bmm.default, value, right.primal), 1, *shape)
    # A row's tokens meet the u of all queries in one product.
    u = builder.call(aten.permute.default, right.u, [1, 2, 0])
    builder.know_shape(u, rows, above, queries)
    projected = builder.call(aten.bmm.default, builder.reshape(value, rows, length, above), u)
    projected = builder.call(aten.permute.default, projected, [2, 0, 1])
    builder.know_shape(projected, queries, rows, length)
    projected = builder.reshape(projected, queries, rows, length, 1)
    v = builder.reshape(right.v, queries, rows, 1, out)
    tangents = builder.call(aten.mul.Tensor, projected, v)
    builder.know_shape(tangents, queries, rows, length, out)
    tangents = builder.reshape(tangents, queries, *shape)
    if isinstance(left, Dual):
        moved = builder.reshape(left.tangents, 1, queries * shape[1], above)
        product = builder.call(aten.bmm.default, moved, right.primal)
        builder.know_shape(product, 1, queries * shape[1], out)
        tangents = builder.call(aten.add.Tensor, builder.reshape(product, queries, *shape), tangents)
    return Dual(builder, shape, primal, tangents)


def _joined_product(
    builder: Builder, left: Node, projected: Node, directions: Node, right: Factors, length: int
) -> Node:
    """[left, projected] [lora_b; v] for every query and row: a sum of outputs would pass over all of them.

    Returns:
        [queries x rows, length, out].
    """
    rank, out, count = right.above, right.out, builder.queries * right.rows
    parts = builder.reshape(left, count, length, rank), builder.reshape(projected, count, length, 1)
    directions = builder.call(aten.constant_pad_nd.default, directions, [0, 0, rank, 0, 0, 0, 0, 0], 0.0)
    lora_b = builder.reshape(right.primal, rank, out)
    lora_b = builder.call(aten.constant_pad_nd.default, lora_b, [0, 0, 0, 1], 0.0)
    matrices = builder.reshape(builder.call(aten.add.Tensor, directions, lora_b), count, rank + 1, out)
    joined = builder.call(aten.cat.default, list(parts), 2)
    return builder.know_shape(builder.call(aten.bmm.default, joined, matrices), count, length, out)


@rule(aten.cat.default)
def _cat(builder: Builder, node: Node, parts: list[Value], dim: int = 0) -> Dual:
    shape, at = _shape(node), _behind_queries(dim)
    primals = [
        part.primal if isinstance(part, Dual) else builder.reshape(part, 1, *_shape(original))
        for part, original in zip(parts, node.args[0], strict=True)
    ]
    tangents = [
        part.tangents if isinstance(part, Dual) else _no_tangents(builder, part, _shape(original))
        for part, original in zip(parts, node.args[0], strict=True)
    ]
    return Dual(
        builder,
        shape,
        builder.call(node.target, primals, at),
        builder.call(node.target, tangents, at),
    )


def _no_tangents(builder: Builder, value: Node, shape: tuple[int, ...]) -> Node:
    """Tangents of a value [*shape] that doesn't depend on the adapter."""
    zeros = builder.call(aten.zeros_like.default, value)
    return builder.call(aten.expand.default, zeros, [builder.queries, *shape])


@rule(aten.where.self)
def _where(builder: Builder, node: Node, condition: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    active = [side.shape for side in (left, right) if isinstance(side, Dual)]
    # A constant side may be what the result has its shape from.
    is_full = torch.broadcast_shapes(_shape(node.args[0]), *active) == shape
    if not is_full:
        condition = builder.call(aten.expand.default, condition, list(shape))
    return _chosen(builder, shape, condition, left, right)


@rule(aten.masked_fill.Scalar)
def _masked_fill(builder: Builder, node: Node, source: Dual, mask: Node, value: Number) -> Dual:
    shape = _shape(node)
    source = source.aligned(len(shape))
    return Dual(
        builder,
        shape,
        builder.call(node.target, source.primal, mask, value),
        builder.call(node.target, source.tangents, mask, 0.0),
    )


@rule(aten.scatter.value)
def _put(builder: Builder, node: Node, source: Dual, dim: int, index: Node, value: Number) -> Dual:
    """What is put somewhere has no tangents."""
    one, at = builder.reshape(index, 1, *_shape(node.args[2])), _behind_queries(dim)

    def put(part: Node, count: int, number: Number) -> Node:
        places = builder.call(aten.expand.default, one, [count, *_shape(node.args[2])])
        return builder.call(node.target, part, at, places, number)

    primal, tangents = put(source.primal, 1, value), put(source.tangents, builder.queries, 0.0)
    return Dual(builder, _shape(node), primal, tangents)


@rule(aten.gt.Scalar, aten.lt.Scalar, aten.gt.Tensor, aten.lt.Tensor)
def _compare(builder: Builder, node: Node, left: Value, right: Value) -> Any:
    """True or false has no tangents."""
    shape = _shape(node)
    sides = [side.aligned(len(shape)).primal if isinstance(side, Dual) else side for side in (left, right)]
    return builder.reshape(builder.call(node.target, *sides), *shape)


@rule(aten.full_like.default)
def _constant(builder: Builder, node: Node, source: Dual, value: Number, **named: Any) -> Node:
    """It has its source's shape alone, and no tangents."""
    return builder.call(node.target, builder.reshape(source.primal, *source.shape), value, **named)


@rule(aten.minimum.default, aten.maximum.default)
def _extremum(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    compare = aten.lt.Tensor if node.target is aten.minimum.default else aten.gt.Tensor
    shape = _shape(node)
    sides = [side.aligned(len(shape)).primal if isinstance(side, Dual) else side for side in (left, right)]
    condition = builder.call(aten.expand.default, builder.call(compare, *sides), [1, *shape])
    return _chosen(builder, shape, builder.reshape(condition, *shape), left, right)


def _chosen(builder: Builder, shape: tuple[int, ...], condition: Node, left: Value, right: Value) -> Dual:
    """The left side where a condition [*shape] holds, else the right one."""
    sides = [side.aligned(len(shape)) if isinstance(side, Dual) else side for side in (left, right)]
    primals = [side.primal if isinstance(side, Dual) else side for side in sides]
    tangents = [side.tangents if isinstance(side, Dual) else builder.zeros(1) for side in sides]
    return Dual(
        builder,
        shape,
        builder.call(aten.where.self, condition, *primals),
        builder.call(aten.where.self, condition, *tangents),
    )


# Elementwise functions: the slope is computed once, for the value


Slope = Callable[..., Node]


def _elementwise(*targets: Any) -> Callable[[Slope], Slope]:
    """Register an elementwise function by its slope, made from its argument and its result."""

    def register(slope: Slope) -> Slope:
        @rule(*targets)
        def apply(builder: Builder, node: Node, source: Dual, *rest: Any, **named: Any) -> Dual:
            primal = builder.call(node.target, source.primal, *rest, **named)
            return source.behind(primal, slope(builder, source.primal, primal, *rest, **named))

        return slope

    return register


@_elementwise(aten.exp.default)
def _exponential(builder: Builder, argument: Node, result: Node) -> Node:
    return result


@_elementwise(aten.log.default)
def _logarithm(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.reciprocal.default, argument)


@_elementwise(aten.reciprocal.default)
def _reciprocal(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.product(builder.call(aten.neg.default, result), result)


@_elementwise(aten.sqrt.default)
def _square_root(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.product(builder.call(aten.reciprocal.default, result), 0.5)


@_elementwise(aten.rsqrt.default)
def _inverse_square_root(builder: Builder, argument: Node, result: Node) -> Node:
    cube = builder.product(builder.product(result, result), result)
    return builder.product(cube, -0.5)


@_elementwise(aten.tanh.default)
def _hyperbolic_tangent(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.add.Tensor, builder.product(builder.product(result, result), -1.0), 1.0)


@_elementwise(aten.sigmoid.default)
def _sigmoid(builder: Builder, argument: Node, result: Node) -> Node:
    return sigmoid_slope(builder.call, result)


@_elementwise(aten.softplus.default)
def _softplus(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.sigmoid.default, argument)


@_elementwise(aten.silu.default)
def _silu(builder: Builder, argument: Node, result: Node) -> Node:
    # s + y (1 - s) = s (1 + x - y), since y = x s
    gate = builder.call(aten.sigmoid.default, argument)
    rest = builder.call(aten.sub.Tensor, argument, result)
    return builder.product(gate, builder.call(aten.add.Tensor, rest, 1.0))


@_elementwise(aten.gelu.default)
def _gelu(builder: Builder, argument: Node, result: Node, **_: Any) -> Node:
    return gelu_slope(builder.call, argument, result)


@_elementwise(aten.relu.default)
def _relu(builder: Builder, argument: Node, result: Node) -> Node:
    return relu_slope(builder.call, argument)


@_elementwise(aten.pow.Tensor_Scalar)
def _power(builder: Builder, argument: Node, result: Node, exponent: Number) -> Node:
    lower = builder.call(aten.pow.Tensor_Scalar, argument, exponent - 1)
    return builder.product(lower, exponent)


@_elementwise(aten.abs.default)
def _magnitude(builder: Builder, argument: Node, result: Node) -> Node:
    return sign(builder.call, argument)


@_elementwise(aten.erf.default)
def _error_function(builder: Builder, argument: Node, result: Node) -> Node:
    square = builder.product(builder.product(argument, argument), -1.0)
    return builder.product(builder.call(aten.exp.default, square), 2 / math.sqrt(math.pi))


@_elementwise(aten.expm1.default)
def _exponential_minus_one(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.add.Tensor, result, 1.0)


@_elementwise(aten.log1p.default)
def _logarithm_of_more(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.reciprocal.default, builder.call(aten.add.Tensor, argument, 1.0))


@_elementwise(aten.sin.default)
def _sine(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.call(aten.cos.default, argument)


@_elementwise(aten.cos.default)
def _cosine(builder: Builder, argument: Node, result: Node) -> Node:
    return builder.product(builder.call(aten.sin.default, argument), -1.0)


@_elementwise(aten.clamp.default)
def _clamp(
    builder: Builder, argument: Node, result: Node, least: Number | None = None, most: Number | None = None
) -> Node:
    slopes = []
    if least is not None:
        slopes.append(relu_slope(builder.call, builder.call(aten.sub.Tensor, argument, least)))
    if most is not None:
        below = builder.call(aten.add.Tensor, builder.product(argument, -1.0), most)
        slopes.append(relu_slope(builder.call, below))
    return builder.product(slopes[0], slopes[1]) if len(slopes) > 1 else slopes[0]


@_elementwise(aten.leaky_relu.default)
def _leaky_relu(builder: Builder, argument: Node, result: Node, leak: Number = 0.01) -> Node:
    above = builder.product(relu_slope(builder.call, argument), 1.0 - leak)
    return builder.call(aten.add.Tensor, above, leak)


@_elementwise(aten.elu.default)
def _elu(
    builder: Builder,
    argument: Node,
    result: Node,
    alpha: Number = 1,
    scale: Number = 1,
    input_scale: Number = 1,
) -> Node:
    """Above 0 `scale`, below `input_scale` (result + alpha scale)."""
    above = relu_slope(builder.call, argument)
    below = builder.call(aten.add.Tensor, builder.product(above, -1.0), 1.0)
    inner = builder.call(aten.add.Tensor, result, alpha * scale)
    return builder.call(
        aten.add.Tensor,
        builder.product(above, scale),
        builder.product(builder.product(below, inner), input_scale),
    )


# Functions of a whole row


@rule(aten._log_softmax.default)
def _log_softmax(builder: Builder, node: Node, source: Dual, dim: int, *_: Any) -> Dual:
    shape, at = _shape(node), _behind_queries(dim)
    primal = builder.call(aten._log_softmax.default, source.primal, at, False)
    builder.know_shape(primal, 1, *shape)
    weighted = builder.product(builder.call(aten.exp.default, primal), source.tangents)
    mean = _sum(builder, weighted, shape, dim)
    return Dual(builder, shape, primal, builder.call(aten.sub.Tensor, source.tangents, mean))


@rule(aten.softmax.int)
def _softmax(builder: Builder, node: Node, source: Dual, dim: int, *_: Any) -> Dual:
    shape, at = _shape(node), _behind_queries(dim)
    primal = builder.call(aten.softmax.int, source.primal, at)
    builder.know_shape(primal, 1, *shape)
    if isinstance(source, Interleaved) and dim % len(shape) == len(shape) - 1:
        probability, inside, lying = source.beside(primal)
        weighted = builder.call(aten.mul.Tensor, probability, inside)
        mean = builder.total(weighted, *lying)
        tangents = builder.call(aten.sub.Tensor, weighted, builder.call(aten.mul.Tensor, mean, probability))
        builder.know_shape(tangents, *lying)
        return Interleaved(builder, shape, primal, tangents)
    weighted = builder.product(builder.product(source.factor, primal), source.unscaled)
    mean = _sum(builder, weighted, shape, dim)
    tangents = builder.call(aten.sub.Tensor, weighted, builder.product(mean, primal))
    return Dual(builder, shape, primal, tangents)


@rule(aten.logsumexp.default)
def _log_total(builder: Builder, node: Node, source: Dual, dims: list[int], keeps: bool = False) -> Dual:
    if dims not in ([-1], [len(source.shape) - 1]):
        raise NotImplementedError("a sum over another dimension than the last")
    primal = builder.call(aten.logsumexp.default, source.primal, [-1], keeps)
    weights = builder.call(aten.softmax.int, source.primal, -1)
    tangents = _sum(builder, builder.product(weights, source.tangents), source.shape, -1)
    return Dual(builder, _shape(node), primal, builder.reshape(tangents, builder.queries, *_shape(node)))


@rule("prge.mixed_parts.default")
def _mixed_parts(builder: Builder, node: Node, before: Dual, within: Dual, *mixed_in: Dual) -> Dual:
    """With p = softmax(s): d(p v) = (p ds) v + p dv - (sum of p ds) p v."""
    shape, past = _shape(node), before.shape[-1]
    joined = builder.call(aten.cat.default, [before.primal, within.primal], -1)
    weights = builder.call(aten.softmax.int, joined, -1)
    totals, terms = [], []
    for scores, values, part in zip(
        (before, within), mixed_in, ((0, past), (past, sys.maxsize)), strict=True
    ):
        weight = builder.call(aten.slice.Tensor, weights, -1, *part)
        builder.know_shape(weight, 1, *scores.shape)
        probability, inside, lying = Interleaved.of(scores).beside(weight)
        weighted = builder.know_shape(builder.call(aten.mul.Tensor, probability, inside), *lying)
        totals.append(builder.total(weighted, *lying))
        weighting = Interleaved(builder, scores.shape, weight, weighted)
        terms.append(Interleaved.of(_product_rule(builder, shape, weighting, values)))
    primal = builder.call(aten.add.Tensor, *(each.primal for each in terms))
    mixed, one, lying = terms[0].beside(builder.know_shape(primal, 1, *shape))
    tangents = builder.call(aten.add.Tensor, one, terms[1].beside(primal)[1])
    total = builder.reshape(builder.call(aten.add.Tensor, *totals), *lying[:-1], 1)
    shift = builder.call(aten.mul.Tensor, total, mixed)
    tangents = builder.know_shape(builder.call(aten.sub.Tensor, tangents, shift), *lying)
    return Interleaved(builder, shape, primal, tangents)


@rule("prge.unit_inverse.default")
def _unit_inverse(builder: Builder, node: Node, below: Dual, *tables: Any) -> Dual:
    """d(X) = -X d(below) X."""
    shape = _shape(node)
    inverse = builder.call(node.target, builder.reshape(below.primal, *below.shape), *tables)
    builder.know_shape(inverse, *shape)
    moved = _product_rule(builder, shape, _product_rule(builder, shape, inverse, below), inverse)
    tangents = builder.call(aten.neg.default, moved.tangents)
    return Dual(builder, shape, builder.reshape(inverse, 1, *shape), tangents)


@rule("prge.softmax_parts.default")
def _softmax_parts(builder: Builder, node: Node, logits: Dual, shift: Node, index: Node) -> Dual:
    shape, one = _shape(node), (*_shape(node)[:-1], 1)
    index = builder.reshape(index, 1, *one)
    shifted = builder.call(aten.sub.Tensor, logits.primal, builder.reshape(shift, 1, *one))
    exponentials = builder.call(aten.exp.default, shifted)

    def parts(part: Node, weighted: Node, count: int) -> Node:
        places = builder.call(aten.expand.default, index, [count, *one])
        chosen = builder.call(aten.gather.default, part, -1, places)
        return builder.call(aten.cat.default, [chosen, builder.total(weighted, count, *logits.shape)], -1)

    tangents = parts(logits.tangents, builder.product(exponentials, logits.tangents), builder.queries)
    return Dual(builder, shape, parts(shifted, exponentials, 1), tangents)


def _sum(builder: Builder, source: Node, shape: tuple[int, ...], dim: int) -> Node:
    """Sum over one dimension, kept as 1."""
    if dim % len(shape) == len(shape) - 1:
        return builder.total(source, builder.queries, *shape)
    return builder.call(aten.sum.dim_IntList, source, [_behind_queries(dim)], True)
