"""Programs of any size, from graphs of one.

A model is traced and transformed with sizes that nothing else in it is a multiple of: large primes, its
markers. Here every number of a graph that is made of markers becomes an expression of its inputs' shapes, and
torch.export traces the graph once more with these unknown.
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
from prge.files.chain import Interface, TensorSpec
from server_export.ir.block import Block
from server_export.ir.modules import attribute
from server_export.ir.shapes import Shapes, without_memory
from server_export.library_errors import torch_export_errors

aten = torch.ops.aten

_REMEDY = "the architecture isn't supported; take another checkpoint, and please report it"
# A float holds all whole numbers up to here.
_LARGEST = 2.0**53


@dataclass(frozen=True)
class Size:
    """A size that every call chooses.

    Attributes:
        marker: the large prime that the graph has in its place.
        example: what torch.export traces with: at least 2, and no width of the model.
        minimum: the least that a call may choose.
        maximum: the most; memory is planned for it.
        after: marker of the size that follows it in one dimension, or 1, if any does: only values have it in
            their shapes, no number of an operator.
    """

    marker: int
    example: int
    minimum: int
    maximum: int
    after: int = 0


def dynamic_program(graph_module: GraphModule, sizes: Mapping[str, Size]) -> ExportedProgram:
    """The program of a graph that was traced with markers, for all sizes within their bounds.

        dynamic_program(block, {"rows": Size(10007, 3, 1, 16), "tokens": Size(10009, 5, 1, 128)})

    Args:
        graph_module: of functional operators; its nodes carry `meta["val"]`. Not changed.
        sizes: by name; the graph needn't have all of them.

    Returns:
        A program of the same inputs, but for dimensions that are products of sizes: one of copies x batch
        becomes two, in the order of `sizes`. What lies in memory stays the same.

    Raises:
        Refusal: a number can't be told by the inputs' shapes, or a constant has a size in its shape.
    """
    markers = _Markers(sizes)
    dynamic = _DynamicGraph(markers)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [markers.split(node.meta["val"].shape) for node in placeholders]
    dynamic.add_inputs(placeholders, inputs)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            dynamic.add_constant(node, attribute(graph_module, str(node.target)))
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
            # Strides give rise to min(tokens, tokens^2) = tokens, which torch.export can't see to hold.
            prefer_deferred_runtime_asserts_over_guards=True,
        )


@dataclass(frozen=True)
class Method:
    """A block's method: its graph in marker sizes, and the sizes that a call chooses, by name."""

    block: Block
    sizes: Mapping[str, Size]

    def program(self) -> ExportedProgram:
        """The program for all sizes within their bounds; see `dynamic_program`."""
        return dynamic_program(self.block.graph_module, self.sizes)

    def interface(self) -> Interface:
        """Names of inputs and outputs, and their specs in the largest call."""
        markers = _Markers(self.sizes)
        inputs = {
            port.name: _spec(markers, node.meta["val"].dtype, markers.split(node.meta["val"].shape))
            for port, node in self.block.inputs.items()
        }
        answers = (node.meta["val"] for node in self.block.graph_module.graph.output_node().args[0])
        outputs = tuple(_spec(markers, answer.dtype, answer.shape) for answer in answers)
        names = tuple(port.name for port in self.block.outputs)
        return Interface(tuple(inputs), names, tuple(inputs.values()), outputs)

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name, at the sizes that the program is traced with."""
        markers = _Markers(self.sizes)
        return {
            port.name: tuple(map(markers.example, markers.split(node.meta["val"].shape)))
            for port, node in self.block.inputs.items()
        }


def _spec(markers: _Markers, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(str(dtype).removeprefix("torch."), tuple(map(markers.largest, shape)))


def maxima_of(sizes: Iterable[Size]) -> dict[int, int]:
    """The largest number that stands for each example.

    Raises:
        ValueError: two sizes of other maxima have the same example, by which they are told apart.
    """
    maxima = {(size.example, size.maximum) for size in sizes}
    if len(dict(maxima)) < len(maxima):
        raise ValueError(f"two sizes have the same example: {sorted(maxima)}")
    return dict(maxima)


def largest_of(graph: Graph, maxima: Mapping[int, int]) -> Callable[[Any], int]:
    """What gives the number that an expression of a program's sizes is in the largest call."""
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
    """What numbers that are made of markers stand for."""

    def __init__(self, sizes: Mapping[str, Size]) -> None:
        self.names: dict[int, str] = {}
        self._dimensions: dict[int, Any] = {}
        self._examples: dict[int, int] = {}
        self._maxima: dict[int, int] = {}
        for name, size in sizes.items():
            self.names[size.marker] = name
            # Without a maximum ExecuTorch tells XNNPACK of the example, and of no larger workspace.
            self._dimensions[size.marker] = Dim(name, min=size.minimum)
            self._examples[size.marker] = size.example
            self._maxima[size.marker] = size.maximum
        self._sums = {size.marker + size.after: size for size in sizes.values() if size.after}

    def factors(self, number: int) -> tuple[list[int], int]:
        """The markers in a number, each as often as it divides it, and the rest."""
        found = []
        # The largest number means "to the end".
        if 0 < number < sys.maxsize:
            for marker in self.names:
                while number % marker == 0:
                    found.append(marker)
                    number //= marker
        return found, number

    def example(self, number: int) -> int:
        """The number at the example's sizes."""
        if number in self._sums:
            size = self._sums[number]
            return size.example + self.example(size.after)
        found, rest = self.factors(number)
        return rest * prod(self._examples[marker] for marker in found)

    def largest(self, number: int) -> int:
        """The number in the largest call."""
        found, rest = self.factors(number)
        return rest * prod(self._maxima[marker] for marker in found)

    def dimension(self, number: int) -> Any:
        """What torch.export is told of a dimension with one marker in it; None of any other."""
        found, rest = self.factors(number)
        if len(found) != 1:
            return None
        return self._dimensions[found[0]] if rest == 1 else rest * self._dimensions[found[0]]

    def split(self, shape: Sequence[int]) -> list[int]:
        """A shape in which products of markers are dimensions of their own."""
        result = []
        for number in shape:
            found, rest = self.factors(number)
            if len(found) < 2:
                result.append(number)
            else:
                result += found if rest == 1 else [*found, rest]
        return result


