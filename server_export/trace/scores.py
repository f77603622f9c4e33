"""What a model computes of positions for scores of attention, in the form that blocks know.

    max(scores, least)                              scores
    where(seen, scores, least), masked_fill(scores, hidden, least), scores * seen + mask      scores + mask
    q k^T + slope * place                           [q, slope] [k, place]^T, as with ALiBi
    q k^T + a number of each key                    [q, 1] [k, number]^T

So a place comes with the key that it belongs to, wherever that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.operators import Category, members
from server_export.ir.shapes import resized
from server_export.ir.walks import origin
from server_export.ir.writer import Writer

aten = torch.ops.aten

# Scores that are this low are hidden.
HIDDEN = -1e4
_LAYOUTS = {
    *members(Category.IDENTITY, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.to.dtype, aten.clone.default),
}
_LARGER = {aten.maximum.default, aten.max.other}
_PRODUCTS = {aten.matmul.default, aten.bmm.default}
# The numbers of a node that depends on positions alone; None of any other.
Known = Callable[[Any], torch.Tensor | None]


def causal_window(hidden: torch.Tensor) -> int | None:
    """The window of what a causal mask hides, bool [..., length, length]; the length if it has none."""
    length = hidden.shape[-1]
    if hidden.numel() != length**2:
        return None
    hidden = hidden.reshape(length, length)
    window = int((~hidden[-1]).sum())
    places = torch.arange(length)
    expected = (places[:, None] < places) | (places[:, None] - places >= window)
    return window if torch.equal(hidden, expected) else None


def add_masks(writer: Writer, node: Node, known: Known, mask: Callable[[Node, int], Node]) -> bool:
    """Hide by a sum what a mask of positions hides in another way, in place.

    Args:
        writer: of the graph.
        node: of a square of numbers.
        known: numbers of nodes.
        mask: writes a causal mask of a window before a node.

    Returns:
        Whether all that reads the node was written so.
    """
    value = known(node)
    assert value is not None
    readers = [*_readers(node, known)]
    hidden = [_hidden(user, value, known) for user in readers]
    windows = [None if each is None else causal_window(each) for each in hidden]
    for user, window in zip(readers, windows, strict=True):
        if window is None:
            continue
        scores, behind = _scores(user), [*user.users]
        if user.target is not aten.mul.Tensor:
            scores = mask(user, window)
            with user.graph.inserting_before(user):
                scores = user.graph.call_function(aten.add.Tensor, (_scores(user), scores))
            scores.meta = dict(user.meta)
        user.replace_all_uses_with(scores)
        user.graph.erase_node(user)
        if user.target is not aten.mul.Tensor:
            _drop_wider(scores, behind, window, known)
    return bool(windows) and None not in windows


def drop_least(node: Node, known: Known) -> bool:
    """Leave out, in place, where the larger of scores and the least number is taken; whether that was all."""
    value = known(node)
    least = torch.finfo(torch.float32).min
    readers = [*_readers(node, known)]
    if (
        value is None
        or not bool((value == least).all())
        or any(user.target not in _LARGER for user in readers)
    ):
        return False
    for user in readers:
        (scores,) = (each for each in user.all_input_nodes if known(each) is None)
        user.replace_all_uses_with(scores)
        user.graph.erase_node(user)
    return True


def _drop_wider(masked: Node, behind: list[Node], window: int, known: Known) -> None:
    """Leave out a mask that is added once more and hides nothing else, in place."""
    for user in behind:
        if user.target is not aten.add.Tensor:
            continue
        others = [known(each) for each in user.all_input_nodes if each is not masked]
        if len(others) == 1 and others[0] is not None:
            wider = causal_window(others[0] <= HIDDEN)
            if wider is not None and wider >= window and not bool((others[0] > 0).any()):
                user.replace_all_uses_with(masked)
                user.graph.erase_node(user)


def _readers(node: Node, known: Known) -> Iterator[Node]:
    """What reads a value, or another shape of it, and depends on more than positions."""
    for user in [*node.users]:
        if user.target is aten._assert_tensor_metadata.default:
            continue
        if known(user) is None:
            yield user
        elif user.target in _LAYOUTS:
            yield from _readers(user, known)


def _scores(user: Node) -> Any:
    first, second, *_ = user.args
    is_behind = user.target is aten.where.self or (
        user.target is aten.mul.Tensor and _is_square(second) > _is_square(first)
    )
    return second if is_behind else first


def _is_square(value: Any) -> int:
    """How many numbers a value has."""
    return int(value.meta["val"].numel()) if isinstance(value, Node) else 0


def _hidden(user: Node, value: torch.Tensor, known: Known) -> torch.Tensor | None:
    """Which scores a reader of a mask hides; None if it does something else."""
    if user.target is aten.where.self and known(user.args[1]) is None:
        least = known(user.args[2])
        return value == 0 if least is not None and bool((least <= HIDDEN).all()) else None
    if user.target is aten.masked_fill.Scalar:
        return value != 0 if user.args[2] <= HIDDEN else None
    if user.target is aten.mul.Tensor and len(user.users) == 1:
        (later,) = user.users
        others = [known(each) for each in later.all_input_nodes if each is not user]
        masks = [each <= HIDDEN for each in others if each is not None]
        is_share = bool(((value == 0) | (value == 1)).all())
        if later.target is aten.add.Tensor and is_share and len(masks) == 1:
            return masks[0] if torch.equal(masks[0].reshape(value.shape), value == 0) else None
    return None


def slopes_and_places(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of a bias [..., heads, ..., length] the slopes [heads] and places [length] that it is the product of.

    What all keys of a head have in common goes: a softmax doesn't see it.
    """
    table = value.reshape(-1, value.shape[-1])
    table = table - table[:, :1]
    slopes = table[:, 1]
    if not bool(slopes.any()):
        return None
    head = int(slopes.abs().argmax())
    places = table[head] / slopes[head]
    places = places.round() if torch.allclose(places, places.round(), atol=1e-4) else places
    return (slopes, places) if torch.allclose(slopes[:, None] * places, table, rtol=1e-5) else None


