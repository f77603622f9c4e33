"""Biases that a decoder adds to the scores of each key: they become one more element of queries and keys.

q k^T + bias of each key        [q, 1] [k, bias]^T
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.shapes import resized
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.scores import LAYOUTS, product_of, wider_product

aten = torch.ops.aten


def write_key_biases(graph_of_model: ModelGraph) -> None:
    """Replace biases of keys by one more element of each key, in place."""
    writer, known = GraphWriter(graph_of_model.graph_module), graph_of_model.positions.known
    graph = writer.graph_module.graph
    position_of = {node: number for number, node in enumerate(graph.nodes)}
    for user in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for value, scores in (user.args, user.args[::-1]):
            biases = _bias_per_key(value) if isinstance(value, Node) else None
            # Checked last, because it evaluates the value for the longest row.
            if biases is None or not isinstance(scores, Node) or known(value) is not None:
                continue
            product_and_scale = product_of(scores, known)
            if (
                product_and_scale is not None
                and biases in position_of
                and _matches(biases, value, scores, product_and_scale[0], position_of)
            ):
                user.replace_all_uses_with(scores)
                graph.erase_node(user)
                writer.replace(product_and_scale[0], _append_to_product, *product_and_scale, biases)
                break


def _matches(biases: Any, value: Any, scores: Node, product: Any, position_of: Mapping[Node, int]) -> bool:
    """Return whether biases precede a product, have one element per key, and are laid out as its scores."""
    if position_of[biases] > position_of.get(product, -1):
        return False
    sizes = [each.meta["val"].numel() for each in (value, scores, product)]
    *lead, _, keys = product.args[1].meta["val"].shape
    last_sizes = {each.meta["val"].shape[-1] for each in (value, scores)}
    return (
        len({*sizes}) == 1 and last_sizes == {keys} and biases.meta["val"].numel() == math.prod(lead) * keys
    )


def _bias_per_key(value: Node) -> Node | None:
    """Return the biases of keys that [..., queries, keys] repeats for all queries, or None."""
    steps = list[Node]()
    while value.target in LAYOUTS:
        steps.insert(0, value)
        (value,) = value.all_input_nodes

    def small(size: Any) -> Any:
        return resized(resized(resized(size, COPIES, 1), BATCH, 2), TOKENS, 3)

    shape = map_aggregate([*value.meta["val"].shape], small)
    result = indices = torch.arange(math.prod(shape)).reshape(shape)
    for step in steps:
        target: Any = step.target
        result = target(result, *map_aggregate(step.args[1:], small), **step.kwargs)
    if result.dim() < 2 or result.shape[-2] == 1 or not bool((result == result[..., :1, :]).all()):
        return None
    return value if torch.equal(result[..., 0, :].reshape(-1).long(), indices.reshape(-1)) else None


def _append_to_product(writer: GraphWriter, product: Node, scale: float, biases: Node) -> Node:
    """Write a product of queries, and keys with their biases."""
    query, keys = (each.meta["val"] for each in product.all_input_nodes)
    one = writer.constant(torch.full([1] * query.dim(), 1 / scale))
    ones = writer.call(aten.expand.default, one, [*query.shape[:-1], 1])
    return wider_product(writer, product, ones, writer.reshape(biases, [*keys.shape[:-2], keys.shape[-1], 1]))


register(
    Pattern(
        "key biases",
        serves="decoders that add a bias of each key to its scores, such as Doge",
        model_types=("doge",),
        example="doge",
        rewrites=(Rewrite(write_key_biases, "positions", of="decoder"),),
    )
)
