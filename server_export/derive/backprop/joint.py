"""The transformation: a block's graph in, one out that goes through it and back.

    forward    the graph as it is
    slope      of a loss by the answer: an input
    backward   what torch.autograd writes while it is traced, from the answer down to the lowest adapter

Autograd follows nothing that leads to no wanted input: what lies below the first adapted layer has no
backward pass, and a frozen weight no gradient. That a training step can be compiled ahead of time into one
graph is PockEngine's idea (Zhu et al., arXiv 2310.17752); here the graph is one that an engine for inference
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from prge.errors import Refusal, refused_as
from server_export.derive.backprop.layers import FROZEN, Expansion, Layer, replace_layers
from server_export.derive.backprop.rules import ONES, decompositions, through, write_backward
from server_export.ir.block import PORT, port_of
from server_export.ir.modules import as_module, attribute, copied
from server_export.ir.rewriting import rewrite
from server_export.ir.shapes import fill_in_values
from server_export.ir.walks import ancestors

REMEDY = "leave back out of --roles, and please report it with the name of the model"

SLOPE = "slope"


def backpropagate(
    graph_module: GraphModule,
    wanted: Sequence[str],
    adapter: Sequence[str],
    tokens: int,
    slopes: Sequence[str] = (SLOPE,),
    with_answer: bool = False,
) -> GraphModule:
    """Make a graph that goes through a block and back; it computes the forward pass again.

    No constant of it has a shape that depends on rows or tokens, if these differ from all widths.

    Args:
        graph_module: rewritten; its nodes carry `meta["val"]`. Its constants are shared.
        wanted: inputs whose slopes are outputs, in this order.
        adapter: inputs that are the adapter's, [copies, rank, out], its last ones.
        tokens: of a row; states of a decoder's head. No constant is as long as this.
        slopes: names of the loss's derivatives by the graph's outputs, in order.
        with_answer: whether the graph's outputs come first.

    Returns:
        A module whose last inputs are the slopes. It takes `ones` f32 [1, tokens, 1] before the adapter,
        unless nothing reads it. Constants of the way back have names that begin with `transposed_`; those of
        the forward pass keep theirs.

    Raises:
        Refusal: the answer doesn't depend on what is wanted, or an operator has no derivative.
    """
    graph_module = copied(graph_module)
    inputs = _inputs(graph_module, adapter, tokens, slopes)
    layers = replace_layers(graph_module)
    known = [str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")]
    constants = list(dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")))
    tensors = [attribute(graph_module, name).detach().to("meta") for name in constants]

    def joint(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors_of = dict(zip(constants, arguments, strict=False))
        given = dict(zip(inputs, arguments[len(constants) :], strict=True))
        given |= {name: given[name].detach().requires_grad_() for name in wanted}
        answers = _run(graph_module.graph, {name: given[name] for name in known} | tensors_of)
        inwards = [given[name] for name in slopes]
        # PyTorch has one exception for an operator without a derivative and for what needs none.
        with refused_as("no-backward-pass", "the program has no backward pass", RuntimeError, remedy=REMEDY):
            found = torch.autograd.grad(answers, [given[name] for name in wanted], inwards, allow_unused=True)
        _check_used(wanted, found)
        return (*answers, *found) if with_answer else found

    with torch.enable_grad():
        traced = make_fx(joint, decomposition_table=decompositions())(*tensors, *inputs.values())
    result = _rebuilt(graph_module, traced.graph, constants, list(inputs), layers)
    fill_in_values(result)
    write_backward(result)
    rewrite(result, has_weights=False)
    for node in result.graph.find_nodes(op="placeholder", target=ONES):
        if not node.users:
            result.graph.erase_node(node)
    result.recompile()
    return result


def _inputs(
    graph_module: GraphModule, adapter: Sequence[str], tokens: int, slopes: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Inputs of the result in order, without memory."""
    known = {str(node.target): node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")}
    answers = graph_module.graph.output_node().args[0]
    inputs = {
        name: torch.empty_like(value, device="meta") for name, value in known.items() if name not in adapter
    }
    inputs[ONES] = torch.empty(1, tokens, 1, device="meta")
    inputs |= {name: torch.empty_like(known[name], device="meta") for name in adapter}
    inputs |= {
        name: torch.empty(answer.meta["val"].shape, device="meta")
        for name, answer in zip(slopes, answers, strict=True)
    }
    return inputs


def _run(graph: Graph, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The graph's answers of inputs and constants by name; what it doesn't depend on isn't computed."""
    output = graph.output_node()
    needed = ancestors([output])
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = given[str(node.target)]
        elif node in needed and node is not output:
            if str(node.target).startswith("torchao."):
                # Autograd would go through it, and find the slope of rounding: 0.
                raise Refusal(
                    "quantized-outside-layers",
                    f"the quantized operator {node.target} is in no layer",
                    operator=str(node.target),
                    remedy=REMEDY,
                )
            arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = through(node.target)(*arguments, **named)
    return [values[answer] for answer in output.args[0]]


def _check_used(wanted: Sequence[str], slopes: Sequence[torch.Tensor | None]) -> None:
    unused = [name for name, slope in zip(wanted, slopes, strict=True) if slope is None]
    if unused:
        raise Refusal(
            "independent-of-adapter",
            f"the program's output doesn't depend on {', '.join(unused)}",
            remedy="choose target modules that the output depends on",
        )


def _rebuilt(
    root: GraphModule, traced: Graph, constants: Sequence[str], inputs: Sequence[str], layers: list[Layer]
) -> GraphModule:
    """The traced graph with its constants as attributes of `root` and its frozen layers written out."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    attributes: dict[str, Node] = {}

    def constant(name: str) -> Node:
        if name not in attributes:
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                attributes[name] = graph.get_attr(name)
        return attributes[name]

    placeholders = traced.find_nodes(op="placeholder")
    ports = {str(node.target): port_of(node) for node in root.graph.find_nodes(op="placeholder")}
    for node, name in zip(placeholders[len(constants) :], inputs, strict=True):
        copies[node] = graph.placeholder(name)
        copies[node].meta |= {"val": node.meta["val"], PORT: ports.get(name)}
    for node, name in zip(placeholders, constants, strict=False):
        copies[node] = constant(name)
    for node in traced.nodes:
        if node.op == "get_attr":
            raise Refusal(
                "constant-in-backward-pass",
                f"the backward pass holds an unexpected constant {node.target}",
                remedy=REMEDY,
            )
        if node.op == "output":
            graph.output(tuple(map_arg(tuple(node.args[0]), copies.__getitem__)))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            # It was traced on the device that has no memory.
            named = copies[node].kwargs.items()
            copies[node].kwargs = {name: value for name, value in named if name != "device"}
    expansion = Expansion(root, graph, layers, lambda node: constant(str(node.target)))
    for node in list(graph.nodes):
        if node.target is FROZEN:
            new = expansion.write(node)
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    graph.lint()
    return as_module(root, graph)
