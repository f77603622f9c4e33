"""Graphs with tangents of small modules, and what PyTorch's own forward mode says of them."""

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
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def inputs_of(graph_module: GraphModule) -> list[str]:
    """Names of the inputs in order."""
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]


def with_tangents(module: nn.Module, active: Tensors, passive: Tensors = (), queries: int = 3) -> GraphModule:
    """The graph of a module of active and passive tensors; takes tangents of the active ones too."""
    graph_module = rewritten_graph(module, (*active, *passive))
    seeds = dict.fromkeys(inputs_of(graph_module)[: len(active)], Dense())
    graph = differentiate(graph_module, seeds, queries, {ONES: TOKENS})
    # Constants of rules are float32, and torch can't convert what is quantized, not even to what it is.
    return graph.double() if active[0].dtype == torch.float64 else graph


def directions(active: Tensors, queries: int) -> Tensors:
    """A random tangent of every active tensor for every query."""
    return tuple(
        random(queries, *tensor.shape, seed=7 + number, dtype=tensor.dtype)
        for number, tensor in enumerate(active)
    )


def jvp(module: nn.Module, active: Tensors, passive: Tensors, tangents: Tensors) -> tuple[Any, torch.Tensor]:
    """The module's answer, and its derivative along the tangents of every query."""
    answer, found = None, []
    for query in range(len(tangents[0])):
        along = tuple(tangent[query] for tangent in tangents)
        answer, derivative = torch.func.jvp(lambda *moved: module(*moved, *passive), active, along)
        found.append(derivative)
    return answer, torch.stack(found)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a part of the largest number; infinite for shapes that differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


class ShapeRecorder(Interpreter):
    """Runs a graph and keeps the shape of every tensor in it, by node."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.shapes: dict[Node, tuple[int, ...]] = {}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            self.shapes[node] = tuple(value.shape)
        return value


def shapes_of(graph_module: GraphModule, inputs: Sequence[torch.Tensor]) -> dict[Node, tuple[int, ...]]:
    """The shape of every tensor of a graph."""
    recorder = ShapeRecorder(graph_module)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.shapes


def run(writer: GraphTangents, value: Any, *inputs: torch.Tensor) -> Any:
    """What nodes of a graph are for the inputs of its placeholders; ends the graph."""
    writer.graph.output(value)
    with torch.no_grad():
        return GraphModule(writer.graph_module, writer.graph)(torch.ones(1, TOKENS, 1), *inputs)


def placeholders(writer: GraphTangents, **values: torch.Tensor) -> list[Node]:
    """New inputs of a graph with the shapes of some values, after its `ones`."""
    nodes = [writer.graph.placeholder(name) for name in values]
    for node, value in zip(nodes, values.values(), strict=True):
        node.meta["val"] = value
    return nodes
