"""Write rotary embeddings, as transformers computes them, in operators that stay in one delegate.

x * cos + cat(-x[half:], x[:half]) * sin        for x [rows, heads, length, width]

In the graph of a block the rotation of halves is a linear layer, which has derivatives and which a single
token computes in one operator. For many tokens, a copy of the halves in the other order takes a fraction of
the time of the layer, and signs and scales are products with the tables, which are small:

(x * cos + rotated(x) * sin) * scale = x * (cos * scale) + swapped(x) * (sin * scale * signs)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.modules import get_attribute
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def write_rotations_as_linear(graph_module: GraphModule) -> None:
    """Write the rotation of halves of a head as a linear layer, in place.

    Cosines and sines stay products with tables. Slices along a dynamic number of rows would leave the
    delegate.
    """
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        source = _halves(node)
        if source is not None:
            writer.replace(node, rotate_by_linear, source, True)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def write_rotations_as_copies(graph_module: GraphModule) -> None:
    """Write linear layers that rotate halves as copies of the halves, in core operators and in place.

    Signs and scales become part of the tables that rotated values are multiplied with.
    """
    writer, graph = GraphWriter(graph_module), graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        writer.replace(node, _scale_of_tables, *node.args)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        signs = _signs_of_halves(graph_module, node)
        if signs is not None:
            for user in [*node.users]:
                if user.target is aten.mul.Tensor and _table_of(user) is not None:
                    writer.replace(user, _swapped_times_table, node, _table_of(user), signs)
            writer.replace(node, _swapped_times_table, node, None, signs)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _scale_of_tables(writer: GraphWriter, total: Any, scale: Any) -> Node | None:
    """Write (x table + y table) scale with scaled tables; None if the operands are something else."""
    if not isinstance(scale, float) or total.target is not aten.add.Tensor or len(total.users) > 1:
        return None
    products = total.all_input_nodes
    tables = [_table_of(product) for product in products]
    if len(products) < 2 or None in tables or any(len(product.users) > 1 for product in products):
        return None
    scaled = []
    for product, table in zip(products, tables, strict=True):
        (value,) = (argument for argument in product.args if argument is not table)
        scaled.append(writer.times(value, writer.times(table, scale)))
    return writer.plus(*scaled)


def _table_of(product: Node) -> Node | None:
    """Return the factor of a product that is broadcast to the other factor's shape, if there is one."""
    if product.target is not aten.mul.Tensor or len(product.all_input_nodes) < 2:
        return None
    table: Node = min(product.all_input_nodes, key=lambda factor: factor.meta["val"].numel())
    return table if table.meta["val"].numel() < product.meta["val"].numel() else None


def _signs_of_halves(graph_module: GraphModule, layer: Node) -> torch.Tensor | None:
    """Return the signs of the halves that a layer puts into the other order, or None for other layers."""
    weight: Any = layer.args[1]
    if weight.op != "get_attr":
        return None
    matrix = get_attribute(graph_module, str(weight.target))
    width = len(matrix)
    if matrix.is_meta or matrix.shape != (width, width) or width % 2:
        return None
    signs = matrix.sum(1)
    swap = torch.eye(width, dtype=matrix.dtype).roll(width // 2, 0)
    is_swap = bool((signs.abs() == 1).all()) and torch.equal(matrix, signs.unsqueeze(1) * swap)
    return signs if is_swap else None


def _swapped_times_table(writer: GraphWriter, layer: Node, table: Node | None, signs: torch.Tensor) -> Node:
    """Write the halves of a layer's input in the other order, times a table, with the signs of the layer."""
    source: Any = layer.args[0]
    dim, width = source.meta["val"].dim() - 1, len(signs)
    bounds = (width // 2, width), (0, width // 2)
    halves = [writer.call(aten.slice_copy.Tensor, source, dim, *each) for each in bounds]
    swapped = writer.call(aten.cat.default, halves, dim)
    signs_of_table = writer.constant(signs)
    return writer.times(swapped, signs_of_table if table is None else writer.times(table, signs_of_table))


def _halves(node: Node) -> Node | None:
    """Return x if a node is cat(-x[half:], x[:half]) in the last of four dimensions, else None."""
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    source: Node = parts[1].args[0] if parts[1].target is aten.slice.Tensor else parts[1]
    shape = source.meta["val"].shape
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(shape) != 4 or dim % 4 != 3 or shape[-1] % 2:
        return None
    bounds = [bounds_of(part, source, shape[-1]) for part in (parts[0].args[0], parts[1])]
    half = shape[-1] // 2
    return source if bounds == [(half, shape[-1], 1), (0, half, 1)] else None


def rotate_by_linear(writer: GraphWriter, source: Node, of_halves: bool) -> Node:
    """Write a linear layer that rotates pairs of elements: from the two halves, or neighbours."""
    width = source.meta["val"].shape[-1]
    rotation, unit = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(width // 2)
    rows = torch.kron(rotation, unit) if of_halves else torch.kron(unit, rotation)
    return writer.call(aten.linear.default, source, writer.constant(rows))


def bounds_of(node: Any, source: Node, width: int) -> tuple[int, int, int] | None:
    """Return start, end and step of a slice of the last of four dimensions, or None for other nodes."""
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return None
    arguments: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = arguments + defaults[len(arguments) :]
    if dim % 4 != 3:
        return None
    return int(start or 0), min(width, width if end is None else int(end)), int(step)
