"""Partition a joint graph at a minimum cut: the residuals that a forward pass saves for the backward pass.

    joint             hidden states, grad_output -> output, gradients
    forward           hidden states -> output, residuals
    backward          hidden states, residuals, grad_output -> gradients

The backward pass recomputes no layer with a constant weight: it saves the layer outputs that it needs, or
values that are computed from them if those are not larger. Everything else, such as norms, activations and
attention scores, is recomputed. The smallest such set is a minimum cut of the graph, as functorch chooses it;
of several minimum cuts, the last one leaves the least to recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx
import torch
from torch.fx import Graph, GraphModule, Node

from prge.errors import refused_as
from prge.formats.signatures import RESIDUAL, Port
from server_export.derive.backward.joint import GRAD, REMEDY
from server_export.derive.backward.rules import ONES
from server_export.ir.block import new_input
from server_export.ir.modules import make_graph_module
from server_export.ir.traversal import ancestors, descendants

aten = torch.ops.aten

_FORWARD, _BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class PartitionedGraphs:
    """The graphs of a partitioned joint graph.

    Attributes:
        backward: the backward pass that recomputes everything.
        save: the forward pass, which returns residuals after its first output.
        backward_saved: the backward pass from residuals.
    """

    backward: GraphModule
    save: GraphModule
    backward_saved: GraphModule


def partition(
    joint: GraphModule, batch: int, tokens: int, changing: Collection[str] = (), output_count: int = 1
) -> PartitionedGraphs:
    """Partition a joint graph into forward and backward graphs.

    Args:
        joint: the result of `backpropagate` with the outputs. It isn't modified; its constants are shared.
        batch, tokens: the sizes of the hidden states; no width is a multiple of `tokens`. A residual is f32
            [batch, tokens, width]; the backward pass takes the residuals after its other inputs.
        changing: inputs that have other values in the backward pass: nothing that depends on them is saved.
        output_count: the number of outputs that are not gradients; the forward pass returns residuals after
            the first one.

    Raises:
        Refusal: the output of a layer can't be saved.
    """
    joint_outputs = joint.graph.output_node().args[0]
    first_output, *other_outputs = joint_outputs[:output_count]
    gradients = joint_outputs[output_count:]
    row_count = batch * tokens
    of_changing = descendants(n for n in joint.graph.nodes if n.target in changing)

    def may_be_saved(node: Node) -> bool:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return False
        # Rows come first and tokens aren't last, as after a transposition: then the order is [batch, tokens].
        in_order = value.shape[0] % batch == 0 and value.shape[-1] % tokens and not value.numel() % row_count
        return bool(in_order) and node not in of_changing

    layers = [node for node in joint.graph.nodes if _is_layer(node, row_count) and node not in of_changing]
    residuals = _smallest_cut(joint.graph, gradients, layers, may_be_saved)
    shapes = {node: [batch, tokens, node.meta["val"].numel() // row_count] for node in residuals}
    unchanged = [None for _ in gradients]
    return PartitionedGraphs(
        backward=_part(joint, gradients, unchanged),
        save=_part(
            joint,
            [first_output, *residuals, *other_outputs],
            [None, *shapes.values(), *(None for _ in other_outputs)],
        ),
        backward_saved=_part(joint, gradients, unchanged, shapes),
    )


def _smallest_cut(
    graph: Graph, gradients: Sequence[Node], layers: Sequence[Node], may_be_saved: Callable[[Node], bool]
) -> list[Node]:
    """Return the residuals in order, such that no layer is recomputed."""
    depends_on_grad_output = descendants(filter(_is_gradient, graph.nodes)) - {graph.output_node()}
    candidates = (descendants(layers) & ancestors(gradients)) - depends_on_grad_output
    flow: Any = networkx.DiGraph()
    flow.add_nodes_from((_FORWARD, _BACKWARD))
    for node in candidates:
        size = {"capacity": node.meta["val"].numel()} if may_be_saved(node) else {}
        flow.add_edge((node, 0), (node, 1), **size)
        flow.add_edges_from(
            ((source, 1), (node, 0)) for source in node.all_input_nodes if source in candidates
        )
        if node in layers:
            flow.add_edge(_FORWARD, (node, 0))
        if any(user in depends_on_grad_output for user in node.users):
            flow.add_edge((node, 1), _BACKWARD)
    what = "The backward pass needs the output of a layer that has no rows of tokens"
    with refused_as("layer-without-token-rows", what, networkx.NetworkXUnbounded, remedy=REMEDY):
        # Of all minimum cuts, networkx returns the one next to the target.
        _, (source_side, target_side) = networkx.minimum_cut(flow, _FORWARD, _BACKWARD)
    return [node for node in graph.nodes if (node, 0) in source_side and (node, 1) in target_side]


def _is_layer(node: Node, rows: int) -> bool:
    """Return whether a node multiplies `rows` rows by a constant matrix.

    A matrix with a single output computes a mean or sum, and one of more rows is a rotation of heads.
    """
    if node.target is not aten.linear.default:
        return False
    weight, value = node.args[1], node.meta["val"]
    is_constant = weight.op == "get_attr" or all(part.op == "get_attr" for part in weight.all_input_nodes)
    return is_constant and value.dim() < 4 and 1 < value.shape[-1] == value.numel() // rows


def _is_gradient(node: Node) -> bool:
    """Return whether a node is an input that only a backward pass has."""
    return node.op == "placeholder" and str(node.target).startswith(GRAD)


def _part(
    joint: GraphModule,
    outputs: Sequence[Node],
    shapes: Sequence[Sequence[int] | None],
    residuals: Mapping[Node, Sequence[int]] = MappingProxyType({}),
) -> GraphModule:
    """Return a module that computes some values of the joint graph, some of them in another shape.

    The `residuals` aren't computed but become inputs of the given shapes.
    """
    graph, copies = Graph(), dict[Node, Node]()
    needed = ancestors(outputs, without=residuals)
    for node in joint.graph.find_nodes(op="placeholder"):
        if node in needed or not (node.target == ONES or _is_gradient(node)):
            copies[node] = graph.node_copy(node)
    inputs = [
        new_input(graph, Port(RESIDUAL, number), torch.empty(shape, device="meta"))
        for number, shape in enumerate(residuals.values())
    ]
    for source, node in zip(inputs, residuals, strict=True):
        copies[node] = _reshaped(graph, source, node.meta["val"].shape)
    for node in joint.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = (
        copies[node] if shape is None else _reshaped(graph, copies[node], shape)
        for node, shape in zip(outputs, shapes, strict=True)
    )
    graph.output(tuple(results))
    graph.lint()
    return make_graph_module(joint, graph)


def _reshaped(graph: Graph, source: Node, shape: Sequence[int]) -> Node:
    if list(source.meta["val"].shape) == [*shape]:
        return source
    node = graph.call_function(aten.reshape.default, (source, [*shape]))
    node.meta["val"] = torch.empty([*shape], device="meta")
    return node
