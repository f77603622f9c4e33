"""One rule per operator: from the duals of its arguments to the dual of its result.

A rule is called only if some argument depends on the adapter; the others are plain nodes, numbers or None.
What a rule can't differentiate it refuses with NotImplementedError.
Operators that are linear in the dual act on all slots in one call where these lie in one tensor already.
Derivatives are written in operators that XNNPACK takes, so that they stay in its delegate.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from server_export.derive.slopes import gelu_slope, relu_slope, sigmoid_slope
from server_export.derive.tangent.builder import Builder, Number, aten
from server_export.derive.tangent.dual import Biased, Dual, Interleaved, Parts, Scaled, Stacked
from server_export.graph.writing import registrar


@dataclass(frozen=True, eq=False)
class Factors:
    """An adapter matrix [1, rank, out] whose tangent of a query and row is the product u v^T.

    `u` [queries, rows, rank] and `v` [queries, rows, out] are nodes. The products are never formed.
    """

    primal: Node
    u: Node
    v: Node
    rows: int
    rank: int
    out: int


Value = Any
Rule = Callable[..., Dual | tuple[Dual, ...]]
RULES: dict[Any, Rule] = {}
# By name: torchao registers its operators only when it is imported.
rule = registrar(RULES, key=str)


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _after_slots(dim: int) -> int:
    """A dimension's number once the slots stand in front."""
    return dim + 1 if dim >= 0 else dim


# Linear in their one dual argument


@rule(aten.reshape.default, aten.view.default)
def _reshape(builder: Builder, node: Node, source: Dual, *_: Any) -> Dual:
    return source.reshaped(_shape(node))


@rule(aten.transpose.int)
def _transpose(builder: Builder, node: Node, source: Dual, first: int, second: int) -> Dual:
    dims = _after_slots(first), _after_slots(second)
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots, *dims))


@rule(aten.t.default)
def _matrix_transpose(builder: Builder, node: Node, source: Dual) -> Dual:
    if len(source.shape) < 2:
        return source
    return source.each(_shape(node), lambda slots, _: builder.call(aten.transpose.int, slots, -2, -1))


@rule(aten.permute.default)
def _permute(builder: Builder, node: Node, source: Dual, dims: list[int]) -> Dual:
    order = [0, *(dim % len(source.shape) + 1 for dim in dims)]
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots, order))


@rule(aten.expand.default)
def _expand(builder: Builder, node: Node, source: Dual, *_: Any) -> Dual:
    shape = _shape(node)
    source = source.aligned(len(shape))
    return source.each(shape, lambda slots, count: builder.call(node.target, slots, [count, *shape]))


@rule(aten.slice.Tensor)
def _slice(builder: Builder, node: Node, source: Dual, dim: int = 0, *bounds: Any) -> Dual:
    at = _after_slots(dim)
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots, at, *bounds))


@rule(aten.index_select.default)
def _index_select(builder: Builder, node: Node, source: Dual, dim: int, index: Node) -> Dual:
    at = _after_slots(dim)
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots, at, index))


@rule(aten.mean.dim, aten.sum.dim_IntList)
def _reduce(
    builder: Builder, node: Node, source: Dual, dims: list[int] | None, keepdim: bool = False, **named: Any
) -> Dual:
    every = dims if dims else range(len(source.shape))
    at = [_after_slots(dim) for dim in every]
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots, at, keepdim, **named))


@rule(aten.neg.default)
def _negative(builder: Builder, node: Node, source: Dual) -> Dual:
    return source.each(_shape(node), lambda slots, _: builder.call(node.target, slots))


@rule(aten.linear.default)
def _linear(builder: Builder, node: Node, source: Dual, weight: Node, bias: Node | None = None) -> Dual:
    """One call over all slots, so that the weight exists once and quantized rows have their own scales."""
    if isinstance(weight, Dual) or isinstance(bias, Dual):
        raise NotImplementedError("a layer whose own weights depend on the adapter")
    shape = _shape(node)
    if builder.is_apart:
        primal = builder.call(node.target, source.primal, *filter(None, (weight, bias)))
        return Parts(builder, shape, primal, builder.call(node.target, source.tangents, weight))
    if shape[-1] == 1 and bias is None:
        # A sum or mean: joining the slots would cost more than it.
        return source.each(shape, lambda slots, _: builder.call(node.target, slots, weight))
    slots = builder.call(node.target, source.stack, weight)
    if bias is None:
        return Stacked(builder, shape, slots)
    if bias.op == "get_attr":
        return Biased(builder, shape, slots, bias)
    return _shifted(builder, shape, Stacked(builder, shape, slots), bias)


