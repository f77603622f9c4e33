"""Graphs with tangents of small modules, and PyTorch's own forward mode for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from server_export.derive.jvp.transform import ONES, Dense, differentiate
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.tangents import GraphTangents

Tensors = tuple[torch.Tensor, ...]

# No dimension of the modules is as large as these tokens.
QUERIES, TOKENS = 5, 7


class Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normally distributed values, equal for equal shapes and seeds."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def inputs_of(graph_module: GraphModule) -> list[str]:
    """Return the names of the inputs in order."""
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]


def with_tangents(module: nn.Module, active: Tensors, passive: Tensors = (), queries: int = 3) -> GraphModule:
    """Return the graph of a module that also takes tangents of the active tensors."""
    graph_module = rewritten_graph(module, (*active, *passive))
    seeds = dict.fromkeys(inputs_of(graph_module)[: len(active)], Dense())
    graph = differentiate(graph_module, seeds, queries, {ONES: TOKENS})
    # Constants of rules are float32. torch can't convert quantized tensors, not even to their own dtype.
    return graph.double() if active[0].dtype == torch.float64 else graph


def directions(active: Tensors, queries: int) -> Tensors:
    """Return a random tangent of every active tensor for every query."""
    return tuple(
        random(queries, *tensor.shape, seed=7 + number, dtype=tensor.dtype)
        for number, tensor in enumerate(active)
    )


def jvp(module: nn.Module, active: Tensors, passive: Tensors, tangents: Tensors) -> tuple[Any, torch.Tensor]:
    """Return the module's output and its derivative along the tangents of every query."""
    output, derivatives = None, []
    for query in range(len(tangents[0])):
        along = tuple(tangent[query] for tangent in tangents)
        output, derivative = torch.func.jvp(
            lambda *active_values: module(*active_values, *passive), active, along
        )
        derivatives.append(derivative)
    return output, torch.stack(derivatives)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value, or infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


class ShapeRecorder(Interpreter):
    """Runs a graph and records the shape of every tensor by node."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.shapes: dict[Node, tuple[int, ...]] = {}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            self.shapes[node] = tuple(value.shape)
        return value


def shapes_of(graph_module: GraphModule, inputs: Sequence[torch.Tensor]) -> dict[Node, tuple[int, ...]]:
    """Return the shape of every tensor of a graph by node."""
    recorder = ShapeRecorder(graph_module)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.shapes


def run(writer: GraphTangents, value: Any, *inputs: torch.Tensor) -> Any:
    """Return the values of nodes for inputs of the placeholders, after making the nodes the output."""
    writer.graph.output(value)
    with torch.no_grad():
        return GraphModule(writer.graph_module, writer.graph)(torch.ones(1, TOKENS, 1), *inputs)


def placeholders(writer: GraphTangents, **values: torch.Tensor) -> list[Node]:
    """Add inputs with the shapes of some values to a graph, after its `ones`."""
    nodes = [writer.graph.placeholder(name) for name in values]
    for node, value in zip(nodes, values.values(), strict=True):
        node.meta["val"] = value
    return nodes
