"""A block: a stretch of a model as a graph of marked sizes, with what enters and leaves it.

    block = Block(graph_module, outputs=(Port(HIDDEN_STATES),), weights=("model.layers.0.mlp.up_proj.weight", ...))
    block.call({"hidden_states": state, "table.0": mask}, tensors)  ->  {"hidden_states": next_state}

An input's node has its port in `meta["port"]`. What derives a graph from a block gives new inputs ports of
their own; names such as `taken.3` are made of ports when a program is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from prge.formats.signatures import Port
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import copy_graph_module, get_attribute
from server_export.ir.shapes import resized, with_size

aten = torch.ops.aten

PORT = "port"
_MARKERS = (COPIES, BATCH, TOKENS, QUERIES, PAST)
_ROWS, _TOKENS = (COPIES, BATCH), (TOKENS,)
# Names of the weights of linear layers that read the same input, and that input.
InputObserver = Callable[[Sequence[str], torch.Tensor], None]


def new_input(graph: Graph, port: Port, value: torch.Tensor) -> Node:
    """A placeholder of a port, at the place where the graph is written; `value` has its shape and type."""
    node = graph.placeholder(port.name.replace(".", "_"))
    node.meta |= {PORT: port, "val": value}
    return node


def port_of(node: Node) -> Port | None:
    """The port of an input; None of any other node."""
    port: Port | None = node.meta.get(PORT) if node.op == "placeholder" else None
    return port


def is_input(node: Any, value: str) -> bool:
    """Whether a node is an input of a value."""
    port = port_of(node) if isinstance(node, Node) else None
    return port is not None and port.value == value


@dataclass(frozen=True)
class Block:
    """A graph, the ports of its outputs, and names of the frozen tensors that it reads, in order of use."""

    graph_module: GraphModule
    outputs: tuple[Port, ...]
    weights: tuple[str, ...] = ()

    @cached_property
    def inputs(self) -> dict[Port, Node]:
        """Nodes of the inputs by port, in order."""
        nodes = self.graph_module.graph.find_nodes(op="placeholder")
        return {node.meta[PORT]: node for node in nodes}

    def has_input(self, value: str) -> bool:
        """Whether it has an input of a value."""
        return any(port.value == value for port in self.inputs)

    def value(self, port: Port) -> torch.Tensor:
        """Shape and type of an output, in a tensor without memory."""
        answers = self.graph_module.graph.output_node().args[0]
        result: torch.Tensor = answers[self.outputs.index(port)].meta["val"]
        return result

    def copy(self) -> Block:
        """The same graph, which may be changed."""
        return replace(self, graph_module=copy_graph_module(self.graph_module))

    def sized(self, *sizes: tuple[int, int]) -> Block:
        """The same block of other sizes: pairs of a marker and a size."""
        graph_module = self.graph_module
        for marker, size in sizes:
            graph_module = with_size(graph_module, marker, size)
        return replace(self, graph_module=graph_module)

    def call(
        self,
        inputs: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        watch: InputObserver | None = None,
        operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Run the graph eagerly in PyTorch, at the sizes of the inputs.

        Args:
            inputs: by the name of their port. Axes that a program has apart, such as copies and rows, may be
                apart or one; more inputs than the graph takes are left out.
            tensors: in the place of tensors of the graph, by name.
            watch: is given the names of linear layers' weights, and what these layers read: [rows, tokens,
                in], or [any, in] where it isn't of tokens.
            operators: functions that are called in the place of operators.

        Raises:
            ValueError: sizes of the inputs contradict each other.
        """
        given = {node: inputs[port.name] for port, node in self.inputs.items()}
        sizes = sizes_of(given)
        run = _Run(self.graph_module, tensors, sizes, watch, operators)
        shaped = (tensor.reshape(run.sized(node.meta["val"].shape)) for node, tensor in given.items())
        answers = run.run(*shaped)
        return dict(zip((port.name for port in self.outputs), answers, strict=True))