# Quantization of activations: every slot of a token gets a scale and zero point of its own


@rule("torchao.choose_qparams_affine.default")
def _choose_scales(
    builder: Builder, node: Node, source: Dual, mapping: str, block: list[int], *rest: Any, **named: Any
) -> tuple[Dual, Dual]:
    chosen = [
        builder.call(node.target, slots, mapping, [1, *block], *rest, **named) for slots in _tensors(source)
    ]
    scales, zero_points = (
        _from_tensors(
            builder, source.shape[:-1], [builder.call(operator.getitem, both, index) for both in chosen]
        )
        for index in range(2)
    )
    return scales, zero_points


@rule(operator.getitem)
def _item(builder: Builder, node: Node, source: tuple[Dual, ...], index: int) -> Dual:
    return source[index]


@rule("torchao.quantize_affine.default", "torchao.dequantize_affine.default")
def _quantize(
    builder: Builder, node: Node, source: Dual, block: list[int], scale: Dual, zero: Dual, *rest: Any
) -> Dual:
    tensors = zip(*map(_tensors, (source, scale, zero)), strict=True)
    rounded = [
        builder.call(node.target, slots, [1, *block], scales, zeros, *rest)
        for slots, scales, zeros in tensors
    ]
    return _from_tensors(builder, source.shape, rounded)


def _tensors(source: Dual) -> Sequence[Node]:
    """All slots: in one tensor, or the primal and the tangents where these stay apart."""
    return (source.primal, source.tangents) if source.builder.is_apart else (source.stack,)


def _from_tensors(builder: Builder, shape: tuple[int, ...], tensors: Sequence[Node]) -> Dual:
    return Parts(builder, shape, *tensors) if builder.is_apart else Stacked(builder, shape, *tensors)


# Sums and products


@rule(aten.add.Tensor, aten.sub.Tensor)
def _add(builder: Builder, node: Node, left: Value, right: Value, *, alpha: Number = 1) -> Dual:
    shape = _shape(node)
    if alpha != 1:
        right = _scaled(builder, right, alpha)
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(len(shape)), right.aligned(len(shape))
        if left.is_stacked or right.is_stacked:
            return Stacked(builder, shape, builder.call(node.target, left.stack, right.stack))
        parts = (
            builder.call(node.target, first, second)
            for first, second in ((left.primal, right.primal), (left.tangents, right.tangents))
        )
        return Parts(builder, shape, *parts)
    if isinstance(left, Dual):
        return _shifted(builder, shape, left, right, node.target)
    if node.target is aten.sub.Tensor:
        right = right.each(right.shape, lambda slots, _: builder.call(aten.neg.default, slots))
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
    is_vector = isinstance(other, Node) and other.op == "get_attr" and _shape(other) == shape[-1:]
    if is_vector and target is aten.add.Tensor and source.is_stacked and source.shape == shape:
        return Biased(builder, shape, source.stack, other)
    primal = builder.call(target, source.primal, other)
    if source.shape == shape:
        return source.behind(primal)
    spread = builder.call(aten.expand.default, source.tangents, [builder.queries, *shape])
    return Parts(builder, shape, primal, spread)


def _scaled(builder: Builder, value: Value, number: Number) -> Value:
    if isinstance(value, Dual):
        return value.each(value.shape, lambda slots, _: builder.call(aten.mul.Tensor, slots, number))
    return builder.product(value, number)


