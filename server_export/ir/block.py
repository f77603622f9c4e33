"""A block: part of a model as an fx graph of symbolic sizes, with ports for its inputs and outputs.

    block = Block(graph_module, outputs=(Port(HIDDEN_STATES),), weights=("model.norm.weight", ...))
    block.call({"hidden_states": hidden, "table.0": mask}, tensors)  ->  {"hidden_states": next_hidden}

Every placeholder stores its port in `meta["port"]`. Transformations that derive a graph from a block give
their new inputs ports of their own. Names such as `residual.3` follow from ports when a program is written.
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
# Called with the names of the weights of linear layers that read the same input, and with that input.
InputObserver = Callable[[Sequence[str], torch.Tensor], None]


def new_input(graph: Graph, port: Port, value: torch.Tensor) -> Node:
    """Add a placeholder with a port at the graph's insertion point; `value` has the shape and dtype."""
    node = graph.placeholder(port.name.replace(".", "_"))
    node.meta |= {PORT: port, "val": value}
    return node


def port_of(node: Node) -> Port | None:
    """Return the port of a placeholder, or None for any other node."""
    port: Port | None = node.meta.get(PORT) if node.op == "placeholder" else None
    return port


def is_input(node: Any, value: str) -> bool:
    """Return whether a node is a placeholder whose port holds this value."""
    port = port_of(node) if isinstance(node, Node) else None
    return port is not None and port.value == value


@dataclass(frozen=True)
class Block:
    """An fx graph, the ports of its outputs, and the names of the frozen tensors that it reads, in order."""

    graph_module: GraphModule
    outputs: tuple[Port, ...]
    weights: tuple[str, ...] = ()

    @cached_property
    def inputs(self) -> dict[Port, Node]:
        """Placeholders by port, in the order of the graph."""
        nodes = self.graph_module.graph.find_nodes(op="placeholder")
        return {node.meta[PORT]: node for node in nodes}

    def has_input(self, value: str) -> bool:
        """Return whether any input holds this value."""
        return any(port.value == value for port in self.inputs)

    def value(self, port: Port) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of an output."""
        outputs = self.graph_module.graph.output_node().args[0]
        result: torch.Tensor = outputs[self.outputs.index(port)].meta["val"]
        return result

    def copy(self) -> Block:
        """Return a block with a copy of the graph, which may be modified."""
        return replace(self, graph_module=copy_graph_module(self.graph_module))

    def sized(self, *sizes: tuple[int, int]) -> Block:
        """Return the block with other sizes, given as pairs of a marker and a size."""
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
            inputs: tensors by port name. Axes that are separate in a program, such as copies and rows, may be
                separate or merged. Inputs that the graph doesn't take are ignored.
            tensors: replacements for tensors of the graph, by name.
            watch: called with the names of the weights of linear layers and the input of these layers: [rows,
                tokens, in], or [any, in] if the input isn't per token.
            operators: functions that are called instead of operators.

        Returns:
            The outputs by port name.

        Raises:
            ValueError: the sizes of the inputs contradict each other.
        """
        tensor_of = {node: inputs[port.name] for port, node in self.inputs.items()}
        sizes = sizes_of(tensor_of)
        interpreter = _Run(self.graph_module, tensors, sizes, watch, operators)
        arguments = (
            tensor.reshape(interpreter.sized(node.meta["val"].shape)) for node, tensor in tensor_of.items()
        )
        outputs = interpreter.run(*arguments)
        return dict(zip((port.name for port in self.outputs), outputs, strict=True))


def sizes_of(inputs: Mapping[Node, torch.Tensor]) -> dict[int, int]:
    """Return the size of each marker in the shapes of the inputs; copies that no input determines are 1.

    Raises:
        ValueError: the sizes of the inputs contradict each other.
    """
    products = list[tuple[list[int], int]]()
    for node, tensor in inputs.items():
        axes = _factors_of_axes(node.meta["val"].shape, tensor.dim())
        for (factors, multiple), length in zip(axes, tensor.shape, strict=True):
            if length % multiple:
                raise ValueError(
                    f"{node.target} has an axis of size {length}, expected a multiple of {multiple}"
                )
            products.append((factors, length // multiple))
    sizes: dict[int, int] = {}
    for factors, length in sorted(products, key=lambda each: len(each[0])):
        *copies, last = [factor for factor in factors if factor not in sizes] or [0]
        if last:
            known = prod(sizes[factor] for factor in factors if factor in sizes)
            sizes |= dict.fromkeys(copies, 1) | {last: length // known}
        if prod(sizes[factor] for factor in factors) != length:
            raise ValueError(
                f"an input has an axis of size {length}, which contradicts the sizes {sizes} of other inputs"
            )
    return sizes


def _factors_of_axes(shape: Sequence[int], dimensions: int) -> list[tuple[list[int], int]]:
    """Return for each axis of an input its markers and the remaining factor.

    If the tensor has more dimensions than the graph's placeholder, markers of one product become separate
    axes.
    """
    axes = [_factors(number) for number in shape]
    if len(axes) == dimensions:
        return axes
    split = list[tuple[list[int], int]]()
    for factors, remainder in axes:
        if len(factors) < 2:
            split.append((factors, remainder))
        else:
            split += [([factor], 1) for factor in factors] + [([], remainder)] * (remainder > 1)
    return split


def _factors(size: int) -> tuple[list[int], int]:
    """Return the markers that divide a size, and the remaining factor."""
    markers = list[int]()
    for marker in _MARKERS:
        while size % marker == 0:
            markers.append(marker)
            size //= marker
    return markers, size


class _Run(Interpreter):
    """Interprets a graph with the tensors of one block, at the sizes of one call."""

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
        self._layers_by_input = {} if watch is None else _weights_by_input(graph_module)

    def run_node(self, n: Node) -> Any:
        """Run a node, and report it to the observer if linear layers read its value."""
        value = super().run_node(n)
        if self._watch is not None and n in self._layers_by_input:
            rows, tokens = (prod(self._sizes.get(each, 1) for each in size) for size in (_ROWS, _TOKENS))
            is_of_tokens = value.numel() == rows * tokens * value.shape[-1]
            shape = (rows, tokens) if is_of_tokens else (-1,)
            self._watch(self._layers_by_input[n], value.reshape(*shape, value.shape[-1]))
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, or the function that replaces it."""
        return super().call_function(self._operators.get(target, target), args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a tensor of this block, or the one that all blocks of its type share."""
        tensor = self._tensors.get(str(target))
        return get_attribute(self.module, str(target)) if tensor is None else tensor

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """Return the arguments of a node, with markers replaced by sizes."""
        return map_aggregate(super().fetch_args_kwargs_from_env(n), self.sized)

    def sized(self, value: Any) -> Any:
        """Replace the markers in a number or a torch.Size by sizes; other values are returned unchanged."""
        if isinstance(value, torch.Size):
            return [self.sized(number) for number in value]
        for marker, size in self._sizes.items():
            value = resized(value, marker, size)
        return value


def _weights_by_input(graph_module: GraphModule) -> dict[Node, list[str]]:
    """Return the nodes that linear layers read, with the names of the weights of these layers."""
    weights: dict[Node, list[str]] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        source, weight = node.args[:2]
        if weight.op == "get_attr":
            weights.setdefault(source, []).append(str(weight.target))
    return weights
