"""Decompose operators of a traced graph that have no rule into operators that have one.

    square(x)           x * x
    rms_norm(x, ...)    x * rsqrt(mean(x * x) + epsilon) * weight

The decompositions are PyTorch's. An operator with a rule stays, because XNNPACK implements most of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from server_export.ir.operators import Category, differentiable, members, rules
from server_export.ir.rewriting import rewrite
from server_export.ir.shapes import to_meta

aten = torch.ops.aten

_KEPT_CATEGORIES = (
    *(Category.IDENTITY, Category.CAST, Category.CAST_LIKE, Category.SPLIT),
    *(Category.EXPAND, Category.EXPAND_LIKE),
)


def decompose(graph_module: GraphModule, declined: bool = False) -> None:
    """Decompose all operators that have no rule, in place; nodes have `meta["val"]`.

    Args:
        graph_module: a traced graph.
        declined: whether the graph has been rewritten; then operators that a rewrite rule has declined are
            decomposed too.
    """
    rewritten = rules("rewrite").keys()
    # Other passes remove these operators, or read them to rewrite their users.
    kept = members(*_KEPT_CATEGORIES)
    known = differentiable() if declined else differentiable() | rewritten
    unknown = [
        node
        for node in graph_module.graph.nodes
        if str(node.target) not in known
        and node.target not in kept
        and (str(node.target) in rewritten or not declined)
        and _computes_floats(node)
    ]
    if not unknown:
        return
    for node in unknown:
        _decompose_node(graph_module.graph, node)
    views = members(Category.RESHAPE)
    for node in graph_module.graph.nodes:
        if node.target in views:
            # The strides of the viewed tensor may have changed.
            node.target = aten.reshape.default
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    if declined:
        rewrite(graph_module)


def unknown_operators(graph_module: GraphModule) -> dict[str, Node]:
    """Return the float operators of a rewritten graph without a derivative, each with its first node."""
    nodes, known = [node for node in graph_module.graph.nodes if _computes_floats(node)], differentiable()
    return {str(node.target): node for node in reversed(nodes) if str(node.target) not in known}


def _computes_floats(node: Node) -> bool:
    """Return whether a node is a deterministic ATen operator from floats to floats."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target.namespace != "aten"
        or target._schema.is_mutable
    ):
        return False
    values = [node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)]
    flat = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    return bool(node.all_input_nodes) and all(_is_float(part) for part in (flat[0], *flat[-1:]))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _decompose_node(graph: Graph, node: Node) -> None:
    sources = list(node.all_input_nodes)

    def call(*tensors: torch.Tensor) -> Any:
        values = dict(zip(sources, tensors, strict=True))
        arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*arguments, **named)

    meta_values = [to_meta(source.meta["val"]) for source in sources]
    decomposed = make_fx(call, decomposition_table=torch.export.default_decompositions())(*meta_values)
    # Decompositions may modify intermediate values in place.
    traced = make_fx(functionalize(decomposed, remove="mutations"))(*meta_values).graph
    nodes = [each for each in traced.nodes if each.op not in ("placeholder", "output")]
    is_unchanged = len(nodes) == 1 and nodes[0].target is node.target
    if is_unchanged or any(each.op == "get_attr" for each in nodes):
        return
    copies = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        for each in nodes:
            copies[each] = graph.node_copy(each, copies.__getitem__)
            copies[each].meta = {**node.meta, "val": each.meta["val"]}
            # The decomposition was traced on the meta device.
            copies[each].kwargs = {name: value for name, value in each.kwargs.items() if name != "device"}
    outputs = torch.fx.node.map_arg(traced.output_node().args[0], copies.__getitem__)
    if isinstance(outputs, Node):
        node.replace_all_uses_with(outputs)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
