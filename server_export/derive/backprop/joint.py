"""The transformation: a graph in, one out that returns the same and the gradient of a loss by the adapter.

    forward    the graph as it is
    loss       derivative by the answers, from the inputs that describe it (loss.py)
    backward   what torch.autograd writes while it is traced, from the answers down to the lowest adapter

Autograd follows nothing that no adapter reaches: what lies below the first adapted layer has no backward
pass, and a frozen weight no gradient. That a training step can be compiled ahead of time into one graph is
PockEngine's idea (Zhu et al., arXiv 2310.17752); here the graph is one that an engine for inference runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from prge.contract import Contract
from prge.errors import BundleError, told_as_bundle_error
from server_export.derive.backprop.layers import FROZEN, Expansion, Layer, replace_layers
from server_export.derive.backprop.rules import RULES
from server_export.graph.log_softmax import GATHER_LOG_SOFTMAX, GatherLogSoftmax
from server_export.graph.modules import as_module, attribute
from server_export.graph.rewriting import rewrite
from server_export.graph.shapes import fill_in_values
from server_export.graph.writing import apply_rules
from server_export.model.loss import answer_slopes

# What autograd goes through instead of an operator.
_WITH_A_BACKWARD_PASS = {GATHER_LOG_SOFTMAX: GatherLogSoftmax.apply}
_REMEDY = "export with --estimator tangent, and please report it with the name of the model"


def backpropagate(graph_module: GraphModule, contract: Contract) -> GraphModule:
    """Make a graph that computes its answer and the gradient of a loss by the adapter.

        graph = backpropagate(graph_module, contract)
        logprobs, *gradients = graph(*example_inputs(contract))

    Args:
        graph_module: rewritten, of one copy; its nodes carry `meta["val"]`, its last placeholders are the
            adapter's [1, rank, out], and it has one output. It is changed.
        contract: of the exact program, whose inputs and outputs the result has.

    Raises:
        BundleError: the answer doesn't depend on a module's adapter, or an operator has no derivative.
    """
    layers = replace_layers(graph_module)
    constants = {str(node.target): node for node in graph_module.graph.nodes if node.op == "get_attr"}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    tensors = [attribute(graph_module, name).detach() for name in constants]
    tensors += [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in contract.inputs]

    def joint(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors_of = dict(zip(constants, arguments[: len(constants)], strict=True))
        inputs = arguments[len(constants) :]
        first = len(placeholders) - len(contract.modules)
        adapter = [matrix.detach().requires_grad_() for matrix in inputs[first : len(placeholders)]]
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=False))
        for node, matrix in zip(placeholders[first:], adapter, strict=True):
            values[node] = matrix.reshape(1, *matrix.shape)
        answers = _run(graph_module.graph, values, tensors_of)
        slopes = answer_slopes(contract, answers.detach(), inputs[len(placeholders) :])
        gradients = torch.autograd.grad(answers, adapter, slopes, allow_unused=True)
        _check_used(contract, gradients)
        return (answers, *gradients)

    with told_as_bundle_error("the program has no backward pass", _REMEDY), torch.enable_grad():
        traced = make_fx(joint, tracing_mode="fake")(*tensors)
    names = [str(node.target) for node in placeholders]
    names += [spec.name for spec in contract.inputs[len(placeholders) :]]
    result = _rebuilt(graph_module, traced.graph, list(constants), names, layers)
    fill_in_values(result)
    apply_rules(result, RULES)
    rewrite(result)
    return result


def _run(graph: Graph, values: dict[Node, Any], constants: dict[str, torch.Tensor]) -> torch.Tensor:
    """The graph's answer; what it doesn't depend on isn't computed."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    needed, ahead = set[Node](), [output]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            needed.add(node)
            ahead.extend(node.all_input_nodes)
    for node in graph.nodes:
        if node in needed and str(node.target).startswith("torchao."):
            # Autograd would go through it, and find the slope of rounding: 0.
            raise BundleError(f"the quantized operator {node.target} is in no layer", remedy=_REMEDY)
        if node.op == "get_attr":
            values[node] = constants[str(node.target)]
        elif node.op == "call_function" and node in needed:
            arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
            target = _WITH_A_BACKWARD_PASS.get(node.target, node.target)
            values[node] = target(*arguments, **named)
    (answer,) = output.args[0]
    result: torch.Tensor = values[answer]
    return result


def _check_used(contract: Contract, gradients: Sequence[torch.Tensor | None]) -> None:
    unused = [
        module.name for module, gradient in zip(contract.modules, gradients, strict=True) if gradient is None
    ]
    if unused:
        raise BundleError(
            f"the program's output doesn't depend on the adapter of {', '.join(unused)}",
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

    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders[len(constants) :], inputs, strict=True):
        copies[node] = graph.placeholder(name.replace(".", "_"))
        copies[node].meta["val"] = node.meta["val"]
    for node, name in zip(placeholders, constants, strict=False):
        copies[node] = constant(name)
    for node in traced.nodes:
        if node.op == "get_attr":
            raise BundleError(
                f"the backward pass of the program holds an unexpected constant {node.target}",
                remedy=_REMEDY,
            )
        if node.op == "output":
            graph.output(tuple(map_arg(tuple(node.args[0]), copies.__getitem__)))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    expansion = Expansion(root, graph, layers, lambda node: constant(str(node.target)))
    for node in list(graph.nodes):
        if node.target is FROZEN:
            new = expansion.write(node)
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    graph.lint()
    return as_module(root, graph)
