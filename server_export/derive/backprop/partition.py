"""A joint graph, parted where the fewest numbers cross: what a forward pass saves for the way back.

    joint    state, slope -> answer, slopes
    forward  state        -> answer, saved
    way back state, saved, slope -> slopes

No layer with a constant weight is computed on the way back: what it needs of their answers is saved, or what
is made of these where that is smaller or as small. All else, such as norms, activations and the scores of
attention, is computed again. The smallest such set is a minimum cut of the graph, as functorch chooses it; of
several, the last: it leaves least to compute.
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
from prge.files.signatures import SAVED, Port
from server_export.derive.backprop.joint import REMEDY, SLOPE
from server_export.derive.backprop.rules import ONES
from server_export.ir.block import new_input
from server_export.ir.modules import as_module
from server_export.ir.walks import ancestors, descendants

aten = torch.ops.aten

_FORWARD, _BACK = "forward", "way back"


@dataclass(frozen=True)
class Parts:
    """Graphs of a joint one: the way back that computes all again, a forward pass that answers what it saves
    behind its answer, and the way back from that."""

    back: GraphModule
    save: GraphModule
    back_saved: GraphModule


def partition(
    joint: GraphModule, batch: int, tokens: int, changing: Collection[str] = (), answers: int = 1
) -> Parts:
    """Part a joint graph.

    Args:
        joint: as `backpropagate` makes it with the answer. Not changed; its constants are shared.
        batch, tokens: of the state; no width is a multiple of `tokens`. A saved value is f32 [batch, tokens,
            width]; the way back takes the inputs `saved_0`, `saved_1`, ... behind its others.
        changing: inputs that are others on the way back: nothing that depends on them is saved.
        answers: outputs that are no slopes; of the forward pass what is saved comes behind the first.

    Raises:
        Refusal: what a layer answers can't be saved.
    """
    outputs = joint.graph.output_node().args[0]
    answer, *given = outputs[:answers]
    slopes = outputs[answers:]
    whole = batch * tokens
    of_changing = descendants(n for n in joint.graph.nodes if n.target in changing)

    def may_be_saved(node: Node) -> bool:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return False
        # Rows first, and tokens not last, as transposed they are: then its order is that of [batch, tokens].
        in_order = value.shape[0] % batch == 0 and value.shape[-1] % tokens and not value.numel() % whole
        return bool(in_order) and node not in of_changing

    layers = [node for node in joint.graph.nodes if _is_layer(node, whole) and node not in of_changing]
    saved = _smallest_cut(joint.graph, slopes, layers, may_be_saved)
    shapes = {node: [batch, tokens, node.meta["val"].numel() // whole] for node in saved}
    as_they_are = [None for _ in slopes]
    return Parts(
        back=_part(joint, slopes, as_they_are),
        save=_part(joint, [answer, *saved, *given], [None, *shapes.values(), *(None for _ in given)]),
        back_saved=_part(joint, slopes, as_they_are, shapes),
    )


def _smallest_cut(
    graph: Graph, slopes: Sequence[Node], layers: Sequence[Node], may_be_saved: Callable[[Node], bool]
) -> list[Node]:
    """The values to save, in order, so that no layer is computed again."""
    of_slope = descendants(filter(_is_slope, graph.nodes)) - {graph.output_node()}
    inside = (descendants(layers) & ancestors(slopes)) - of_slope
    flow: Any = networkx.DiGraph()
    flow.add_nodes_from((_FORWARD, _BACK))
    for node in inside:
        size = {"capacity": node.meta["val"].numel()} if may_be_saved(node) else {}
        flow.add_edge((node, 0), (node, 1), **size)
        flow.add_edges_from(((source, 1), (node, 0)) for source in node.all_input_nodes if source in inside)
        if node in layers:
            flow.add_edge(_FORWARD, (node, 0))
        if any(user in of_slope for user in node.users):
            flow.add_edge((node, 1), _BACK)
    what = "the way back has a layer whose answer has no rows of tokens"
    with refused_as("layer-without-token-rows", what, networkx.NetworkXUnbounded, remedy=REMEDY):
        # Of all smallest cuts networkx tells the one next to the target.
        _, (before, behind) = networkx.minimum_cut(flow, _FORWARD, _BACK)
    return [node for node in graph.nodes if (node, 0) in before and (node, 1) in behind]


def _is_layer(node: Node, rows: int) -> bool:
    """Whether it multiplies so many rows by a constant matrix.

    One of a single output is a mean or a sum, and one of more rows a rotation of heads.
    """
    if node.target is not aten.linear.default:
        return False
    weight, value = node.args[1], node.meta["val"]
    is_constant = weight.op == "get_attr" or all(part.op == "get_attr" for part in weight.all_input_nodes)
    return is_constant and value.dim() < 4 and 1 < value.shape[-1] == value.numel() // rows


def _is_slope(node: Node) -> bool:
    """Whether it is an input that only a way back has."""
    return node.op == "placeholder" and str(node.target).startswith(SLOPE)


def _part(
    joint: GraphModule,
    outputs: Sequence[Node],
    shapes: Sequence[Sequence[int] | None],
    given: Mapping[Node, Sequence[int]] = MappingProxyType({}),
) -> GraphModule:
    """The module that answers values of the joint one, some of them in another shape.

    What is given is no longer computed, but an input of the shape that it is given in.
    """
    graph, copies = Graph(), dict[Node, Node]()
    needed = ancestors(outputs, without=given)
    for node in joint.graph.find_nodes(op="placeholder"):
        if node in needed or not (node.target == ONES or _is_slope(node)):
            copies[node] = graph.node_copy(node)
    inputs = [
        new_input(graph, Port(SAVED, number), torch.empty(shape, device="meta"))
        for number, shape in enumerate(given.values())
    ]
    for source, node in zip(inputs, given, strict=True):
        copies[node] = _reshaped(graph, source, node.meta["val"].shape)
    for node in joint.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    answers = (
        copies[node] if shape is None else _reshaped(graph, copies[node], shape)
        for node, shape in zip(outputs, shapes, strict=True)
    )
    graph.output(tuple(answers))
    graph.lint()
    return as_module(joint, graph)


def _reshaped(graph: Graph, source: Node, shape: Sequence[int]) -> Node:
    if list(source.meta["val"].shape) == [*shape]:
        return source
    node = graph.call_function(aten.reshape.default, (source, [*shape]))
    node.meta["val"] = torch.empty([*shape], device="meta")
    return node
