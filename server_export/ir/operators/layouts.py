"""Operators that move elements and don't compute with them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators.table import Category, JvpRule, members, row
from server_export.ir.tangents import Dual, GraphTangents, Number, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def shift_dims(dim: Any) -> Any:
    """Return dimensions as they are numbered after the queries were prepended."""
    if isinstance(dim, list | tuple):
        return [shift_dims(each) for each in dim]
    return dim + 1 if dim >= 0 else dim


def linear_jvp(*dims_at: int) -> JvpRule:
    """Return the JVP rule of an operator that is linear in its first argument.

    The rule applies the operator to the primal and to the tangents.

    Args:
        dims_at: indices of the other arguments that are dimensions; the first of them defaults to 0.
    """

    def jvp(t: GraphTangents, node: Node, source: Dual, *rest: Any, **named: Any) -> Dual:
        arguments = list(rest or [0] * bool(dims_at))
        for index in dims_at:
            arguments[index] = shift_dims(arguments[index])
        return source.map(lambda part, _: t.call(node.target, part, *arguments, **named))

    return jvp


# Shapes


def _reshape_jvp(t: GraphTangents, node: Node, source: Dual, *_: Any) -> Dual:
    return source.reshaped(shape_of(node))


def _permute_jvp(t: GraphTangents, node: Node, source: Dual, dims: list[int]) -> Dual:
    order = [0, *(dim % len(source.shape) + 1 for dim in dims)]
    return source.map(lambda part, _: t.call(node.target, part, order))


def _matrix_transpose_jvp(t: GraphTangents, node: Node, source: Dual) -> Dual:
    if len(source.shape) < 2:
        return source
    return source.map(lambda part, _: t.call(aten.transpose.int, part, -2, -1))


def _expand_jvp(t: GraphTangents, node: Node, source: Dual, *_: Any) -> Dual:
    shape = shape_of(node)
    return source.aligned(len(shape)).map(lambda part, count: t.call(node.target, part, [count, *shape]))


def _repeat_jvp(t: GraphTangents, node: Node, source: Dual, times: list[int]) -> Dual:
    return source.aligned(len(times)).map(lambda part, _: t.call(node.target, part, [1, *times]))


def _pad_jvp(t: GraphTangents, node: Node, source: Dual, widths: list[int], value: Number = 0.0) -> Dual:
    primal = t.call(node.target, source.primal, widths, value)
    return Dual(t, primal, t.call(node.target, source.tangents, widths, 0.0))


def _cat_jvp(t: GraphTangents, node: Node, parts: list[Any], dim: int = 0) -> Dual:
    def zero_tangents(part: Node) -> Node:
        zeros = t.call(aten.zeros_like.default, part)
        return t.call(aten.expand.default, zeros, [t.queries, *shape_of(part)])

    primals = [part.primal if isinstance(part, Dual) else t.as_primal(part) for part in parts]
    tangents = [part.tangents if isinstance(part, Dual) else zero_tangents(part) for part in parts]
    shifted_dim = shift_dims(dim)
    return Dual(t, t.call(node.target, primals, shifted_dim), t.call(node.target, tangents, shifted_dim))


def _as_reshape(writer: GraphWriter, node: Node, source: Node, *_: Any, **__: Any) -> Node:
    return writer.reshape(source, shape_of(node))


def _expand_as(writer: GraphWriter, node: Node, source: Node, like: Node) -> Node:
    return writer.call(aten.expand.default, source, [*shape_of(node)])


def _repeat(writer: GraphWriter, node: Node, source: Node, times: Sequence[int]) -> Node | None:
    """Don't repeat leading dimensions if all users are products that broadcast."""
    shape, repeated = shape_of(source), shape_of(node)
    leading = [*times[: len(times) - len(shape)]]
    if any(number != 1 for number in times[len(leading) :]) or not leading:
        return None
    others = [other for user in node.users for other in user.all_input_nodes if other is not node]
    if any(user.target is not aten.mul.Tensor for user in node.users) or not others:
        return None
    if any(shape_of(other)[: len(leading)] != repeated[: len(leading)] for other in others):
        return None
    return writer.reshape(source, [*[1] * len(leading), *shape])


