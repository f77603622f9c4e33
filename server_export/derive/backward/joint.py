"""Transform a block's graph into one that computes its forward and backward pass.

    forward        the graph as it is
    grad_output    the gradient of a loss with respect to the outputs: an input
    backward       what torch.autograd writes while it is traced, from the outputs down to the lowest adapter

Autograd only follows paths to the differentiated inputs: layers below the first adapted one have no backward
pass, and frozen weights have no gradient. Compiling a training step ahead of time into one graph is the idea
of PockEngine (Zhu et al., arXiv 2310.17752); here an inference engine runs the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from prge.errors import Refusal, refused_as
from server_export.derive.backward.layers import FROZEN, Expansion, FrozenLayer, replace_layers
from server_export.derive.backward.rules import ONES, decompositions, differentiable_form, write_backward
from server_export.ir.block import PORT, port_of
from server_export.ir.modules import copy_graph_module, get_attribute, make_graph_module
from server_export.ir.rewriting import rewrite
from server_export.ir.shapes import fill_in_values
from server_export.ir.traversal import ancestors

REMEDY = "Leave backward out of --roles, and please report the name of the model."

# Prefix of the names of gradients.
GRAD = "grad_"
GRAD_OUTPUT = f"{GRAD}output"


def backpropagate(
    graph_module: GraphModule,
    differentiated: Sequence[str],
    adapter: Sequence[str],
    tokens: int,
    grad_outputs: Sequence[str] = (GRAD_OUTPUT,),
    with_outputs: bool = False,
) -> GraphModule:
    """Return a graph that computes the forward and backward pass of a block.

    No constant has a shape that depends on rows or tokens, if these differ from all widths.

    Args:
        graph_module: a rewritten graph; its nodes have `meta["val"]`. Its constants are shared.
        differentiated: inputs whose gradients are outputs, in this order.
        adapter: the inputs with the adapter [copies, rank, out], the last ones of the graph.
        tokens: the tokens of a row, or the hidden states of a decoder's head. No constant is as long as this.
        grad_outputs: names of the gradients with respect to the graph's outputs, in order.
        with_outputs: whether the graph's outputs come before the gradients.

    Returns:
        A module whose last inputs are the gradients of the outputs. It takes `ones` f32 [1, tokens, 1] before
        the adapter, unless nothing reads it. Constants of the backward pass have names that begin with
        `transposed_`; those of the forward pass keep their names.

    Raises:
        Refusal: the outputs don't depend on a differentiated input, or an operator has no derivative.
    """
    graph_module = copy_graph_module(graph_module)
    inputs = _inputs(graph_module, adapter, tokens, grad_outputs)
    layers = replace_layers(graph_module)
    known = [str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")]
    constants = list(dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")))
    tensors = [get_attribute(graph_module, name).detach().to("meta") for name in constants]

    def joint(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors_of = dict(zip(constants, arguments, strict=False))
        inputs_by_name = dict(zip(inputs, arguments[len(constants) :], strict=True))
        inputs_by_name |= {name: inputs_by_name[name].detach().requires_grad_() for name in differentiated}
        outputs = _run(graph_module.graph, {name: inputs_by_name[name] for name in known} | tensors_of)
        gradients_in = [inputs_by_name[name] for name in grad_outputs]
        # PyTorch raises the same exception for a missing derivative and for outputs that don't require
        # gradients.
        with refused_as("no-backward-pass", "The program has no backward pass", RuntimeError, remedy=REMEDY):
            gradients = torch.autograd.grad(
                outputs, [inputs_by_name[name] for name in differentiated], gradients_in, allow_unused=True
            )
        _check_gradients(differentiated, gradients)
        return (*outputs, *gradients) if with_outputs else gradients

    with torch.enable_grad():
        traced = make_fx(joint, decomposition_table=decompositions())(*tensors, *inputs.values())
    result = _rebuild(graph_module, traced.graph, constants, list(inputs), layers)
    fill_in_values(result)
    write_backward(result)
    rewrite(result, has_weights=False)
    for node in result.graph.find_nodes(op="placeholder", target=ONES):
        if not node.users:
            result.graph.erase_node(node)
    result.recompile()
    return result


def _inputs(
    graph_module: GraphModule, adapter: Sequence[str], tokens: int, grad_outputs: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the inputs of the result in order, as meta tensors."""
    values = {str(node.target): node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")}
    outputs = graph_module.graph.output_node().args[0]
    inputs = {
        name: torch.empty_like(value, device="meta") for name, value in values.items() if name not in adapter
    }
    inputs[ONES] = torch.empty(1, tokens, 1, device="meta")
    inputs |= {name: torch.empty_like(values[name], device="meta") for name in adapter}
    inputs |= {
        name: torch.empty(output.meta["val"].shape, device="meta")
        for name, output in zip(grad_outputs, outputs, strict=True)
    }
    return inputs


def _run(graph: Graph, values_by_name: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a graph from inputs and constants by name, evaluating only needed nodes."""
    output = graph.output_node()
    needed = ancestors([output])
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = values_by_name[str(node.target)]
        elif node in needed and node is not output:
            if str(node.target).startswith("torchao."):
                # Autograd would differentiate the rounding, whose derivative is 0.
                raise Refusal(
                    "quantized-outside-layers",
                    f"The quantized operator {node.target} does not belong to a linear layer.",
                    operator=str(node.target),
                    remedy=REMEDY,
                )
            arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = differentiable_form(node.target)(*arguments, **named)
    return [values[result] for result in output.args[0]]


def _check_gradients(differentiated: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    unused = [name for name, gradient in zip(differentiated, gradients, strict=True) if gradient is None]
    if unused:
        raise Refusal(
            "independent-of-adapter",
            f"The output of the program does not depend on {', '.join(unused)}.",
            remedy="Choose --target-modules that the output depends on.",
        )


def _rebuild(
    root: GraphModule,
    traced: Graph,
    constants: Sequence[str],
    inputs: Sequence[str],
    layers: list[FrozenLayer],
) -> GraphModule:
    """Return the traced graph with constants as attributes of `root` and with its frozen layers expanded."""
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
                f"The backward pass has an unexpected constant {node.target}.",
                remedy=REMEDY,
            )
        if node.op == "output":
            graph.output(tuple(map_arg(tuple(node.args[0]), copies.__getitem__)))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            # The graph was traced on the meta device.
            named = copies[node].kwargs.items()
            copies[node].kwargs = {name: value for name, value in named if name != "device"}
    expansion = Expansion(root, graph, layers, lambda node: constant(str(node.target)))
    for node in list(graph.nodes):
        if node.target is FROZEN:
            expanded = expansion.write(node)
            expanded.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(expanded)
            graph.erase_node(node)
    graph.lint()
    return make_graph_module(root, graph)