def give_places(
    writer: Writer, node: Node, known: Known, slopes: torch.Tensor, places: Callable[[Node], Node]
) -> bool:
    """Let keys have their places, and queries the slopes, in place of a sum with a bias.

    Args:
        writer: of the graph.
        node: the bias.
        known: numbers of nodes.
        slopes: f32 [heads].
        places: writes a table f32 [1, tokens, 1] before a node.

    Returns:
        Whether all that reads the bias was written so.
    """
    readers = [*_readers(node, known)]
    if not readers or any(user.target is not aten.add.Tensor for user in readers):
        return False
    scores = [_unknown(user, known)[0] for user in readers]
    products = [_product(each, known) for each in scores]
    if None in products:
        return False
    for user, each, found in zip(readers, scores, products, strict=True):
        assert found is not None
        product, scale = found
        user.replace_all_uses_with(each)
        user.graph.erase_node(user)
        writer.replace(product, _with_places, product, slopes / scale, places)
    return True


def give_numbers(writer: Writer, known: Known) -> None:
    """Let keys have a number of their own that is added to their scores, in place.

    Args:
        writer: of the graph of a decoder.
        known: numbers of nodes.
    """
    graph = writer.graph_module.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    for user in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for value, scores in (user.args, user.args[::-1]):
            numbers = _of_each_key(value) if isinstance(value, Node) else None
            # Asked last, since a table that is known is made for the longest row.
            if numbers is None or not isinstance(scores, Node) or known(value) is not None:
                continue
            found = _product(scores, known)
            if found is not None and numbers in place and _meet(numbers, value, scores, found[0], place):
                user.replace_all_uses_with(scores)
                graph.erase_node(user)
                writer.replace(found[0], _with_numbers, *found, numbers)
                break