def sizes_of(given: Mapping[Node, torch.Tensor]) -> dict[int, int]:
    """What each marker in the shapes of inputs stands for; copies that nothing tells are 1.

    Raises:
        ValueError: sizes of the inputs contradict each other.
    """
    products = list[tuple[list[int], int]]()
    for node, tensor in given.items():
        marked = _factors_of_axes(node.meta["val"].shape, tensor.dim())
        for (factors, rest), length in zip(marked, tensor.shape, strict=True):
            if length % rest:
                raise ValueError(f"{node.target} has an axis of {length}, must be a multiple of {rest}")
            products.append((factors, length // rest))
    sizes: dict[int, int] = {}
    for factors, length in sorted(products, key=lambda each: len(each[0])):
        *copies, last = [factor for factor in factors if factor not in sizes] or [0]
        if last:
            known = prod(sizes[factor] for factor in factors if factor in sizes)
            sizes |= dict.fromkeys(copies, 1) | {last: length // known}
        if prod(sizes[factor] for factor in factors) != length:
            raise ValueError(f"an axis of an input has {length} entries, others have {sizes}")
    return sizes


def _factors_of_axes(shape: Sequence[int], dimensions: int) -> list[tuple[list[int], int]]:
    """The markers in each axis of an input, and the rest; products of markers are axes of their own if there
    are more dimensions than the graph has."""
    axes = [_factors(number) for number in shape]
    if len(axes) == dimensions:
        return axes
    apart = list[tuple[list[int], int]]()
    for factors, rest in axes:
        if len(factors) < 2:
            apart.append((factors, rest))
        else:
            apart += [([factor], 1) for factor in factors] + [([], rest)] * (rest > 1)
    return apart


def _factors(number: int) -> tuple[list[int], int]:
    found = list[int]()
    for marker in _MARKERS:
        while number % marker == 0:
            found.append(marker)
            number //= marker
    return found, number


class _Run(Interpreter):
    """A graph with the tensors of a block, and the sizes of a call for its markers."""

    def __init__(
        self,
        graph_module: GraphModule,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[int, int],
        watch: InputObserver | None,
        operators: Mapping[Any, Callable[..., Any]],
    ) -> None:
        super().__init__(graph_module)
        self._tensors, self._sizes, self._operators = tensors, sizes, operators
        self._watch = watch
        self._layers = {} if watch is None else _read_by_layers(graph_module)

    def run_node(self, n: Node) -> Any:
        """Also let a layer's input be watched."""
        value = super().run_node(n)
        if self._watch is not None and n in self._layers:
            rows, tokens = (prod(self._sizes.get(each, 1) for each in size) for size in (_ROWS, _TOKENS))
            is_of_tokens = value.numel() == rows * tokens * value.shape[-1]
            shape = (rows, tokens) if is_of_tokens else (-1,)
            self._watch(self._layers[n], value.reshape(*shape, value.shape[-1]))
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operator, or what takes its place."""
        return super().call_function(self._operators.get(target, target), args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of this block, or one that all of its type have."""
        tensor = self._tensors.get(str(target))
        return get_attribute(self.module, str(target)) if tensor is None else tensor

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """The arguments of a node, with the call's sizes for the markers."""
        return map_aggregate(super().fetch_args_kwargs_from_env(n), self.sized)

    def sized(self, value: Any) -> Any:
        """A number with the call's sizes for the markers in it; a shape of such numbers; anything else."""
        if isinstance(value, torch.Size):
            return [self.sized(number) for number in value]
        for marker, size in self._sizes.items():
            value = resized(value, marker, size)
        return value


def _read_by_layers(graph_module: GraphModule) -> dict[Node, list[str]]:
    """The nodes that linear layers read, with the names of the layers' weights."""
    found: dict[Node, list[str]] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        source, weight = node.args[:2]
        if weight.op == "get_attr":
            found.setdefault(source, []).append(str(weight.target))
    return found