class _DynamicGraph:
    """A graph that computes its sizes; every node's value at the example's sizes is known, without memory."""

    def __init__(self, markers: _Markers) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self._markers = markers
        self._shapes = Shapes()
        self._values: dict[Node, Any] = {}
        self._sizes: dict[int, Node] = {}

    def add_inputs(self, placeholders: Sequence[Node], shapes: Sequence[Sequence[int]]) -> None:
        """Placeholders of other shapes, and the nodes that stand for what the graph had."""
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
        """A constant, which has no sizes."""
        for number in tensor.shape:
            if found := self._markers.factors(number)[0]:
                names = " x ".join(self._markers.names[marker] for marker in found)
                raise Refusal(
                    "constant-with-size",
                    f"the constant {node.target} has a dimension of {names}, which only a call tells",
                    remedy=_REMEDY,
                )
        self.copies[node] = self.graph.node_copy(node)
        self._values[self.copies[node]] = without_memory(tensor)

    def add_call(self, node: Node) -> None:
        """An operator, whose numbers are computed where they are made of markers."""
        copied = map_arg((node.args, node.kwargs), self.copies.__getitem__)
        arguments, named = map_aggregate(copied, lambda value: self._expression(value, node))
        expected = map_aggregate(without_memory(node.meta["val"]), self._shape)
        try:
            copy = self.copies[node] = self._call(node.target, *arguments, **named)
            found = map_aggregate(self._values[copy], lambda value: tuple(value.shape))
        except (RuntimeError, IndexError) as error:
            found = str(error).strip().splitlines()[0]
        if found != expected:
            raise Refusal(
                "number-not-of-input-sizes",
                f"a number of {node.format_node()} can't be told by the sizes of inputs: it gives {found} "
                f"where {expected} are due",
                remedy=_REMEDY,
            )

    def _shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(self._markers.example(number) for number in value.shape)

    def _expression(self, value: Any, node: Node) -> Any:
        """The node of a number that is made of markers; anything else as it is."""
        if type(value) is float and value:
            self._refuse_float(value, node)
        if type(value) is not int:
            return value
        found, rest = self._markers.factors(value)
        if not found:
            return value
        for marker in found:
            if marker not in self._sizes:
                raise Refusal(
                    "size-without-input",
                    f"{node.format_node()} depends on {self._markers.names[marker]}, which no input tells",
                    remedy=_REMEDY,
                )
        if value not in self._sizes:
            sizes = [self._sizes[marker] for marker in found]
            whole = reduce(lambda product, size: self._call(operator.mul, product, size), sizes)
            self._sizes[value] = whole if rest == 1 else self._call(operator.mul, whole, rest)
        return self._sizes[value]

    def _refuse_float(self, value: float, node: Node) -> None:
        # As a scale or as a mean's share; far larger numbers stand for infinity.
        for number in (abs(value), abs(1 / value)):
            is_whole = number < _LARGEST and abs(number - round(number)) < 1e-9 * number
            if is_whole and self._markers.factors(round(number))[0]:
                raise Refusal(
                    "size-in-fraction",
                    f"{node.format_node()} has a size inside of a number that isn't whole",
                    remedy=_REMEDY,
                )

    def _call(self, target: Any, *arguments: Any, **named: Any) -> Node:
        node = self.graph.call_function(target, arguments, named)
        known, known_named = map_arg((arguments, named), self._values.__getitem__)
        if target is aten.sym_size.int:
            self._values[node] = known[0].shape[known[1]]
        elif isinstance(target, torch._ops.OpOverload) or target is operator.getitem:
            self._values[node] = self._shapes.of(target, known, known_named)
        else:
            self._values[node] = target(*known)
        return node
