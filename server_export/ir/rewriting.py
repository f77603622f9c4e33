"""Rewriting of an exported graph, the same for every architecture, into what XNNPACK takes whole.

constants       rotary tables, masks, position embeddings, 1 + weight: computed here, not on the device
operators       plainer ones, as the table of operators has them
dropout, casts to the same type, assertions    removed
quantization    of an activation that several layers read: once
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
    """The graph of a module for inputs of these shapes, in operators that XNNPACK takes.

    Raises:
        Refusal: torch.export can't trace it.
    """
    remedy = "the architecture isn't supported; take another checkpoint, and please report it"
    with torch.no_grad():
        with refused_as(
            "not-traceable", "torch.export can't trace the program", torch_export_errors(), remedy=remedy
        ):
            exported = torch.export.export(module, inputs, strict=False)
        graph_module: GraphModule = exported.module(check_guards=False)
        rewrite(graph_module)
    return graph_module


def rewrite(graph_module: GraphModule, has_weights: bool = True) -> None:
    """Write a traced graph in operators that XNNPACK takes, in place; all its nodes carry `meta["val"]`.

    graph_module = torch.export.export(module, inputs).module(check_guards=False)
    rewrite(graph_module)

    Args:
        graph_module: of a model or of a part.
        has_weights: whether its weights have their numbers, of which constants are computed.
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
    """Make constants of the codes, scales and zero points that are read from quantized weights.

    Zero points that are all 0 are one constant: a lowering looks through all constants for every operator.
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
    """Take out operators that change nothing, such as casts to the same type, in place."""
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
                # What a copy laid out anew may be viewed otherwise than what it was made of.
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


def share_equal_calls(graph: Graph, is_meant: Callable[[Node], bool] = lambda node: True) -> None:
    """Compute once what several nodes compute of the same, in place."""
    seen: dict[tuple[str, str, str], Node] = {}
    for node in list(graph.nodes):
        if node.op in ("call_function", "get_attr") and is_meant(node):
            # Nodes are written as their names, which no two of them share.
            same = seen.setdefault((str(node.target), str(node.args), str(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def unshare_quantizations(graph: Graph) -> None:
    """Let every layer quantize what it multiplies: partitions of layers that share it would be circular.

    So would be one of a layer that is used twice, if both uses restored its weight together.
    """
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        restored, weight = node.args[:2]
        if is_dequantization(weight) and len(weight.users) > 1:
            with graph.inserting_before(node):
                node.replace_input_with(weight, graph.node_copy(weight, lambda source: source))
        if str(restored.target) != _ROUNDED or len(restored.users) == 1:
            continue
        codes = restored.args[0]
        scale, zero_point = codes.args[1:3]
        own: dict[Node, Node] = {source: source for source in scale.args[0].all_input_nodes}
        with graph.inserting_before(node):
            for shared in (scale.args[0], scale, zero_point, codes, restored):
                own |= {source: source for source in shared.all_input_nodes if source not in own}
                own[shared] = graph.node_copy(shared, own.__getitem__)
        node.replace_input_with(restored, own[restored])
    graph.eliminate_dead_code()


def is_dequantization(node: Node) -> bool:
    """Whether a node restores a quantized weight."""
    return str(node.target) == "torchao.dequantize_affine.default"
