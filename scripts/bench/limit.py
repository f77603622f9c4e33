"""The least that a program can cost: its matrix products on its rows, and nothing else.

A product reads inputs of the right shape instead of what the model would have computed before it, and all of
its answer but one row is thrown away. Quantized layers still quantize what they read. Sums written as
products (a weight of one row) and products with constants belong to what a lowering makes of a model, not to
the model: they are left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

# From a computed value, or from a constant, to the operand of a quantized product; by name, because torchao
# registers its operators only when it is imported.
_ON_THE_WAY = {
    "torchao.choose_qparams_affine.default",
    "torchao.quantize_affine.default",
    "torchao.dequantize_affine.default",
    "export.access_subclass_inner_tensor.default",
    str(operator.getitem),
}


_BITS_OF_LOWEST_CODE = {-8: 4, -128: 8}


@dataclass(frozen=True)
class Product:
    """A matrix product of a graph: its floating point operations, the bytes of its weight or 0."""

    node: Node
    operations: int
    weight_bytes: int


def matrix_products(
    program: ExportedProgram, choose: Callable[[list[Product]], list[Product]] = list
) -> tuple[ExportedProgram, tuple[torch.Tensor, ...], list[Product]]:
    """The matrix products of a traced program as a program of their own, random inputs for it, their costs.

    Its inputs are f32, one for every distinct shape that a product reads; its outputs one row of each answer.
    `choose` may leave products out.
    """
    source = program.module(check_guards=False)
    products = choose([_measured(node) for node in _products(source.graph)])
    graph = Graph()
    inputs: dict[torch.Size, Node] = {}
    copies: dict[Node, Node] = {}
    # Placeholders come first in a graph.
    for product in products:
        for value in _computed(product.node):
            shape = value.meta["val"].shape
            if shape not in inputs:
                inputs[shape] = graph.placeholder(f"values_{len(inputs)}")
            copies[value] = inputs[shape]
    answers = [_one_row(graph, _copy(product.node, graph, copies)) for product in products]
    graph.output(tuple(answers))
    generator = torch.Generator().manual_seed(0)
    values = tuple(torch.randn(shape, generator=generator) for shape in inputs)
    with torch.no_grad():
        exported = torch.export.export(GraphModule(source, graph), values, strict=False)
    return exported, values, products


def _products(graph: Graph) -> Iterator[Node]:
    constant: set[Node] = set()
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.op == "get_attr" or (operands and constant.issuperset(operands)):
            constant.add(node)
        elif node.target is aten.linear.default:
            if operands[1].meta["val"].shape[0] > 1:
                yield node
        elif node.target is aten.bmm.default and constant.isdisjoint(operands):
            yield node


def _measured(node: Node) -> Product:
    left, right = node.all_input_nodes[:2]
    operations = 2 * math.prod(node.meta["val"].shape) * left.meta["val"].shape[-1]
    if node.target is aten.bmm.default:
        return Product(node, operations, 0)
    # A dequantized weight: its codes, their block, scales, zero points, type, lowest code.
    bits = _BITS_OF_LOWEST_CODE[right.args[5]] if str(right.target) in _ON_THE_WAY else 32
    return Product(node, operations, math.prod(right.meta["val"].shape) * bits // 8)


def _computed(node: Node) -> Iterator[Node]:
    """What an operand is made of that isn't constant, behind its quantization."""
    for value in node.all_input_nodes:
        if str(value.target) in _ON_THE_WAY:
            yield from _computed(value)
        elif value.op != "get_attr":
            yield value


def _copy(node: Node, graph: Graph, copies: dict[Node, Node]) -> Node:
    if node not in copies:
        for value in node.all_input_nodes:
            _copy(value, graph, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]


def _one_row(graph: Graph, answer: Node) -> Node:
    # Slices of leading dimensions copy little; a reshape could copy everything.
    for dim in range(answer.meta["val"].dim() - 1):
        shape = answer.meta["val"].shape
        cut = graph.call_function(aten.slice.Tensor, (answer, dim, 0, 1))
        cut.meta["val"] = torch.empty((*shape[:dim], 1, *shape[dim + 1 :]), device="meta")
        answer = cut
    return answer
