"""Values that a model computes from positions alone, such as sines, become tables.

Such operators depend on the length of a row only. They are evaluated here, and the result determines the type
of table: position ids, a causal mask, or rows of a tensor.
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
from server_export.trace.tables import ModelTable, ModelTables, insert_table

aten = torch.ops.aten

_ARITHMETIC = members(Category.ARITHMETIC)
_REMEDY = "This architecture isn't supported. Use another checkpoint, and please report it."


def fold_positions(graph: ModelGraph) -> None:
    """Replace values that depend on positions alone by tables and constants, in place.

    Args:
        graph: the graph of a model; constants are added to its `buffers`.

    Raises:
        Refusal: a value that depends on positions fits no type of table.
    """
    graph_module, positions = graph.graph_module, graph.positions
    for node in [node for node in positions.ends if node.users]:
        _replace_node(graph_module, node, positions)
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
    """Remove casts to the dtype or device that a tensor already has, in place."""
    for node in graph_module.graph.nodes:
        if node.target in (aten.to.dtype, aten.to.dtype_layout) and node.args:
            (source,) = node.all_input_nodes
            if source.meta["val"].dtype is node.meta["val"].dtype:
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)


def _replace_node(graph_module: GraphModule, node: Node, positions: Positions) -> None:
    shape = shape_of_one_row(node)
    token_dims = [dim for dim, size in enumerate(shape) if size % TOKENS == 0]
    tables = positions.tables
    value = positions.of(node, tables.longest)
    writer = GraphWriter(graph_module)
    if not token_dims:
        _write_constant(graph_module, node, value)
    elif bool((value == value.reshape(-1)[0]).all()):
        ones = torch.full([1] * len(shape), value.reshape(-1)[0].item(), dtype=value.dtype)
        writer.replace(node, lambda writer: expand_to_users(writer, node, writer.constant(ones)))
    elif value.dtype == torch.long and value.numel() == tables.longest and _is_arange(value):
        writer.replace(node, lambda writer: _position_ids(writer, node, tables, int(value.reshape(-1)[0])))
    elif len(token_dims) == 1 and (value.dtype == torch.float32 or _is_used_as_number(node, positions)):
        writer.replace(node, lambda writer: _table_rows(writer, node, tables, token_dims[0], value.float()))
    elif len(token_dims) == 2 and (window := window_of_mask(value)) is not None:
        writer.replace(node, lambda writer: _causal_mask(writer, node, tables, window))
    else:
        raise Refusal(
            "computed-of-positions",
            f"The model computes {node.target} from positions, {list(value.shape)} {value.dtype} for "
            f"{tables.longest} tokens. Supported are masks, position ids and tables with a row per token.",
            operator=str(node.target),
            remedy=_REMEDY,
        )


def _is_used_as_number(node: Node, positions: Positions) -> bool:
    """Return whether a boolean is used in arithmetic, as 1 or 0."""
    users = [user for user in node.users if user not in positions.is_computed]
    return node.meta["val"].dtype is torch.bool and all(user.target in _ARITHMETIC for user in users)


def _is_arange(value: torch.Tensor) -> bool:
    flat = value.reshape(-1)
    return bool((flat == torch.arange(len(flat)) + flat[0]).all()) and int(flat[0]) >= 0


def _write_constant(graph_module: GraphModule, node: Node, value: torch.Tensor) -> None:
    name = f"of_positions_{node.name}"
    graph_module.register_buffer(name, value.clone())
    with graph_module.graph.inserting_before(node):
        new = graph_module.graph.get_attr(name)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


def _position_ids(writer: GraphWriter, node: Node, tables: ModelTables, first: int) -> Node:
    key = "positions" if first == 0 else ("positions", first)
    table = insert_table(node, tables, key, ModelTable("positions", first=first), [1, TOKENS], torch.long)
    are_looked_up = all(
        user.target is aten.embedding.default and _only_broadcasts_to_rows(user) for user in node.users
    )
    if shape_of_one_row(node) == [TOKENS] and are_looked_up:
        # The dimension of rows stays, because every sequence may have its own positions.
        for user in node.users:
            user.meta["val"] = user.meta["val"].unsqueeze(0)
        return table
    return expand_to_users(writer, node, writer.reshape(table, shape_of_one_row(node)))


def _only_broadcasts_to_rows(node: Node) -> bool:
    """Return whether all users of a value without rows combine it with values that have rows."""
    dimensions = node.meta["val"].dim()
    return all(user.target in _ARITHMETIC and user.meta["val"].dim() > dimensions for user in node.users)


def shape_of_one_row(node: Node) -> list[int]:
    """Return the shape that a value would have for a single row."""
    return [resized(resized(size, COPIES, 1), BATCH, 1) for size in node.meta["val"].shape]


def expand_to_users(writer: GraphWriter, node: Node, replacement: Node) -> Node:
    """Expand the replacement of a node to the node's shape, unless all users broadcast it."""
    shape = list(node.meta["val"].shape)
    if shape == list(replacement.meta["val"].shape) or all(user.target in _ARITHMETIC for user in node.users):
        return replacement
    return writer.call(aten.expand.default, replacement, shape)


def _table_rows(writer: GraphWriter, node: Node, tables: ModelTables, dim: int, value: torch.Tensor) -> Node:
    """Write a tensor whose dimension `dim` is the tokens as rows of a table."""
    shape = shape_of_one_row(node)
    rest = [size for axis, size in enumerate(shape) if axis != dim]
    rows = value.movedim(dim, 0).reshape(tables.longest, math.prod(rest)).contiguous()
    table = ModelTable("rotary", values=rows)
    key = ("rows", rows.shape, rows.numpy().tobytes())
    looked_up = insert_table(node, tables, key, table, [1, TOKENS, rows.shape[1]], torch.float32)
    if dim == 0 and _only_broadcasts_to_rows(node):
        return writer.reshape(looked_up, [1, *shape])
    if not any(size > 1 for size in rest[:dim]):
        return expand_to_users(writer, node, writer.reshape(looked_up, shape))
    unflattened = writer.reshape(looked_up, [TOKENS, *rest])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    return expand_to_users(writer, node, writer.call(aten.permute.default, unflattened, order))


def window_of_mask(value: torch.Tensor) -> int | None:
    """Return the window of an additive causal mask, or the length of the row if the mask has no window.

    The result is None if the tensor isn't a causal mask.
    """
    if not value.dtype.is_floating_point:
        return None
    hidden = value <= HIDDEN
    return causal_window(hidden) if not bool(value[~hidden].any()) else None


def _causal_mask(writer: GraphWriter, node: Node, tables: ModelTables, window: int) -> Node:
    return expand_to_users(
        writer, node, writer.reshape(causal_table(node, tables, window), shape_of_one_row(node))
    )


def causal_table(before: Node, tables: ModelTables, window: int) -> Node:
    """Insert the table of a causal mask with this window before a node."""
    window_or_none = None if window >= tables.longest else window
    table = ModelTable("causal", window_or_none)
    return insert_table(
        before, tables, ("causal", window_or_none, 1), table, [1, TOKENS, TOKENS], torch.float32
    )
