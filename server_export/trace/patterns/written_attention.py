"""Attention that a model writes itself, in the form of server_export.trace.attention, in place.

    softmax((q [r h t w]) (k^T [r h w t]) + mask [1 1 t t])     with a change of shape around each product
    softmax((q [rh t w]) (k [rh t w])^T + mask [t t])           with none between the products
    softmax(scores) v, softmax(scores) w                        softmax(scores) [v, w]

Of unknown sizes a change of the scores' shape would leave the delegate.
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
from server_export.ir.walks import ancestors, origin
from server_export.ir.writer import GraphWriter
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten

_RESHAPES = members(Category.RESHAPE)
# What is computed of each score by itself, the last ones with another number.
_ALONE = (aten.tanh.default, aten.softmax.int, aten.clone.default)
_WITH = members(Category.ARITHMETIC)


def join_heads(graph_module: GraphModule) -> None:
    """Let rows and heads be one dimension between the two products of an attention, in place."""
    writer = GraphWriter(graph_module)
    for product in graph_module.graph.find_nodes(op="call_function", target=aten.bmm.default):
        scores = _taken_apart(product)
        chain = _chain(scores) if scores is not None else None
        if scores is not None and chain:
            _transpose_joined(writer, product)
            _join(writer, scores, chain)
    for softmax in graph_module.graph.find_nodes(op="call_function", target=aten.softmax.int):
        _leave_joined(softmax, softmax)
    _join_values(writer)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _join_values(writer: GraphWriter) -> None:
    """Let one product mix all values that equal scores weigh."""
    graph = writer.graph_module.graph
    if len(graph.find_nodes(op="call_function", target=aten.softmax.int)) > 1:
        share_equal_calls(graph)
    for softmax in graph.find_nodes(op="call_function", target=aten.softmax.int):
        products = [user for user in softmax.users if user.target is aten.bmm.default]
        if len(products) > 1 and _put_before(products[0], [product.args[1] for product in products]):
            writer.replace(products[0], _mixed, softmax, products)


def _put_before(node: Node, values: Sequence[Any]) -> bool:
    """Move what makes some values in front of a node, in place; False if they depend on it."""
    needed = ancestors(values)
    if node in needed:
        return False
    behind = [*node.graph.nodes]
    for value in behind[behind.index(node) :]:
        if value in needed:
            node.prepend(value)
    return True


def _mixed(writer: GraphWriter, softmax: Node, products: Sequence[Any]) -> Node:
    values = [product.args[1] for product in products]
    mixed = writer.call(aten.bmm.default, softmax, writer.call(aten.cat.default, values, 2))
    parts, start = [], 0
    for product, value in zip(products, values, strict=True):
        end = start + _shape(value)[2]
        parts.append(writer.call(aten.slice.Tensor, mixed, 2, start, end))
        product.replace_all_uses_with(parts[-1])
        start = end
    return parts[0]


def _shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)


def _leave_joined(node: Node, softmax: Node) -> None:
    """Leave out changes of shape behind a softmax that end in its own."""
    for user in [*node.users]:
        if user.target in _RESHAPES:
            _leave_joined(user, softmax)
            if _shape(user) == _shape(softmax):
                user.replace_all_uses_with(softmax)


def _taken_apart(product: Node) -> Node | None:
    """Where a product gets a dimension for rows and one for heads, after what is computed of each number."""
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        if _is_apart(user):
            return user
        if user.target not in (*_ALONE[:1], *_WITH) or _shape(user) != _shape(product):
            return None
        node = user
    return None


def _is_apart(node: Node) -> bool:
    """Whether it gives rows and heads a dimension each."""
    if node.target not in _RESHAPES:
        return False
    before, behind = _shape(node.args[0]), _shape(node)
    return len(behind) == 4 and [behind[0] * behind[1], *behind[2:]] == before


def _chain(scores: Node) -> list[Node] | None:
    """What is computed of scores until rows and heads are one dimension again; None if it isn't known."""
    found, node = list[Node](), scores
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function":
            return None
        if user.target in _RESHAPES:
            shape = _shape(scores)
            joined = [shape[0] * shape[1], *shape[2:]]
            return [*found, user] if found and _shape(user) == joined else None
        others = [each for each in user.all_input_nodes if each is not node]
        if _shape(user) != _shape(scores) or user.target not in (*_ALONE, *_WITH):
            return None
        if user.target is aten.softmax.int and user.args[1] not in (-1, 3):
            return None
        if any(_joined_shape(_shape(each), _shape(scores)) is None for each in others):
            return None
        found.append(user)
        node = user
    return None


