"""Numbers of each key that a decoder adds to its scores: they become one more number of the key.

q k^T + a number of each key        [q, 1] [k, number]^T
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


def give_numbers(graph_of_model: ModelGraph) -> None:
    """Let keys have a number of their own that is added to their scores, in place."""
    writer, known = GraphWriter(graph_of_model.graph_module), graph_of_model.positions.known
    graph = writer.graph_module.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    for user in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for value, scores in (user.args, user.args[::-1]):
            numbers = _of_each_key(value) if isinstance(value, Node) else None
            # Asked last, since a table that is known is made for the longest row.
            if numbers is None or not isinstance(scores, Node) or known(value) is not None:
                continue
            found = product_of(scores, known)
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
    steps = list[Node]()
    while value.target in LAYOUTS:
        steps.insert(0, value)
        (value,) = value.all_input_nodes

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


def _with_numbers(writer: GraphWriter, product: Node, scale: float, numbers: Node) -> Node:
    """A product of queries, and keys with numbers of their own."""
    query, keys = (each.meta["val"] for each in product.all_input_nodes)
    one = writer.constant(torch.full([1] * query.dim(), 1 / scale))
    own = writer.call(aten.expand.default, one, [*query.shape[:-1], 1])
    return wider_product(writer, product, own, writer.reshape(numbers, [*keys.shape[:-2], keys.shape[-1], 1]))


register(
    Pattern(
        "numbers of keys",
        serves="decoders that add a number of each key to its scores, such as Doge",
        model_types=("doge",),
        example="doge",
        rewrites=(Rewrite(give_numbers, "positions", of="decoder"),),
    )
)
