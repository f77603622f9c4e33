"""Biases of scores by places, as with ALiBi: a place comes with its key, wherever that is kept.

q k^T + slope * place        [q, slope] [k, place]^T
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.markers import TOKENS
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.positional import of_one_row
from server_export.trace.scores import Known, product_of, readers_of, unknown_inputs, wider_product
from server_export.trace.tables import ModelTable, asked

aten = torch.ops.aten

# How many positions a model makes biases for, of which a row has the last.
_BIASES = "max_seq_len"


@contextmanager
def for_the_row(config: Any, tokens: int) -> Iterator[None]:
    """While a row of any length is traced, a model makes biases for that row alone."""
    own = getattr(config, _BIASES, None)
    try:
        if own is not None:
            setattr(config, _BIASES, tokens)
        yield
    finally:
        if own is not None:
            setattr(config, _BIASES, own)


def write_places(graph: ModelGraph) -> None:
    """Let keys have their places, in place of a sum with a bias."""
    writer, tables, known = GraphWriter(graph.graph_module), graph.tables, graph.positions.known
    for node in [*graph.positions.ends]:
        shape = of_one_row(node)
        if shape[-1:] != [TOKENS] or sum(size % TOKENS == 0 for size in shape) == 2:
            continue
        value = known(node)
        is_bias = value is not None and value.dtype == torch.float32 and value.numel() > tables.longest
        found = slopes_and_places(value) if value is not None and is_bias else None
        if found is None:
            continue
        slopes, numbers = found
        table = ModelTable("rotary", values=numbers.reshape(-1, 1))
        key = ("places", numbers.numpy().tobytes())

        def places(before: Node, key: Any = key, table: ModelTable = table) -> Node:
            return asked(before, tables, key, table, [1, TOKENS, 1], torch.float32)

        if give_places(writer, node, known, slopes, places):
            graph.positions.ends.remove(node)


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
    writer: GraphWriter, node: Node, known: Known, slopes: torch.Tensor, places: Callable[[Node], Node]
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
    readers = [*readers_of(node, known)]
    if not readers or any(user.target is not aten.add.Tensor for user in readers):
        return False
    scores = [unknown_inputs(user, known)[0] for user in readers]
    products = [product_of(each, known) for each in scores]
    if None in products:
        return False
    for user, each, found in zip(readers, scores, products, strict=True):
        assert found is not None
        product, scale = found
        user.replace_all_uses_with(each)
        user.graph.erase_node(user)
        writer.replace(product, _with_places, product, slopes / scale, places)
    return True


def _with_places(
    writer: GraphWriter, product: Node, slopes: torch.Tensor, places: Callable[[Node], Node]
) -> Node:
    """A product of queries with slopes, and keys with places."""
    query: Any = product.args[0]
    *lead, tokens, _ = query.meta["val"].shape
    column = [math.prod(lead) // len(slopes), len(slopes), tokens, 1]
    slope = writer.constant(slopes.reshape(1, -1, 1, 1))
    place = writer.reshape(places(product), [1, 1, tokens, 1])
    ends = [writer.call(aten.expand.default, each, column) for each in (slope, place)]
    return wider_product(writer, product, *(writer.reshape(each, [*lead, tokens, 1]) for each in ends))


register(
    Pattern(
        "places of keys",
        serves="decoders with ALiBi: bloom, mpt, falcon",
        model_types=("bloom", "mpt"),
        example="bloom",
        settings=(_BIASES,),
        tracing=lambda traced: for_the_row(traced.model.config, TOKENS),
        rewrites=(Rewrite(write_places, "tables", of="decoder"),),
    )
)
