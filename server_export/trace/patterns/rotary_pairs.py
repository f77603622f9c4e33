"""Rotary embeddings that rotate pairs of neighbouring elements.

x * cos + stack(-x[1::2], x[::2]) * sin        for x [rows, heads, length, width]
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.writer import GraphWriter
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.rotation import bounds_of, rotate_by_linear

aten = torch.ops.aten


def write_pairs_as_linear(graph_module: GraphModule) -> None:
    """Write the rotation of pairs of a head as a linear layer, in place."""
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        source, rotated = _pairs(node)
        if source is not None:
            writer.replace(rotated, rotate_by_linear, source, False)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _pairs(node: Node) -> tuple[Node | None, Node]:
    """Return x of stack(-x[1::2], x[::2]) over the last dimension, and the node that flattens the stack."""
    parts: Any = node.args[0]
    (user,) = node.users if len(node.users) == 1 else (node,)
    if len(parts) != 2 or any(part.target is not aten.reshape.default for part in parts):
        return None, node
    first, second = (part.args[0] for part in parts)
    if first.target is not aten.neg.default or second.target is not aten.slice.Tensor:
        return None, node
    source, (*lead, width) = second.args[0], second.args[0].meta["val"].shape
    shapes = [tuple(each.meta["val"].shape) for each in (node, user)]
    if len(lead) != 3 or shapes != [(*lead, width // 2, 2), (*lead, width)]:
        return None, node
    bounds = [bounds_of(part, source, width) for part in (first.args[0], second)]
    return (source if bounds == [(1, width, 2), (0, width, 2)] else None), user


register(
    Pattern(
        "rotary pairs",
        serves="rotations of neighbouring pairs, such as GPT-J's",
        model_types=tuple(
            """
            codegen cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe glm glm4 gptj helium roformer
            """.split()
        ),
        example="gptj",
        rewrites=(Rewrite(write_pairs_as_linear, "block", operators=(aten.cat.default,)),),
    )
)
