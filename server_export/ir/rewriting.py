"""Rewrite an exported graph into operators that XNNPACK delegates, for all architectures alike.

constants       rotary tables, masks, position embeddings and 1 + weight are computed at export
operators       rewrite rules of the table of operators
dropout, casts to the same dtype and assertions are removed
quantization    an activation that several layers read is quantized once
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from prge.errors import refused_as
from server_export.ir.constants import GraphConstants
from server_export.ir.folding import fold_constants
from server_export.ir.modules import get_attribute, remove_unused_attributes
from server_export.ir.operators import Category, members, rules
from server_export.ir.writer import apply_rules
from server_export.library_errors import torch_export_errors

aten = torch.ops.aten

_ROUNDED = "quantized_decomposed.dequantize_per_token.default"


def rewritten_graph(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> GraphModule:
    """Export a module for inputs of these shapes and rewrite its graph for XNNPACK.

    Raises:
        Refusal: torch.export can't trace the module.
    """
    remedy = "This architecture isn't supported. Use another checkpoint, and please report it."
    with torch.no_grad():
        with refused_as(
            "not-traceable", "torch.export can't trace the program", torch_export_errors(), remedy=remedy
        ):
            exported = torch.export.export(module, inputs, strict=False)
        graph_module: GraphModule = exported.module(check_guards=False)
        rewrite(graph_module)
    return graph_module


def rewrite(graph_module: GraphModule, has_weights: bool = True) -> None:
    """Rewrite a traced graph into operators that XNNPACK delegates, in place; all nodes have `meta["val"]`.

        graph_module = torch.export.export(module, inputs).module(check_guards=False)
        rewrite(graph_module)

    Args:
        graph_module: the graph of a model or of a part of it.
        has_weights: whether the weights have values, from which constants can be computed.
    """
    _unwrap_quantized_weights(graph_module)
    constants = GraphConstants(graph_module)
    remove_identities(graph_module.graph)
    fold_constants(graph_module, constants, has_weights)
    _share_quantizations(graph_module.graph)
    apply_rules(graph_module, rules("rewrite"), constants)
    graph_module.delete_all_unused_submodules()
    remove_unused_attributes(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()


def _unwrap_quantized_weights(graph_module: GraphModule) -> None:
    """Register the codes, scales and zero points of quantized weights as constants.

    Zero points that are all 0 share one constant, because a lowering searches all constants for every
    operator.
    """
    graph = graph_module.graph
    zeros: dict[tuple[torch.dtype, torch.Size], str] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.export.access_subclass_inner_tensor.default:
            weight, part = node.args
            name = f"{str(weight.target).replace('.', '_')}_{part}"
            tensor = getattr(get_attribute(graph_module, str(weight.target)), part).detach()
            if part == "zero_point" and not bool(tensor.any()):
                name = zeros.setdefault((tensor.dtype, tensor.shape), name)
            if not hasattr(graph_module, name):
                graph_module.register_buffer(name, tensor)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(constant)
            graph.erase_node(node)


def remove_identities(graph: Graph) -> None:
    """Remove operators that change nothing, such as casts to the same dtype, in place."""
    identities = members(Category.IDENTITY)
    changes = members(Category.CAST, Category.CAST_LIKE, Category.EXPAND, Category.EXPAND_LIKE)
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.op == "call_function" and (
            node.target in identities
            or (node.target in changes and _changes_nothing(node))
            or _is_whole_slice(node)
        ):
            for user in node.users:
                # The result of a removed copy may have other strides than its source.
                user.target = aten.reshape.default if user.target is aten.view.default else user.target
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_whole_slice(node: Node) -> bool:
    return node.target is aten.slice.Tensor and node.args[0].meta["val"].shape == node.meta["val"].shape


def _changes_nothing(node: Node) -> bool:
    source = node.args[0]
    before, after = source.meta.get("val") if isinstance(source, Node) else None, node.meta.get("val")
    if before is None or after is None:
        return False
    return before.dtype == after.dtype and before.shape == after.shape


def _share_quantizations(graph: Graph) -> None:
    """Quantize an activation once for all layers that read it."""
    share_equal_calls(
        graph, lambda node: str(node.target).startswith("torchao.") or node.target is operator.getitem
    )


def share_equal_calls(graph: Graph, is_shareable: Callable[[Node], bool] = lambda node: True) -> None:
    """Merge nodes that compute the same operator of the same arguments, in place."""
    seen: dict[tuple[str, str, str], Node] = {}
    for node in list(graph.nodes):
        if node.op in ("call_function", "get_attr") and is_shareable(node):
            # str(node) is the node's name, which is unique in a graph.
            first = seen.setdefault((str(node.target), str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def unshare_quantizations(graph: Graph) -> None:
    """Let every layer quantize its own input and dequantize its own weight, in place.

    Partitions of layers that share a quantized activation would be circular, and so would one of two uses of
    a layer that share the dequantized weight.
    """
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        dequantized, weight = node.args[:2]
        if is_dequantization(weight) and len(weight.users) > 1:
            with graph.inserting_before(node):
                node.replace_input_with(weight, graph.node_copy(weight, lambda source: source))
        if str(dequantized.target) != _ROUNDED or len(dequantized.users) == 1:
            continue
        codes = dequantized.args[0]
        scale, zero_point = codes.args[1:3]
        copies: dict[Node, Node] = {source: source for source in scale.args[0].all_input_nodes}
        with graph.inserting_before(node):
            for source_node in (scale.args[0], scale, zero_point, codes, dequantized):
                copies |= {source: source for source in source_node.all_input_nodes if source not in copies}
                copies[source_node] = graph.node_copy(source_node, copies.__getitem__)
        node.replace_input_with(dequantized, copies[dequantized])
    graph.eliminate_dead_code()


def is_dequantization(node: Node) -> bool:
    """Return whether a node dequantizes a weight."""
    return str(node.target) == "torchao.dequantize_affine.default"
