"""Scores of attention in a graph: what reads a mask or bias, and the products that scores come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators import Category, members
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

# Scores that are this low are hidden.
HIDDEN = -1e4
LAYOUTS = {
    *members(Category.IDENTITY, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.to.dtype, aten.clone.default),
}
PRODUCTS = {aten.matmul.default, aten.bmm.default}
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


def readers_of(node: Node, known: Known) -> Iterator[Node]:
    """What reads a value, or another shape of it, and depends on more than positions."""
    for user in [*node.users]:
        if user.target is aten._assert_tensor_metadata.default:
            continue
        if known(user) is None:
            yield user
        elif user.target in LAYOUTS:
            yield from readers_of(user, known)


def wider_product(writer: GraphWriter, product: Any, own: Node, given: Node) -> Node:
    """A product of queries and keys that have one more number each, [..., tokens, 1]."""
    query, keys = product.args
    both = writer.call(aten.cat.default, [writer.call(aten.transpose.int, keys, -1, -2), given], -1)
    wide = writer.call(aten.cat.default, [query, own], -1)
    return writer.call(product.target, wide, writer.call(aten.transpose.int, both, -1, -2))


def product_of(scores: Node, known: Known) -> tuple[Node, float] | None:
    """The product that scores come from, and what they are scaled with."""
    node, scale = scores, 1.0
    while node.target not in PRODUCTS:
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
            scale = scale * node.args[1] if node.target is aten.mul.Tensor else scale / node.args[1]
        elif node.target not in (*LAYOUTS, aten.add.Tensor):
            return None
        sources = unknown_inputs(node, known)
        if len(sources) != 1:
            return None
        (node,) = sources
    query, keys = (each.meta["val"] for each in node.all_input_nodes)
    return (node, scale) if query.shape[:-2] == keys.shape[:-2] else None


def unknown_inputs(node: Node, known: Known) -> list[Node]:
    """What a node reads that depends on more than positions."""
    return [each for each in node.all_input_nodes if known(each) is None]
