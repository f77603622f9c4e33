"""Turn graphs of fixed sizes into programs with dynamic sizes.

A model is traced and transformed with large primes as sizes, its markers, of which nothing else in the model
is a multiple. Here, numbers of a graph that are multiples of markers become expressions of the inputs'
shapes, and torch.export traces the graph again with dynamic sizes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from prge.errors import Refusal, refused_as
from prge.formats.chain import Interface, TensorSpec
from server_export.ir.block import Block
from server_export.ir.modules import get_attribute
from server_export.ir.shapes import OperatorShapes, to_meta
from server_export.library_errors import torch_export_errors

aten = torch.ops.aten

_REMEDY = "The architecture isn't supported. Use another checkpoint, and please report the problem."
# A float represents all whole numbers up to this one.
_LARGEST = 2.0**53


@dataclass(frozen=True)
class Size:
    """A dynamic size.

    Attributes:
        marker: large prime that stands for the size in the graph.
        example: size that torch.export traces with: at least 2, and no width of the model.
        minimum: smallest size of a call.
        maximum: largest size of a call, for which memory is planned.
        after: marker of the size, or 1, that follows this one in a concatenated dimension; 0: none. The sum
            of both may be in shapes of values, but not in numbers of operators.
    """

    marker: int
    example: int
    minimum: int
    maximum: int
    after: int = 0


def dynamic_program(graph_module: GraphModule, sizes: Mapping[str, Size]) -> ExportedProgram:
    """Return a program with dynamic sizes, of a graph that was traced with markers.

        dynamic_program(block, {"rows": Size(10007, 3, 1, 16), "tokens": Size(10009, 5, 1, 128)})

    Args:
        graph_module: graph of functional operators whose nodes have `meta["val"]`; not changed.
        sizes: sizes by name; the graph may lack some of them.

    Returns:
        A program with the same inputs, except that a dimension that is a product of sizes, such as copies x
        batch, becomes several dimensions in the order of `sizes`. The layout in memory stays the same.

    Raises:
        Refusal: a number doesn't follow from the shapes of the inputs, or a constant has a dynamic dimension.
    """
    markers = _Markers(sizes)
    dynamic = _DynamicGraph(markers)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [markers.split(node.meta["val"].shape) for node in placeholders]
    dynamic.add_inputs(placeholders, inputs)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            dynamic.add_constant(node, get_attribute(graph_module, str(node.target)))
        elif node.op == "call_function":
            dynamic.add_call(node)
        elif node.op == "output":
            dynamic.graph.output(map_arg(node.args[0], dynamic.copies.__getitem__))
    examples = tuple(
        torch.zeros([markers.example(number) for number in shape], dtype=node.meta["val"].dtype)
        for node, shape in zip(placeholders, inputs, strict=True)
    )
    dimensions = tuple(
        {index: dimension for index, number in enumerate(shape) if (dimension := markers.dimension(number))}
        for shape in inputs
    )
    what = "torch.export can't trace the program with unknown sizes"
    with refused_as("sizes-not-dynamic", what, torch_export_errors(), remedy=_REMEDY), torch.no_grad():
        return torch.export.export(
            GraphModule(graph_module, dynamic.graph),
            examples,
            dynamic_shapes=dimensions,
            strict=False,
            # Strides lead to min(tokens, tokens^2) = tokens, which torch.export can't prove.
            prefer_deferred_runtime_asserts_over_guards=True,
        )


@dataclass(frozen=True)
class SizedMethod:
    """A method of a block: its graph with markers, and its dynamic sizes by name."""

    block: Block
    sizes: Mapping[str, Size]

    def program(self) -> ExportedProgram:
        """Return the program with dynamic sizes; see `dynamic_program`."""
        return dynamic_program(self.block.graph_module, self.sizes)

    def interface(self) -> Interface:
        """Return names, dtypes and largest shapes of inputs and outputs."""
        markers = _Markers(self.sizes)
        inputs = {
            port.name: _spec(markers, node.meta["val"].dtype, markers.split(node.meta["val"].shape))
            for port, node in self.block.inputs.items()
        }
        values = (node.meta["val"] for node in self.block.graph_module.graph.output_node().args[0])
        outputs = tuple(_spec(markers, value.dtype, value.shape) for value in values)
        names = tuple(port.name for port in self.block.outputs)
        return Interface(tuple(inputs), names, tuple(inputs.values()), outputs)

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs by name, for the sizes that the program is traced with."""
        markers = _Markers(self.sizes)
        return {
            port.name: tuple(map(markers.example, markers.split(node.meta["val"].shape)))
            for port, node in self.block.inputs.items()
        }


