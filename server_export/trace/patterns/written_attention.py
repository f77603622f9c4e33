"""Attention that models write themselves, rewritten to the form of server_export.trace.attention.

    softmax((q [r h t w]) (k^T [r h w t]) + mask [1 1 t t])     with a reshape around each product
    softmax((q [rh t w]) (k [rh t w])^T + mask [t t])           without reshapes between the products
    softmax(scores) v, softmax(scores) w                        softmax(scores) [v, w]

A reshape of scores of dynamic size would leave the delegate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from prge.formats.signatures import TABLE
from server_export.ir.block import is_input
from server_export.ir.operators import Category, members
from server_export.ir.rewriting import share_equal_calls
from server_export.ir.traversal import ancestors, origin
from server_export.ir.writer import GraphWriter
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten

_RESHAPES = members(Category.RESHAPE)
# Operators on each score; those of the second tuple have another operand.
_UNARY = (aten.tanh.default, aten.softmax.int, aten.clone.default)
_BINARY = members(Category.ARITHMETIC)


def join_heads(graph_module: GraphModule) -> None:
    """Merge rows and heads into one dimension between the two products of an attention, in place."""
    writer = GraphWriter(graph_module)
    for product in graph_module.graph.find_nodes(op="call_function", target=aten.bmm.default):
        scores = _split_into_heads(product)
        chain = _chain(scores) if scores is not None else None
        if scores is not None and chain:
            _transpose_joined(writer, product)
            _join(writer, scores, chain)
    for softmax in graph_module.graph.find_nodes(op="call_function", target=aten.softmax.int):
        _drop_reshapes(softmax, softmax)
    _join_values(writer)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _join_values(writer: GraphWriter) -> None:
    """Compute products of equal attention weights with several values as one product."""
    graph = writer.graph_module.graph
    if len(graph.find_nodes(op="call_function", target=aten.softmax.int)) > 1:
        share_equal_calls(graph)
    for softmax in graph.find_nodes(op="call_function", target=aten.softmax.int):
        products = [user for user in softmax.users if user.target is aten.bmm.default]
        if len(products) > 1 and _move_before(products[0], [product.args[1] for product in products]):
            writer.replace(products[0], _product_with_all, softmax, products)


def _move_before(node: Node, values: Sequence[Any]) -> bool:
    """Move the nodes that compute some values before a node, in place; return False if they depend on it."""
    needed = ancestors(values)
    if node in needed:
        return False
    order = [*node.graph.nodes]
    for value in order[order.index(node) :]:
        if value in needed:
            node.prepend(value)
    return True


def _product_with_all(writer: GraphWriter, softmax: Node, products: Sequence[Any]) -> Node:
    values = [product.args[1] for product in products]
    whole_product = writer.call(aten.bmm.default, softmax, writer.call(aten.cat.default, values, 2))
    slices, start = [], 0
    for product, value in zip(products, values, strict=True):
        end = start + _shape(value)[2]
        slices.append(writer.call(aten.slice.Tensor, whole_product, 2, start, end))
        product.replace_all_uses_with(slices[-1])
        start = end
    return slices[0]


def _shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)


def _drop_reshapes(node: Node, softmax: Node) -> None:
    """Remove reshapes after a softmax that end in its own shape."""
    for user in [*node.users]:
        if user.target in _RESHAPES:
            _drop_reshapes(user, softmax)
            if _shape(user) == _shape(softmax):
                user.replace_all_uses_with(softmax)


def _split_into_heads(product: Node) -> Node | None:
    """Return the reshape that splits a product into rows and heads, after elementwise operators."""
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        if _splits_heads(user):
            return user
        if user.target not in (*_UNARY[:1], *_BINARY) or _shape(user) != _shape(product):
            return None
        node = user
    return None


def _splits_heads(node: Node) -> bool:
    """Return whether a node reshapes a merged dimension into rows and heads."""
    if node.target not in _RESHAPES:
        return False
    before, after = _shape(node.args[0]), _shape(node)
    return len(after) == 4 and [after[0] * after[1], *after[2:]] == before


def _chain(scores: Node) -> list[Node] | None:
    """Return the operators on scores until rows and heads are merged, or None if one of them is unknown."""
    operators, node = list[Node](), scores
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function":
            return None
        if user.target in _RESHAPES:
            shape = _shape(scores)
            joined = [shape[0] * shape[1], *shape[2:]]
            return [*operators, user] if operators and _shape(user) == joined else None
        others = [each for each in user.all_input_nodes if each is not node]
        if _shape(user) != _shape(scores) or user.target not in (*_UNARY, *_BINARY):
            return None
        if user.target is aten.softmax.int and user.args[1] not in (-1, 3):
            return None
        if any(_joined_shape(_shape(each), _shape(scores)) is None for each in others):
            return None
        operators.append(user)
        node = user
    return None


def _joined_shape(shape: Sequence[int], scores: Sequence[int]) -> list[int] | None:
    """Return the shape in which an operand of scores [rows, heads, ...] meets merged scores, or None."""
    if len(shape) < 3:
        return [*shape]
    rows, heads = ([1] * (4 - len(shape)) + [*shape])[:2]
    if heads == 1 and rows in (1, scores[0]):
        return [*shape[-2:]] if rows == 1 else [scores[0] * scores[1], *shape[-2:]]
    return [rows * heads, *shape[-2:]] if (rows, heads) == tuple(scores[:2]) else None


def _transpose_joined(writer: GraphWriter, product: Node) -> None:
    """Transpose keys after rows and heads have been merged, instead of before."""
    keys: Any = product.args[1]
    separate: Any = keys.args[0] if keys.target in _RESHAPES else keys
    if len(_shape(separate)) != 4:
        return

    def write(writer: GraphWriter) -> Node:
        rows, heads, width, length = _shape(separate)
        joined = writer.reshape(_transpose_last(writer, separate), [rows * heads, length, width])
        return writer.call(aten.transpose.int, joined, 1, 2)

    writer.replace(keys, write)


def _transpose_last(writer: GraphWriter, node: Any) -> Any:
    """Swap the last two of four dimensions."""
    if node.target is aten.transpose.int and {dim % 4 for dim in node.args[1:]} == {2, 3}:
        return node.args[0]
    if node.target is aten.permute.default:
        first, second, third, last = node.args[1]
        order = [first, second, last, third]
        source = node.args[0]
        return source if order == [0, 1, 2, 3] else writer.call(aten.permute.default, source, order)
    if node.target is aten.expand.default and len(_shape(node.args[0])) == 4:
        rows, heads, third, last = _shape(node)
        return writer.call(
            aten.expand.default, _transpose_last(writer, node.args[0]), [rows, heads, last, third]
        )
    return writer.call(aten.transpose.int, node, 2, 3)


def _is_causal(value: Any) -> bool:
    """Return whether a value is a mask table, whose elements are 0 or hide a score."""
    value, _ = origin(value, _RESHAPES)
    is_table = is_input(value, TABLE)
    return is_table and _shape(value)[1] == _shape(value)[2]


def _join(writer: GraphWriter, separate: Node, chain: Sequence[Node]) -> None:
    joined: Any = separate.args[0]
    scores, replacements = _shape(separate), {separate: joined}

    def operand(writer: GraphWriter, value: Any) -> Any:
        """Return a mask or a number in the shape that broadcasts against merged scores."""
        if not isinstance(value, Node) or value in replacements:
            return replacements.get(value, value)
        shape = _joined_shape(_shape(value), scores)
        assert shape is not None
        if len(_shape(value)) > 3 and len(shape) == 3 and _shape(value)[1] == 1:
            value = writer.call(aten.expand.default, value, [*scores[:2], *shape[1:]])
        value, _ = origin(value, _RESHAPES)
        return value if _shape(value) == shape else writer.reshape(value, shape)

    def add_masks(writer: GraphWriter, result: Node, masks: Sequence[Node]) -> Node:
        for mask in masks:
            result = writer.plus(result, mask)
        return result

    def write(writer: GraphWriter) -> Node:
        result, masks = joined, list[Node]()
        for node in chain[:-1]:
            first, *rest = (operand(writer, value) for value in node.args)
            if node.target is aten.add.Tensor and rest[0] is result:
                first, rest = result, [first]
            if node.target is aten.softmax.int:
                first, rest = add_masks(writer, result, masks), [-1]
                masks = []
            elif node.target is aten.add.Tensor and _is_causal(rest[0]):
                # Masks are added after scaling, because a scaled mask hides the same scores.
                masks.append(rest[0])
                replacements[node] = result
                continue
            result = replacements[node] = writer.call(node.target, first, *rest)
        return add_masks(writer, result, masks)

    writer.replace(chain[-1], write)


register(
    Pattern(
        "written attention",
        serves="models that compute the products of their attention themselves",
        model_types=tuple(
            """
            big_bird bloom codegen cohere2_moe convbert deepseek_v2 diffllama falcon git gpt_neo
            gpt_neox_japanese gptj hrm_text layoutlm luke megatron-bert mpnet mpt nystromformer phimoe
            rembert roformer tapas trocr xglm
            """.split()
        ),
        example="bloom",
        rewrites=(Rewrite(join_heads, "block", operators=(aten.softmax.int, aten.bmm.default)),),
    )
)