def _transpose_in_core(writer: GraphWriter, node: Node, source: Node, first: int, second: int) -> Node:
    order = list(range(len(shape_of(source))))
    order[first], order[second] = order[second], order[first]
    return writer.call(aten.permute_copy.default, source, order)


def _cancel_permutations(writer: GraphWriter, node: Node, source: Node, order: list[int]) -> Node | None:
    """Remove a pair of permutations that cancel each other."""
    first: Any = source.args[1] if source.target is aten.permute.default else []
    cancel = [first[dim] for dim in order] == list(range(len(order))) if first else False
    return source.all_input_nodes[0] if cancel else None


# Parts


def _select(writer: GraphWriter, node: Node, source: Node, dim: int, index: int) -> Node:
    start = index % shape_of(source)[dim]
    part = writer.call(aten.slice.Tensor, source, dim, start, start + 1)
    return writer.reshape(part, shape_of(node))


def _part_of_a_split(writer: GraphWriter, node: Node, split: Node, index: int) -> Node | None:
    if split.target not in members(Category.SPLIT):
        return None
    if split.target is aten.unbind.int:
        return _select(writer, node, split.args[0], split.args[1] if len(split.args) > 1 else 0, index)
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    sizes = [part.shape[dim] for part in split.meta["val"]]
    start = sum(sizes[:index])
    return writer.call(aten.slice.Tensor, split.args[0], dim, start, start + sizes[index])


def _slice_of_scattered(writer: GraphWriter, node: Node, source: Node, *bounds: Any) -> Node | None:
    return source.all_input_nodes[1] if _is_scattered_at(source, bounds) else None


def _scatter_again(writer: GraphWriter, node: Node, source: Node, part: Node, *bounds: Any) -> Node | None:
    if not _is_scattered_at(source, bounds):
        return None
    return writer.call(aten.slice_scatter.default, source.all_input_nodes[0], part, *bounds)


def _is_scattered_at(node: Node, bounds: tuple[Any, ...]) -> bool:
    return node.target is aten.slice_scatter.default and node.args[2:] == bounds


