"""The transformation: a graph in, one out that goes through it and back.

    forward    the graph as it is
    slope      of a loss by the answer: an input of a block, of a whole program made from what describes the
               loss (loss.py)
    backward   what torch.autograd writes while it is traced, from the answer down to the lowest adapter

Autograd follows nothing that no adapter reaches: what lies below the first adapted layer has no backward
pass, and a frozen weight no gradient. That a training step can be compiled ahead of time into one graph is
PockEngine's idea (Zhu et al., arXiv 2310.17752); here the graph is one that an engine for inference runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from prge.errors import BundleError, told_as_bundle_error
from server_export.derive.backprop.layers import FROZEN, Expansion, Layer, replace_layers
from server_export.derive.backprop.rules import ONES, RULES
from server_export.graph.log_softmax import GATHER_LOG_SOFTMAX, GatherLogSoftmax
from server_export.graph.modules import as_module, attribute, copied
from server_export.graph.rewriting import rewrite
from server_export.graph.shapes import fill_in_values
from server_export.graph.writing import apply_rules

# What autograd goes through instead of an operator.
_WITH_A_BACKWARD_PASS = {GATHER_LOG_SOFTMAX: GatherLogSoftmax.apply}
_REMEDY = "export with --estimator tangent, and please report it with the name of the model"

SLOPE = "slope"

Tensors = dict[str, torch.Tensor]


def backpropagate_block(
    graph_module: GraphModule,
    wanted: Sequence[str],
    adapter: Sequence[str],
    tokens: int,
    *,
    returns_answer: bool = False,
) -> GraphModule:
    """Make a graph that goes through a block and back; it computes the forward pass again.

    No constant of it has a shape that depends on rows or tokens, if these differ from all widths.

    Args:
        graph_module: rewritten, of one copy; its nodes carry `meta["val"]`, and it has one output. Its
            constants are shared.
        wanted: inputs whose slopes are outputs, in this order.
        adapter: inputs that are the adapter's, its last ones, [1, rank, out]; the result takes and returns
            [rank, out].
        tokens: of a row; states of a decoder's head. No constant is as long as this.
        returns_answer: whether the first output is the block's own.

    Returns:
        A module whose last input, `slope`, is the loss's derivative by the answer. It takes `ones` f32
        [1, tokens, 1] before the adapter, unless nothing reads it. Constants of the way back have names that
        begin with `transposed_`; those of the forward pass keep theirs.

    Raises:
        BundleError: the answer doesn't depend on what is wanted, or an operator has no derivative.
    """
    placeholders = _placeholders(graph_module)
    known = {str(node.target): node.meta["val"] for node in placeholders}
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in known.items() if name not in adapter}
    shapes[ONES] = ((1, tokens, 1), torch.float32)
    shapes |= {name: (tuple(known[name].shape[1:]), known[name].dtype) for name in adapter}
    shapes[SLOPE] = (tuple(output.args[0][0].meta["val"].shape), torch.float32)
    inputs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    result = _there_and_back(
        copied(graph_module),
        inputs,
        {name: name for name in wanted},
        lambda _, given: given[SLOPE],
        returns_answer=returns_answer,
    )
    for node in _placeholders(result):
        if node.target == ONES and not node.users:
            result.graph.erase_node(node)
    result.recompile()
    return result


def _there_and_back(
    graph_module: GraphModule,
    inputs: Tensors,
    wanted: Mapping[str, str],
    slopes: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
    *,
    returns_answer: bool,
) -> GraphModule:
    """The graph with its backward pass.

    Args:
        graph_module: the forward pass; it is changed.
        inputs: of the result in order, without memory.
        wanted: inputs whose slopes are returned, and what people call them.
        slopes: the loss's derivative by the answer, from it and the inputs.
        returns_answer: whether the answer is returned too, before the slopes.
    """
    layers = replace_layers(graph_module)
    constants = {str(node.target): node for node in graph_module.graph.nodes if node.op == "get_attr"}
    tensors = [attribute(graph_module, name).detach().to("meta") for name in constants]

    def joint(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors_of = dict(zip(constants, arguments[: len(constants)], strict=True))
        given = dict(zip(inputs, arguments[len(constants) :], strict=True))
        given |= {name: given[name].detach().requires_grad_() for name in wanted}
        values: dict[Node, Any] = {
            node: _of_shape(given[str(node.target)], node.meta["val"].shape)
            for node in _placeholders(graph_module)
        }
        answer = _run(graph_module.graph, values, tensors_of)
        slope = slopes(answer.detach(), given)
        found = torch.autograd.grad(answer, [given[name] for name in wanted], slope, allow_unused=True)
        _check_used(wanted, found)
        return (answer, *found) if returns_answer else found

    with told_as_bundle_error("the program has no backward pass", _REMEDY), torch.enable_grad():
        traced = make_fx(joint)(*tensors, *inputs.values())
    result = _rebuilt(graph_module, traced.graph, list(constants), list(inputs), layers)
    fill_in_values(result)
    apply_rules(result, RULES)
    rewrite(result)
    return result


def _placeholders(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _of_shape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


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


def _check_used(wanted: Mapping[str, str], slopes: Sequence[torch.Tensor | None]) -> None:
    unused = [name for name, slope in zip(wanted.values(), slopes, strict=True) if slope is None]
    if unused:
        raise BundleError(
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