def _joined_shape(shape: Sequence[int], scores: Sequence[int]) -> list[int] | None:
    """The shape of what meets scores [rows, heads, ...], beside joined ones; None if it can't be."""
    if len(shape) < 3:
        return [*shape]
    rows, heads = ([1] * (4 - len(shape)) + [*shape])[:2]
    if heads == 1 and rows in (1, scores[0]):
        return [*shape[-2:]] if rows == 1 else [scores[0] * scores[1], *shape[-2:]]
    return [rows * heads, *shape[-2:]] if (rows, heads) == tuple(scores[:2]) else None


def _transpose_joined(writer: GraphWriter, product: Node) -> None:
    """Let keys be transposed after rows and heads were joined."""
    keys: Any = product.args[1]
    apart: Any = keys.args[0] if keys.target in _RESHAPES else keys
    if len(_shape(apart)) != 4:
        return

    def write(writer: GraphWriter) -> Node:
        rows, heads, width, length = _shape(apart)
        joined = writer.reshape(_turned(writer, apart), [rows * heads, length, width])
        return writer.call(aten.transpose.int, joined, 1, 2)

    writer.replace(keys, write)


def _turned(writer: GraphWriter, node: Any) -> Any:
    """A value whose last two of four dimensions change places."""
    if node.target is aten.transpose.int and {dim % 4 for dim in node.args[1:]} == {2, 3}:
        return node.args[0]
    if node.target is aten.permute.default:
        first, second, third, last = node.args[1]
        order = [first, second, last, third]
        source = node.args[0]
        return source if order == [0, 1, 2, 3] else writer.call(aten.permute.default, source, order)
    if node.target is aten.expand.default and len(_shape(node.args[0])) == 4:
        rows, heads, third, last = _shape(node)
        return writer.call(aten.expand.default, _turned(writer, node.args[0]), [rows, heads, last, third])
    return writer.call(aten.transpose.int, node, 2, 3)


def _is_causal(value: Any) -> bool:
    """Whether it is a mask, whose numbers are 0 or hide a score."""
    value, _ = origin(value, _RESHAPES)
    is_table = is_input(value, TABLE)
    return is_table and _shape(value)[1] == _shape(value)[2]


def _join(writer: GraphWriter, apart: Node, chain: Sequence[Node]) -> None:
    joined: Any = apart.args[0]
    scores, made = _shape(apart), {apart: joined}

    def other(writer: GraphWriter, value: Any) -> Any:
        """A mask or a number, in the shape that meets joined scores."""
        if not isinstance(value, Node) or value in made:
            return made.get(value, value)
        shape = _joined_shape(_shape(value), scores)
        assert shape is not None
        if len(_shape(value)) > 3 and len(shape) == 3 and _shape(value)[1] == 1:
            value = writer.call(aten.expand.default, value, [*scores[:2], *shape[1:]])
        value, _ = origin(value, _RESHAPES)
        return value if _shape(value) == shape else writer.reshape(value, shape)

    def hidden(writer: GraphWriter, answer: Node, masks: Sequence[Node]) -> Node:
        for mask in masks:
            answer = writer.plus(answer, mask)
        return answer

    def write(writer: GraphWriter) -> Node:
        answer, masks = joined, list[Node]()
        for node in chain[:-1]:
            first, *rest = (other(writer, value) for value in node.args)
            if node.target is aten.add.Tensor and rest[0] is answer:
                first, rest = answer, [first]
            if node.target is aten.softmax.int:
                first, rest = hidden(writer, answer, masks), [-1]
                masks = []
            elif node.target is aten.add.Tensor and _is_causal(rest[0]):
                # What is hidden stays hidden when it is scaled: scores are scaled before.
                masks.append(rest[0])
                made[node] = answer
                continue
            answer = made[node] = writer.call(node.target, first, *rest)
        return hidden(writer, answer, masks)

    writer.replace(chain[-1], write)


register(
    Pattern(
        "written attention",
        serves="models that write the products of their attention themselves",
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