def _meet(numbers: Any, value: Any, scores: Node, product: Any, place: Mapping[Node, int]) -> bool:
    """Whether numbers are there before a product, one for each of its keys, and scores lie as it does."""
    if place[numbers] > place.get(product, -1):
        return False
    sizes = [each.meta["val"].numel() for each in (value, scores, product)]
    *lead, _, keys = product.args[1].meta["val"].shape
    lasts = {each.meta["val"].shape[-1] for each in (value, scores)}
    return len({*sizes}) == 1 and lasts == {keys} and numbers.meta["val"].numel() == math.prod(lead) * keys


def _of_each_key(value: Node) -> Node | None:
    """The numbers of keys that [..., queries, keys] repeats for all queries; None if it doesn't."""
    value, steps = origin(value, _LAYOUTS)

    def small(size: Any) -> Any:
        return resized(resized(resized(size, COPIES, 1), BATCH, 2), TOKENS, 3)

    shape = map_aggregate([*value.meta["val"].shape], small)
    found = numbers = torch.arange(math.prod(shape)).reshape(shape)
    for step in steps:
        target: Any = step.target
        found = target(found, *map_aggregate(step.args[1:], small), **step.kwargs)
    if found.dim() < 2 or found.shape[-2] == 1 or not bool((found == found[..., :1, :]).all()):
        return None
    return value if torch.equal(found[..., 0, :].reshape(-1).long(), numbers.reshape(-1)) else None


def _with_numbers(writer: Writer, product: Node, scale: float, numbers: Node) -> Node:
    """A product of queries, and keys with numbers of their own."""
    query, keys = (each.meta["val"] for each in product.all_input_nodes)
    one = writer.constant(torch.full([1] * query.dim(), 1 / scale))
    own = writer.call(aten.expand.default, one, [*query.shape[:-1], 1])
    return _wider(writer, product, own, writer.reshape(numbers, [*keys.shape[:-2], keys.shape[-1], 1]))


def _with_places(writer: Writer, product: Node, slopes: torch.Tensor, places: Callable[[Node], Node]) -> Node:
    """A product of queries with slopes, and keys with places."""
    query: Any = product.args[0]
    *lead, tokens, _ = query.meta["val"].shape
    column = [math.prod(lead) // len(slopes), len(slopes), tokens, 1]
    slope = writer.constant(slopes.reshape(1, -1, 1, 1))
    place = writer.reshape(places(product), [1, 1, tokens, 1])
    ends = [writer.call(aten.expand.default, each, column) for each in (slope, place)]
    return _wider(writer, product, *(writer.reshape(each, [*lead, tokens, 1]) for each in ends))


def _wider(writer: Writer, product: Any, own: Node, given: Node) -> Node:
    """A product of queries and keys that have one more number each, [..., tokens, 1]."""
    query, keys = product.args
    both = writer.call(aten.cat.default, [writer.call(aten.transpose.int, keys, -1, -2), given], -1)
    wide = writer.call(aten.cat.default, [query, own], -1)
    return writer.call(product.target, wide, writer.call(aten.transpose.int, both, -1, -2))


def _product(scores: Node, known: Known) -> tuple[Node, float] | None:
    """The product that scores come from, and what they are scaled with."""
    node, scale = scores, 1.0
    while node.target not in _PRODUCTS:
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
            scale = scale * node.args[1] if node.target is aten.mul.Tensor else scale / node.args[1]
        elif node.target not in (*_LAYOUTS, aten.add.Tensor):
            return None
        sources = _unknown(node, known)
        if len(sources) != 1:
            return None
        (node,) = sources
    query, keys = (each.meta["val"] for each in node.all_input_nodes)
    return (node, scale) if query.shape[:-2] == keys.shape[:-2] else None


def _unknown(node: Node, known: Known) -> list[Node]:
    """What a node reads that depends on more than positions."""
    return [each for each in node.all_input_nodes if known(each) is None]
