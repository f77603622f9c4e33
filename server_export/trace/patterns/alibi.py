"""ALiBi: biases that depend on the position of the key become one more element of queries and keys.

q k^T + slope * position        [q, slope] [k, position]^T
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
from server_export.trace.position_folding import shape_of_one_row
from server_export.trace.scores import Known, product_of, readers_of, unknown_inputs, wider_product
from server_export.trace.tables import ModelTable, insert_table

aten = torch.ops.aten

# The number of positions that a model computes biases for; the rows use the last ones.
_BIASES = "max_seq_len"


@contextmanager
def biases_of_one_row(config: Any, tokens: int) -> Iterator[None]:
    """Let a model compute its biases for exactly one row while it is traced."""
    original = getattr(config, _BIASES, None)
    try:
        if original is not None:
            setattr(config, _BIASES, tokens)
        yield
    finally:
        if original is not None:
            setattr(config, _BIASES, original)


def write_alibi(graph: ModelGraph) -> None:
    """Replace biases by the positions of keys, in place."""
    writer, tables, known = GraphWriter(graph.graph_module), graph.tables, graph.positions.known
    for node in [*graph.positions.ends]:
        shape = shape_of_one_row(node)
        if shape[-1:] != [TOKENS] or sum(size % TOKENS == 0 for size in shape) == 2:
            continue
        value = known(node)
        is_bias = value is not None and value.dtype == torch.float32 and value.numel() > tables.longest
        factors = slopes_and_positions(value) if value is not None and is_bias else None
        if factors is None:
            continue
        slopes, key_positions = factors
        table = ModelTable("rotary", values=key_positions.reshape(-1, 1))
        key = ("positions of keys", key_positions.numpy().tobytes())

        def positions_before(before: Node, key: Any = key, table: ModelTable = table) -> Node:
            return insert_table(before, tables, key, table, [1, TOKENS, 1], torch.float32)

        if append_positions(writer, node, known, slopes, positions_before):
            graph.positions.ends.remove(node)


def slopes_and_positions(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Factor a bias [..., heads, ..., length] into slopes [heads] and positions [length], or return None.

    A constant that all keys of a head share is dropped, because the softmax doesn't depend on it.
    """
    table = value.reshape(-1, value.shape[-1])
    table = table - table[:, :1]
    slopes = table[:, 1]
    if not bool(slopes.any()):
        return None
    head = int(slopes.abs().argmax())
    positions = table[head] / slopes[head]
    positions = positions.round() if torch.allclose(positions, positions.round(), atol=1e-4) else positions
    return (slopes, positions) if torch.allclose(slopes[:, None] * positions, table, rtol=1e-5) else None


def append_positions(
    writer: GraphWriter, node: Node, known: Known, slopes: torch.Tensor, positions: Callable[[Node], Node]
) -> bool:
    """Append positions to keys and slopes to queries, instead of adding a bias to the scores.

    Args:
        writer: writes into the graph.
        node: the bias.
        known: returns values of nodes.
        slopes: f32 [heads].
        positions: writes a table f32 [1, tokens, 1] before a node.

    Returns:
        Whether all users of the bias were rewritten.
    """
    readers = [*readers_of(node, known)]
    if not readers or any(user.target is not aten.add.Tensor for user in readers):
        return False
    scores = [unknown_inputs(user, known)[0] for user in readers]
    products = [product_of(each, known) for each in scores]
    if None in products:
        return False
    for user, each, product_and_scale in zip(readers, scores, products, strict=True):
        assert product_and_scale is not None
        product, scale = product_and_scale
        user.replace_all_uses_with(each)
        user.graph.erase_node(user)
        writer.replace(product, _append_to_product, product, slopes / scale, positions)
    return True


def _append_to_product(
    writer: GraphWriter, product: Node, slopes: torch.Tensor, positions: Callable[[Node], Node]
) -> Node:
    """Write a product of queries with slopes and keys with positions."""
    query: Any = product.args[0]
    *lead, tokens, _ = query.meta["val"].shape
    column = [math.prod(lead) // len(slopes), len(slopes), tokens, 1]
    slope = writer.constant(slopes.reshape(1, -1, 1, 1))
    position = writer.reshape(positions(product), [1, 1, tokens, 1])
    elements = [writer.call(aten.expand.default, each, column) for each in (slope, position)]
    return wider_product(writer, product, *(writer.reshape(each, [*lead, tokens, 1]) for each in elements))


register(
    Pattern(
        "positions of keys",
        serves="decoders with ALiBi: bloom, mpt, falcon",
        model_types=("bloom", "mpt"),
        example="bloom",
        settings=(_BIASES,),
        tracing=lambda traced: biases_of_one_row(traced.model.config, TOKENS),
        rewrites=(Rewrite(write_alibi, "tables", of="decoder"),),
    )
)
