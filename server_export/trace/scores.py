"""Attention scores in a graph: the users of a mask or bias, and the products that compute the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators import Category, members
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

# Scores at most this large count as masked.
HIDDEN = -1e4
LAYOUTS = {
    *members(Category.IDENTITY, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.to.dtype, aten.clone.default),
}
PRODUCTS = {aten.matmul.default, aten.bmm.default}
# Returns the value of a node that depends on positions alone, and None for any other node.
Known = Callable[[Any], torch.Tensor | None]


def causal_window(hidden: torch.Tensor) -> int | None:
    """Return the window of a causal mask bool [..., length, length], or the length if there is none.

    The result is None if the mask isn't causal.
    """
    length = hidden.shape[-1]
    if hidden.numel() != length**2:
        return None
    hidden = hidden.reshape(length, length)
    window = int((~hidden[-1]).sum())
    positions = torch.arange(length)
    expected = (positions[:, None] < positions) | (positions[:, None] - positions >= window)
    return window if torch.equal(hidden, expected) else None


def readers_of(node: Node, known: Known) -> Iterator[Node]:
    """Yield the users of a value, through changes of its layout, that depend on more than positions."""
    for user in [*node.users]:
        if user.target is aten._assert_tensor_metadata.default:
            continue
        if known(user) is None:
            yield user
        elif user.target in LAYOUTS:
            yield from readers_of(user, known)


def wider_product(writer: GraphWriter, product: Any, query_element: Node, key_element: Node) -> Node:
    """Write a product of queries and keys that each have one more element, [..., tokens, 1]."""
    query, keys = product.args
    wide_keys = writer.call(
        aten.cat.default, [writer.call(aten.transpose.int, keys, -1, -2), key_element], -1
    )
    wide_query = writer.call(aten.cat.default, [query, query_element], -1)
    return writer.call(product.target, wide_query, writer.call(aten.transpose.int, wide_keys, -1, -2))


def product_of(scores: Node, known: Known) -> tuple[Node, float] | None:
    """Return the matrix product that computes the scores, and the factor by which the scores are scaled."""
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
    """Return the inputs of a node that depend on more than positions."""
    return [each for each in node.all_input_nodes if known(each) is None]