@rule(aten.mul.Tensor)
def _multiply(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if isinstance(left, Dual) and left is right:
        return _square(builder, shape, left)
    if isinstance(left, Dual) and isinstance(right, Dual):
        left, right = left.aligned(len(shape)), right.aligned(len(shape))
        for one, other in ((left, right), (right, left)):
            if one.is_stacked and other.slots is not None:
                return _stacked_product(builder, shape, one, other)
        terms = (
            builder.product(builder.product(one.factor, other.primal), one.unscaled)
            for one, other in ((left, right), (right, left))
        )
        primal = builder.call(aten.mul.Tensor, left.primal, right.primal)
        return Parts(builder, shape, primal, builder.call(aten.add.Tensor, *terms))
    source, other = (left, right) if isinstance(left, Dual) else (right, left)
    source = source.aligned(len(shape))
    if source.is_stacked or source.shape != shape:
        return source.each(shape, lambda slots, _: builder.product(slots, other))
    return source.behind(builder.product(source.primal, other), other)


def _square(builder: Builder, shape: tuple[int, ...], source: Dual) -> Dual:
    """x x, whose tangents are 2 x dx; where all slots are in one tensor, so are x times them."""
    if source.is_stacked:
        slots = builder.call(aten.mul.Tensor, source.primal, source.stack)
        return Scaled(builder, shape, slots, 2)
    square = builder.call(aten.mul.Tensor, source.primal, source.primal)
    return source.behind(square, builder.call(aten.add.Tensor, source.primal, source.primal))


def _stacked_product(builder: Builder, shape: tuple[int, ...], left: Dual, right: Dual) -> Dual:
    """Of all slots at once: right's primal times left's slots, and left's primal times right's tangents."""
    factor, number = builder.apart(right.factor)
    only = builder.tangents_only(shape, number)
    if right.shape == shape:
        slope = builder.product(builder.product(factor, left.primal), only)
        straight = builder.call(aten.mul.Tensor, right.primal, left.stack)
        turned = builder.product(slope, right.slots)
        return Stacked(builder, shape, builder.call(aten.add.Tensor, straight, turned))
    rest = _without(factor, right.primal)
    narrow = builder.product(builder.product(factor if rest is None else rest, only), right.slots)
    turned = builder.product(narrow, left.primal)
    if rest is None:
        straight = builder.call(aten.mul.Tensor, right.primal, left.stack)
        return Stacked(builder, shape, builder.call(aten.add.Tensor, straight, turned))
    both = builder.call(aten.add.Tensor, left.stack, turned)
    return Stacked(builder, shape, builder.call(aten.mul.Tensor, right.primal, both))


def _without(product: Node | None, one: Node) -> Node | None:
    """The other of two factors, or None if `product` isn't one of `one` and something else."""
    if product is None or product.target is not aten.mul.Tensor or one not in product.args:
        return None
    left, right = product.args
    other = right if left is one else left
    return other if isinstance(other, Node) else None


@rule(aten.div.Tensor)
def _divide(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if not isinstance(right, Dual):
        source = left.aligned(len(shape))
        return source.each(shape, lambda slots, _: builder.call(node.target, slots, right))
    right = right.aligned(len(shape))
    inverse = builder.call(aten.reciprocal.default, right.primal)
    above = left.aligned(len(shape)).primal if isinstance(left, Dual) else left
    primal = builder.product(inverse, above)
    slope = builder.product(builder.call(aten.neg.default, inverse), primal)
    term = builder.product(builder.product(right.factor, slope), right.unscaled)
    if isinstance(left, Dual):
        left = left.aligned(len(shape))
        other = builder.product(builder.product(left.factor, inverse), left.unscaled)
        return Parts(builder, shape, primal, builder.call(aten.add.Tensor, other, term))
    return Parts(builder, shape, primal, term)


@rule(aten.bmm.default)
def _batched_product(builder: Builder, node: Node, left: Value, right: Value) -> Dual:
    shape = _shape(node)
    if isinstance(right, Factors):
        return _adapter_product(builder, shape, left, right)
    if isinstance(left, Dual) and isinstance(right, Node) and right.op == "get_attr":
        return left.each(shape, lambda slots, count: _constant_product(builder, slots, right, shape, count))
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


def _constant_product(
    builder: Builder, slots: Node, matrices: Node, shape: tuple[int, ...], count: int
) -> Node:
    """Slots [count, batch, rows, inner] times the constant matrices of a batch: slots become rows of it."""
    batch, rows, width = shape
    inner = builder.call(aten.permute.default, slots, [1, 0, 2, 3])
    flat = builder.call(aten.reshape.default, inner, [batch, count * rows, -1])
    product = builder.call(aten.bmm.default, flat, matrices)
    product = builder.reshape(product, batch, count, rows, width)
    return builder.call(aten.permute.default, product, [1, 0, 2, 3])


def _adapter_product(builder: Builder, shape: tuple[int, ...], left: Value, right: Factors) -> Dual:
    """left lora_b and its tangents d(left) lora_b + left u v^T, of [1, rows x length, rank]."""
    queries, rows, rank, out = builder.queries, right.rows, right.rank, right.out
    length = shape[1] // rows
    reduced = None
    if not isinstance(left, Dual):
        inner = left if rows == 1 else builder.reshape(left, rows, length, rank)
    elif builder.is_apart:
        inner = builder.reshape(left.primal, rows, length, rank)
    else:
        reduced = builder.reshape(left.stack, builder.slots * rows, length, rank)
        inner = builder.call(aten.slice.Tensor, reduced, 0, 0, rows)
        builder.know_shape(inner, rows, length, rank)
    # One number for each token and query: the sum of left u over the rank.
    lead = () if rows == 1 else (rows,)
    directions = builder.reshape(right.u, queries, *lead, 1, rank)
    projected = builder.call(aten.mul.Tensor, inner, directions)
    projected = builder.total(projected, queries, *lead, length, rank)
    if reduced is not None:
        return _one_product(builder, shape, reduced, projected, right)
    if isinstance(left, Dual):
        primal = builder.call(aten.bmm.default, builder.reshape(left.primal, *left.shape), right.primal)
        reduced = builder.reshape(left.tangents, queries * rows, length, rank)
        seeds = builder.reshape(projected, queries * rows, length, 1)
        tangents = _joined_product(builder, reduced, seeds, right, length, queries)
        tangents = builder.reshape(tangents, queries, *shape)
        return Parts(builder, shape, builder.reshape(primal, 1, *shape), tangents)
    seed = builder.call(
        aten.mul.Tensor,
        builder.reshape(projected, queries, rows, length, 1),
        builder.reshape(right.v, queries, rows, 1, out),
    )
    primal = builder.call(aten.bmm.default, left, right.primal)
    return Parts(builder, shape, builder.reshape(primal, 1, *shape), builder.reshape(seed, queries, *shape))


def _one_product(
    builder: Builder, shape: tuple[int, ...], left: Node, projected: Node, right: Factors
) -> Dual:
    """[left, projected] [lora_b; v] for every slot and row: sums of outputs would pass over all of them.

    `left` is [slots x rows, length, rank].
    """
    queries, slots, rows = builder.queries, builder.slots, right.rows
    length = shape[1] // rows
    projected = builder.reshape(projected, queries, rows, length, 1)
    seeds = _padded(builder, projected, (slots, rows, length, 1), (1, 0, 0, 0))
    seeds = builder.reshape(seeds, slots * rows, length, 1)
    product = _joined_product(builder, left, seeds, right, length, slots)
    return Stacked(builder, shape, builder.reshape(product, slots, *shape))


def _joined_product(
    builder: Builder, left: Node, projected: Node, right: Factors, length: int, slots: int
) -> Node:
    """[left, projected] [lora_b; v] of [slots x rows, length, ...], where v is 0 in a slot of the primal."""
    rows, rank, out = right.rows, right.rank, right.out
    reduced = builder.call(aten.cat.default, [left, projected], 2)
    directions = builder.reshape(right.v, builder.queries, rows, 1, out)
    directions = _padded(
        builder, directions, (slots, rows, rank + 1, out), (slots - builder.queries, 0, rank, 0)
    )
    lora_b = builder.reshape(right.primal, rank, out)
    lora_b = builder.call(aten.constant_pad_nd.default, lora_b, [0, 0, 0, 1], 0.0)
    matrices = builder.call(aten.add.Tensor, directions, lora_b)
    builder.know_shape(matrices, slots, rows, rank + 1, out)
    product = builder.call(aten.bmm.default, reduced, builder.reshape(matrices, slots * rows, rank + 1, out))
    return builder.know_shape(product, slots * rows, length, out)


def _padded(builder: Builder, source: Node, shape: tuple[int, ...], front: tuple[int, ...]) -> Node:
    """A value with `front` zeros before each of its dimensions, as many as `shape` then has."""
    padding = [number for zeros in reversed(front) for number in (zeros, 0)]
    return builder.know_shape(builder.call(aten.constant_pad_nd.default, source, padding, 0.0), *shape)


@rule(aten.cat.default)
def _cat(builder: Builder, node: Node, parts: list[Value], dim: int = 0) -> Dual:
    shape, at = _shape(node), _after_slots(dim)
    if all(isinstance(part, Dual) and part.is_stacked for part in parts):
        return Stacked(builder, shape, builder.call(node.target, [part.stack for part in parts], at))
    primals = [
        part.primal if isinstance(part, Dual) else builder.reshape(part, 1, *_shape(original))
        for part, original in zip(parts, node.args[0], strict=True)
    ]
    tangents = [
        part.tangents if isinstance(part, Dual) else _no_tangents(builder, part, _shape(original))
        for part, original in zip(parts, node.args[0], strict=True)
    ]
    return Parts(
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
    sides = [side.aligned(len(shape)) if isinstance(side, Dual) else side for side in (left, right)]
    primals = [side.primal if isinstance(side, Dual) else side for side in sides]
    active = [side.shape for side in sides if isinstance(side, Dual)]
    # A constant side may be what the result has its shape from.
    is_full = torch.broadcast_shapes(_shape(node.args[0]), *active) == shape
    if not is_full:
        condition = builder.call(aten.expand.default, condition, list(shape))
    tangents = [side.tangents if isinstance(side, Dual) else builder.zeros(1) for side in sides]
    return Parts(
        builder,
        shape,
        builder.call(node.target, condition, *primals),
        builder.call(node.target, condition, *tangents),
    )


@rule(aten.masked_fill.Scalar)
def _masked_fill(builder: Builder, node: Node, source: Dual, mask: Node, value: Number) -> Dual:
    shape = _shape(node)
    source = source.aligned(len(shape))
    return Parts(
        builder,
        shape,
        builder.call(node.target, source.primal, mask, value),
        builder.call(node.target, source.tangents, mask, 0.0),
    )


# Elementwise functions: the slope is computed once, for slot 0


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


# Functions of a whole row


@rule(aten.softmax.int)
def _softmax(builder: Builder, node: Node, source: Dual, dim: int, *_: Any) -> Dual:
    shape, at = _shape(node), _after_slots(dim)
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
    return Parts(builder, shape, primal, tangents)


@rule("prge.gather_log_softmax.default")
def _gather_log_softmax(builder: Builder, node: Node, logits: Dual, index: Node) -> Dual:
    shape = _shape(node)
    probability = builder.call(aten.softmax.int, logits.primal, -1)
    mean = _sum(builder, builder.product(probability, logits.tangents), logits.shape, -1)
    index = builder.reshape(index, 1, *shape)

    def chosen(target: Any, slots: Node, count: int, *dim: int) -> Node:
        return builder.call(target, slots, *dim, builder.call(aten.expand.default, index, [count, *shape]))

    primal = chosen(node.target, logits.primal, 1)
    # Less the mean after they are chosen: there are far fewer of these than of all.
    tangents = chosen(aten.gather.default, logits.tangents, builder.queries, -1)
    return Parts(builder, shape, primal, builder.call(aten.sub.Tensor, tangents, mean))


def _sum(builder: Builder, source: Node, shape: tuple[int, ...], dim: int) -> Node:
    """Sum over one dimension, kept as 1."""
    if dim % len(shape) == len(shape) - 1:
        return builder.total(source, builder.queries, *shape)
    return builder.call(aten.sum.dim_IntList, source, [_after_slots(dim)], True)
