"""What a model computes of positions alone, such as sines of their numbers, becomes a table.

Such operators depend on the length of a row and on nothing else. They are run here, and their numbers tell
which table holds them: the numbers of positions, a causal mask, or rows of one tensor.
"""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node

from prge.errors import Refusal
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import get_attribute
from server_export.ir.operators import Category, members
from server_export.ir.shapes import resized
from server_export.ir.writer import GraphWriter
from server_export.trace.known_positions import Positions
from server_export.trace.model_graph import WHOLE_PREFIX, ModelGraph
from server_export.trace.scores import HIDDEN, causal_window
from server_export.trace.tables import ModelTable, ModelTables, asked

aten = torch.ops.aten

_ARITHMETIC = members(Category.ARITHMETIC)
_REMEDY = "this architecture isn't supported; take another checkpoint, and please report it"


def fold_positions(graph: ModelGraph) -> None:
    """Make tables and constants of what depends on positions alone, in place.

    Args:
        graph: of a model; `buffers` gets the constants.

    Raises:
        Refusal: numbers that depend on positions are of no kind that a table has.
    """
    graph_module, positions = graph.graph_module, graph.positions
    for node in [node for node in positions.ends if node.users]:
        _replace(graph_module, node, positions)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    names = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    tensors = {name: get_attribute(graph_module, name) for name in names}
    graph.buffers.update(
        {
            name.removeprefix(WHOLE_PREFIX): tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta
        }
    )


def remove_redundant_casts(graph_module: GraphModule) -> None:
    """Take out what brings numbers to a place or type that they have, in place."""
    for node in graph_module.graph.nodes:
        if node.target in (aten.to.dtype, aten.to.dtype_layout) and node.args:
            (source,) = node.all_input_nodes
            if source.meta["val"].dtype is node.meta["val"].dtype:
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)


def _replace(graph_module: GraphModule, node: Node, positions: Positions) -> None:
    shape = of_one_row(node)
    long = [dim for dim, size in enumerate(shape) if size % TOKENS == 0]
    tables = positions.tables
    value = positions.of(node, tables.longest)
    writer = GraphWriter(graph_module)
    if not long:
        _write_constant(graph_module, node, value)
    elif bool((value == value.reshape(-1)[0]).all()):
        ones = torch.full([1] * len(shape), value.reshape(-1)[0].item(), dtype=value.dtype)
        writer.replace(node, lambda writer: spread(writer, node, writer.constant(ones)))
    elif value.dtype == torch.long and value.numel() == tables.longest and _counts(value):
        writer.replace(node, lambda writer: _numbers(writer, node, tables, int(value.reshape(-1)[0])))
    elif len(long) == 1 and (value.dtype == torch.float32 or _is_number(node, positions)):
        writer.replace(node, lambda writer: _rows(writer, node, tables, long[0], value.float()))
    elif len(long) == 2 and (window := window_of_mask(value)) is not None:
        writer.replace(node, lambda writer: _mask(writer, node, tables, window))
    else:
        raise Refusal(
            "computed-of-positions",
            f"the model computes {node.target} of positions, {list(value.shape)} {value.dtype} of a row of "
            f"{tables.longest} tokens; masks, positions and tables with a row for each token are known",
            operator=str(node.target),
            remedy=_REMEDY,
        )


def _is_number(node: Node, positions: Positions) -> bool:
    """Whether what holds or doesn't is calculated with, as 1 or 0."""
    users = [user for user in node.users if user not in positions.is_made]
    return node.meta["val"].dtype is torch.bool and all(user.target in _ARITHMETIC for user in users)


def _counts(value: torch.Tensor) -> bool:
    flat = value.reshape(-1)
    return bool((flat == torch.arange(len(flat)) + flat[0]).all()) and int(flat[0]) >= 0


def _write_constant(graph_module: GraphModule, node: Node, value: torch.Tensor) -> None:
    name = f"of_positions_{node.name}"
    graph_module.register_buffer(name, value.clone())
    with graph_module.graph.inserting_before(node):
        new = graph_module.graph.get_attr(name)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


def _numbers(writer: GraphWriter, node: Node, tables: ModelTables, first: int) -> Node:
    key = "positions" if first == 0 else ("positions", first)
    found = asked(node, tables, key, ModelTable("positions", first=first), [1, TOKENS], torch.long)
    are_looked_up = all(user.target is aten.embedding.default and _meets_rows(user) for user in node.users)
    if of_one_row(node) == [TOKENS] and are_looked_up:
        # A row keeps a dimension of its own: there may be one for each sequence.
        for user in node.users:
            user.meta["val"] = user.meta["val"].unsqueeze(0)
        return found
    return spread(writer, node, writer.reshape(found, of_one_row(node)))


def _meets_rows(node: Node) -> bool:
    """Whether what has no dimension of rows meets nothing but what has one."""
    dimensions = node.meta["val"].dim()
    return all(user.target in _ARITHMETIC and user.meta["val"].dim() > dimensions for user in node.users)


def of_one_row(node: Node) -> list[int]:
    """The shape of a value, were there one row."""
    return [resized(resized(size, COPIES, 1), BATCH, 1) for size in node.meta["val"].shape]


def spread(writer: GraphWriter, node: Node, found: Node) -> Node:
    """What takes a node's place, as often as there are rows where more than arithmetic reads it."""
    shape = list(node.meta["val"].shape)
    if shape == list(found.meta["val"].shape) or all(user.target in _ARITHMETIC for user in node.users):
        return found
    return writer.call(aten.expand.default, found, shape)


def _rows(writer: GraphWriter, node: Node, tables: ModelTables, dim: int, value: torch.Tensor) -> Node:
    """A tensor whose dimension `dim` is the tokens, as rows of a table."""
    shape = of_one_row(node)
    rest = [size for place, size in enumerate(shape) if place != dim]
    rows = value.movedim(dim, 0).reshape(tables.longest, math.prod(rest)).contiguous()
    table = ModelTable("rotary", values=rows)
    key = ("rows", rows.shape, rows.numpy().tobytes())
    found = asked(node, tables, key, table, [1, TOKENS, rows.shape[1]], torch.float32)
    if dim == 0 and _meets_rows(node):
        return writer.reshape(found, [1, *shape])
    if not any(size > 1 for size in rest[:dim]):
        return spread(writer, node, writer.reshape(found, shape))
    apart = writer.reshape(found, [TOKENS, *rest])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    return spread(writer, node, writer.call(aten.permute.default, apart, order))


def window_of_mask(value: torch.Tensor) -> int | None:
    """The window of a causal mask that is added; as long as the row if a token sees all behind it."""
    if not value.dtype.is_floating_point:
        return None
    hidden = value <= HIDDEN
    return causal_window(hidden) if not bool(value[~hidden].any()) else None


def _mask(writer: GraphWriter, node: Node, tables: ModelTables, window: int) -> Node:
    return spread(writer, node, writer.reshape(causal_table(node, tables, window), of_one_row(node)))


def causal_table(before: Node, tables: ModelTables, window: int) -> Node:
    window_or_none = None if window >= tables.longest else window
    table = ModelTable("causal", window_or_none)
    return asked(before, tables, ("causal", window_or_none, 1), table, [1, TOKENS, TOKENS], torch.float32)