def _spec(markers: _Markers, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(str(dtype).removeprefix("torch."), tuple(map(markers.largest, shape)))


def maxima_of(sizes: Iterable[Size]) -> dict[int, int]:
    """Return the maxima of sizes by their examples.

    Raises:
        ValueError: two sizes with different maxima have the same example, which identifies a size.
    """
    maxima = {(size.example, size.maximum) for size in sizes}
    if len(dict(maxima)) < len(maxima):
        raise ValueError(f"Two sizes have the same example: {sorted(maxima)}")
    return dict(maxima)


def largest_of(graph: Graph, maxima: Mapping[int, int]) -> Callable[[Any], int]:
    """Return a function that evaluates an expression of a program's sizes for the largest call."""
    symbols = {
        size.node.expr: maxima[int(size.node.hint)]
        for node in graph.find_nodes(op="placeholder")
        for size in getattr(node.meta["val"], "shape", ())
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    }

    def largest(number: Any) -> int:
        return int(number.node.expr.subs(symbols)) if isinstance(number, torch.SymInt) else int(number)

    return largest


class _Markers:
    """Evaluates numbers that are products or sums of markers."""

    def __init__(self, sizes: Mapping[str, Size]) -> None:
        self.names: dict[int, str] = {}
        self._dimensions: dict[int, Any] = {}
        self._examples: dict[int, int] = {}
        self._maxima: dict[int, int] = {}
        for name, size in sizes.items():
            self.names[size.marker] = name
            # Without a maximum here, ExecuTorch plans XNNPACK's workspace for the example's sizes.
            self._dimensions[size.marker] = Dim(name, min=size.minimum)
            self._examples[size.marker] = size.example
            self._maxima[size.marker] = size.maximum
        self._sums = {size.marker + size.after: size for size in sizes.values() if size.after}

    def factors(self, number: int) -> tuple[list[int], int]:
        """Return the markers in a number with their multiplicity, and the remaining factor."""
        markers = []
        # sys.maxsize means "to the end" in slices.
        if 0 < number < sys.maxsize:
            for marker in self.names:
                while number % marker == 0:
                    markers.append(marker)
                    number //= marker
        return markers, number

    def example(self, number: int) -> int:
        """Return the number for the example's sizes."""
        if number in self._sums:
            size = self._sums[number]
            return size.example + self.example(size.after)
        markers, rest = self.factors(number)
        return rest * prod(self._examples[marker] for marker in markers)

    def largest(self, number: int) -> int:
        """Return the number for the largest call."""
        markers, rest = self.factors(number)
        return rest * prod(self._maxima[marker] for marker in markers)

    def dimension(self, number: int) -> Any:
        """Return torch.export's Dim for a number with one marker; None for any other number."""
        markers, rest = self.factors(number)
        if len(markers) != 1:
            return None
        return self._dimensions[markers[0]] if rest == 1 else rest * self._dimensions[markers[0]]

    def split(self, shape: Sequence[int]) -> list[int]:
        """Return a shape in which each marker of a product is a dimension of its own."""
        result = []
        for number in shape:
            markers, rest = self.factors(number)
            if len(markers) < 2:
                result.append(number)
            else:
                result += markers if rest == 1 else [*markers, rest]
        return result


class _DynamicGraph:
    """A graph that computes its sizes from its inputs.

    The value of each node for the example's sizes is known on the meta device.
    """

    def __init__(self, markers: _Markers) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self._markers = markers
        self._shapes = OperatorShapes()
        self._values: dict[Node, Any] = {}
        self._sizes: dict[int, Node] = {}

    def add_inputs(self, placeholders: Sequence[Node], shapes: Sequence[Sequence[int]]) -> None:
        """Add placeholders with split shapes, and the nodes that read and rejoin their dimensions."""
        for node, shape in zip(placeholders, shapes, strict=True):
            copy = self.copies[node] = self.graph.node_copy(node)
            example = [self._markers.example(number) for number in shape]
            self._values[copy] = torch.empty(example, dtype=node.meta["val"].dtype, device="meta")
        for node, shape in zip(placeholders, shapes, strict=True):
            for index, number in enumerate(shape):
                if number in self._markers.names and number not in self._sizes:
                    self._sizes[number] = self._call(aten.sym_size.int, self.copies[node], index)
        for node, shape in zip(placeholders, shapes, strict=True):
            known = node.meta["val"].shape
            if len(shape) != len(known):
                whole = [self._expression(number, node) for number in known]
                self.copies[node] = self._call(aten.reshape.default, self.copies[node], whole)

    def add_constant(self, node: Node, tensor: torch.Tensor) -> None:
        """Add a constant; raises Refusal if it has a dynamic dimension."""
        for number in tensor.shape:
            if markers := self._markers.factors(number)[0]:
                names = " x ".join(self._markers.names[marker] for marker in markers)
                raise Refusal(
                    "constant-with-size",
                    f"The constant {node.target} has the dimension {names}, which differs between calls.",
                    remedy=_REMEDY,
                )
        self.copies[node] = self.graph.node_copy(node)
        self._values[self.copies[node]] = to_meta(tensor)

    def add_call(self, node: Node) -> None:
        """Add an operator, with computed values for its numbers that contain markers."""
        copied = map_arg((node.args, node.kwargs), self.copies.__getitem__)
        arguments, named = map_aggregate(copied, lambda value: self._expression(value, node))
        expected = map_aggregate(to_meta(node.meta["val"]), self._shape)
        try:
            copy = self.copies[node] = self._call(node.target, *arguments, **named)
            shapes = map_aggregate(self._values[copy], lambda value: tuple(value.shape))
        except (RuntimeError, IndexError) as error:
            shapes = str(error).strip().splitlines()[0]
        if shapes != expected:
            raise Refusal(
                "number-not-of-input-sizes",
                f"A number of {node.format_node()} doesn't follow from the sizes of the inputs: the shapes "
                f"are {shapes}, but must be {expected}.",
                remedy=_REMEDY,
            )

    def _shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(self._markers.example(number) for number in value.shape)

    def _expression(self, value: Any, node: Node) -> Any:
        """Return the node that computes a number with markers; any other value stays as it is."""
        if type(value) is float and value:
            self._refuse_float(value, node)
        if type(value) is not int:
            return value
        markers, rest = self._markers.factors(value)
        if not markers:
            return value
        for marker in markers:
            if marker not in self._sizes:
                raise Refusal(
                    "size-without-input",
                    f"{node.format_node()} depends on {self._markers.names[marker]}, which is a dimension "
                    "of no input.",
                    remedy=_REMEDY,
                )
        if value not in self._sizes:
            sizes = [self._sizes[marker] for marker in markers]
            product = reduce(lambda left, size: self._call(operator.mul, left, size), sizes)
            self._sizes[value] = product if rest == 1 else self._call(operator.mul, product, rest)
        return self._sizes[value]

    def _refuse_float(self, value: float, node: Node) -> None:
        """Raise Refusal if a float is a multiple of a marker, or the inverse of one, as in a mean."""
        # Larger numbers stand for infinity.
        for number in (abs(value), abs(1 / value)):
            is_whole = number < _LARGEST and abs(number - round(number)) < 1e-9 * number
            if is_whole and self._markers.factors(round(number))[0]:
                raise Refusal(
                    "size-in-fraction",
                    f"{node.format_node()} contains a number that was computed from a dynamic size.",
                    remedy=_REMEDY,
                )

    def _call(self, target: Any, *arguments: Any, **named: Any) -> Node:
        """Add a call of a function, and compute its value for the example's sizes."""
        node = self.graph.call_function(target, arguments, named)
        known, known_named = map_arg((arguments, named), self._values.__getitem__)
        if target is aten.sym_size.int:
            self._values[node] = known[0].shape[known[1]]
        elif isinstance(target, torch._ops.OpOverload) or target is operator.getitem:
            self._values[node] = self._shapes.of(target, known, known_named)
        else:
            self._values[node] = target(*known)
        return node