def _slice_backward(
    writer: GraphWriter,
    node: Node,
    grad_output: Node,
    sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> Node:
    size, dim = sizes[dim], dim % len(sizes)
    if step != 1:
        grad_output = _dilate(writer, grad_output, dim, step)
    begin = start % size if start < 0 else min(start, size)
    rest = size - begin - shape_of(grad_output)[dim]
    if not (begin or rest):
        return grad_output
    padding = [0, 0] * (len(sizes) - 1 - dim) + [begin, rest]
    return writer.call(aten.constant_pad_nd.default, grad_output, padding, 0.0)


def _dilate(writer: GraphWriter, source: Node, dim: int, step: int) -> Node:
    """Insert zeros between the entries of a dimension, and none after the last one."""
    shape = list(shape_of(source))
    inner = shape[dim + 1 :]
    separate = writer.reshape(source, [*shape[: dim + 1], 1, *inner])
    padded = writer.call(aten.constant_pad_nd.default, separate, [*[0, 0] * len(inner), 0, step - 1], 0.0)
    dilated = writer.reshape(padded, [*shape[:dim], shape[dim] * step, *inner])
    return writer.call(aten.slice.Tensor, dilated, dim, 0, (shape[dim] - 1) * step + 1)


# Concatenation


def _cat(writer: GraphWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> Node | None:
    """Drop empty parts, which partial rotary embeddings leave and XNNPACK doesn't accept."""
    filled = [part for part in parts if part.meta["val"].numel()]
    if len(filled) == len(parts):
        return None
    return filled[0] if len(filled) == 1 else writer.call(aten.cat.default, filled, dim)


def _stack(writer: GraphWriter, node: Node, parts: Sequence[Node], dim: int = 0) -> Node:
    shape = list(shape_of(node))
    shape[dim] = 1
    return writer.call(aten.cat.default, [writer.reshape(part, shape) for part in parts], dim)


def _slice_scatter(
    writer: GraphWriter,
    node: Node,
    source: Node,
    part: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node | None:
    """Concatenate what precedes the written part, the part, and what follows it."""
    size = shape_of(source)[dim]
    begin, rest, _ = slice(start, end).indices(size)
    if step != 1:
        return None
    parts = [part]
    if begin > 0:
        parts = [writer.call(aten.slice.Tensor, source, dim, 0, begin), *parts]
    if rest < size:
        parts = [*parts, writer.call(aten.slice.Tensor, source, dim, rest, size)]
    return part if len(parts) == 1 else writer.call(aten.cat.default, parts, dim)


def _copy(writer: GraphWriter, node: Node, target: Node, source: Node, *_: Any) -> Node | None:
    values = (target.meta["val"], source.meta["val"])
    return source if len({(value.shape, value.dtype) for value in values}) == 1 else None


def in_core(target: Any) -> Any:
    """Return the rule that writes another operator with the same arguments."""
    return lambda writer, node, *arguments, **_: writer.call(target, *arguments)


row(
    *(aten.alias.default, aten.detach.default, aten.dropout.default, aten.lift_fresh_copy.default),
    category=Category.IDENTITY,
)
row(
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default),
    *(aten.contiguous.default, aten.clone.default),
    category=Category.CAST,
)
row(aten.to.other, aten.type_as.default, category=Category.CAST_LIKE)

row(aten.reshape.default, category=Category.RESHAPE, jvp=_reshape_jvp)
row(
    aten.view.default,
    category=Category.RESHAPE,
    jvp=_reshape_jvp,
    functional=_as_reshape,
    # Copies that only change strides are removed, which a view could not handle.
    backward=_as_reshape,
    # The engine's view has no requirements on strides.
    autograd=aten.reshape.default,
)
row(aten._unsafe_view.default, category=Category.RESHAPE, functional=_as_reshape, backward=_as_reshape)
row(
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints),
    category=Category.SQUEEZE,
    rewrite=_as_reshape,
)

row(aten.transpose.int, category=Category.PERMUTE, jvp=linear_jvp(0, 1), core=_transpose_in_core)
row(
    aten.permute.default,
    category=Category.PERMUTE,
    jvp=_permute_jvp,
    core=in_core(aten.permute_copy.default),
    functional=_cancel_permutations,
)
row(
    aten.t.default,
    category=Category.PERMUTE,
    jvp=_matrix_transpose_jvp,
    core=lambda writer, node, x: writer.call(aten.permute_copy.default, x, [1, 0]),
)
row(aten.numpy_T.default, category=Category.PERMUTE)
row(aten.flip.default, category=Category.SELECT, jvp=linear_jvp(0))

row(
    aten.expand.default,
    category=Category.EXPAND,
    jvp=_expand_jvp,
    core=in_core(aten.expand_copy.default),
)
row(aten.expand_as.default, category=Category.EXPAND_LIKE, rewrite=_expand_as)
row(aten.repeat.default, category=Category.REPEAT, jvp=_repeat_jvp, rewrite=_repeat)
row(aten.repeat_interleave.self_int, category=Category.REPEAT)

row(
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int),
    category=Category.SPLIT,
)
row(
    operator.getitem,
    category=Category.SELECT,
    jvp=lambda t, node, source, index: source[index],
    rewrite=_part_of_a_split,
)
row(aten.select.int, category=Category.SELECT, rewrite=_select)
row(
    aten.slice.Tensor,
    category=Category.SELECT,
    jvp=linear_jvp(0),
    core=in_core(aten.slice_copy.Tensor),
    functional=_slice_of_scattered,
)
row(aten.slice_backward.default, category=Category.GRADIENT, backward=_slice_backward)

row(aten.cat.default, category=Category.JOIN, jvp=_cat_jvp, rewrite=_cat)
row(aten.stack.default, category=Category.JOIN, rewrite=_stack)
row(aten.constant_pad_nd.default, category=Category.JOIN, jvp=_pad_jvp)
row(aten.copy.default, category=Category.JOIN, functional=_copy)
row(aten.slice_scatter.default, category=Category.JOIN, rewrite=_slice_scatter, functional=_scatter_again)
