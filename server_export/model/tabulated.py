"""What a model computes of positions alone becomes tables: it has a size of its own for every length of rows.

distances of tokens, and the numbers of their buckets     relative
sines of positions                                        rotary, which are rows of a tensor
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from prge.errors import BundleError
from server_export.graph.modules import attribute
from server_export.graph.shapes import without_memory
from server_export.model.tables import TABLE, ModelTable, ModelTables

aten = torch.ops.aten

_KNOWN_TABLES = ("positions", "zeros")
# How far a number of a graph may be from a multiple of a length, such as that of the last position.
_NEAR = 8
# What is found for the longest rows is tried for rows of so many tokens.
_SHORT = 7


def tabulate(graph_module: GraphModule, tables: ModelTables, tokens: int, others: Iterable[int]) -> None:
    """Let what depends on positions alone be tables, in place.

    Args:
        graph_module: of a whole model; its nodes carry `meta["val"]`.
        tables: of the model.
        tokens: the length that it was traced with.
        others: the other sizes that it was traced with, which no table has.

    Raises:
        BundleError: such a value is not by distance, and no row of a position.
    """
    known = _of_positions(graph_module, tables, tokens, [*others])
    for node in known:
        users = [user for user in node.users if user not in known]
        if users and node.target is not TABLE and tokens in _shape(node):
            new = _as_table(graph_module, node, known, tables, tokens)
            node.replace_all_uses_with(new, delete_user_cb=users.__contains__)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _of_positions(
    graph_module: GraphModule, tables: ModelTables, tokens: int, others: list[int]
) -> dict[Node, None]:
    """Nodes whose values depend on nothing but positions, in order."""
    known: dict[Node, None] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            tensor = attribute(graph_module, str(node.target))
            is_known = isinstance(tensor, torch.Tensor) and not tensor.is_meta
        elif node.target is TABLE:
            is_known = tables.all[node.args[0]].kind in _KNOWN_TABLES
        else:
            is_known = node.op == "call_function" and all(source in known for source in node.all_input_nodes)
        if is_known and not any(number % other == 0 for number in _numbers(node) for other in others):
            known[node] = None
    return known


def _numbers(node: Node) -> list[int]:
    """All numbers that a node has, but for 0."""
    found = [*_shape(node)]
    map_aggregate((node.args, node.kwargs), lambda value: found.append(value) if type(value) is int else None)
    return [number for number in found if number]


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _as_table(
    graph_module: GraphModule, node: Node, known: dict[Node, None], tables: ModelTables, tokens: int
) -> Node:
    """A node of a table that has a node's values."""
    value, short = (
        _values(graph_module, node, known, tables, tokens, length) for length in (tables.longest, _SHORT)
    )
    shape = [size for size in _shape(node) if size != 1]
    is_square = shape == [tokens, tokens]
    if value.dtype is torch.bool:
        value, short = value.float(), short.float()
    table = _relative(value) if is_square else _rows(value) if shape[0] == tokens else None
    length = min(_SHORT, tables.longest)
    if table is None or not torch.equal(
        table.of(length).reshape(-1), short.reshape(-1).to(table.of(length).dtype)
    ):
        raise BundleError(
            f"what the model computes of positions alone ({node.target}, {[*_shape(node)]}) is no table",
            remedy="this architecture isn't supported; take another checkpoint, and please report it",
        )
    graph = graph_module.graph
    with graph.inserting_before(node):
        wanted = node.meta["val"]
        found = _asked(graph, tables, table, shape, value.dtype)
        new = _call(graph, aten.reshape.default, found, list(wanted.shape))
        if wanted.dtype is torch.bool:
            new = _call(graph, aten.ne.Scalar, new, 0)
        elif wanted.dtype is not value.dtype:
            new = _call(graph, aten.to.dtype, new, wanted.dtype)
    return new


def _asked(graph: Any, tables: ModelTables, table: ModelTable, shape: list[int], dtype: Any) -> Node:
    if table.kind == "positions":
        number = tables.number(("positions", table.first), lambda: table)
        return _call(graph, TABLE, number, [1, *shape], dtype, torch.device("meta"))
    assert table.values is not None
    content = torch.as_tensor(table.values).numpy().tobytes()
    number = tables.number((table.kind, dtype, content), lambda: table)
    shape = [1, *shape] if len(shape) > 1 else [1, *shape, 1]
    return _call(graph, TABLE, number, shape, dtype, torch.device("meta"))


def _call(graph: Any, target: Any, *arguments: Any) -> Node:
    node: Node = graph.call_function(target, arguments)
    given = map_arg(arguments, lambda source: source.meta["val"])
    node.meta["val"] = without_memory(
        torch.empty(given[1], dtype=given[2], device="meta") if target is TABLE else target(*given)
    )
    return node


def _relative(value: torch.Tensor) -> ModelTable | None:
    """A table by distance, where the values are."""
    size = round(value.numel() ** 0.5)
    square = value.reshape(size, size)
    values = torch.cat([square[0, 1:].flip(0), square[:, 0]]).contiguous()
    table = ModelTable("relative", values=values)
    return table if torch.equal(table.of(size)[0], square) else None


def _rows(value: torch.Tensor) -> ModelTable | None:
    """A table of rows by position, f32."""
    rows = next(size for size in value.shape if size != 1)
    if value.dtype is torch.long and value.numel() == rows:
        first = int(value.ravel()[0])
        counted = torch.arange(first, first + rows)
        return ModelTable("positions", first=first) if torch.equal(value.ravel(), counted) else None
    if value.dtype is not torch.float32:
        return None
    return ModelTable("rotary", values=value.reshape(rows, -1).contiguous())


def _values(
    graph_module: GraphModule,
    wanted: Node,
    known: dict[Node, None],
    tables: ModelTables,
    tokens: int,
    length: int,
) -> torch.Tensor:
    """What a node answers for rows of a length."""
    needed: set[Node] = set()
    ahead = [wanted]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            needed.add(node)
            ahead.extend(node.all_input_nodes)

    def sized(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if type(value) is not int or abs(value) > 1 << 40:
            return value
        times = round(value / tokens)
        return value + times * (length - tokens) if abs(value - times * tokens) <= _NEAR else value

    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in (node for node in known if node in needed):
            if node.op == "get_attr":
                values[node] = attribute(graph_module, str(node.target))
            elif node.target is TABLE:
                values[node] = tables.all[node.args[0]].of(length)
            else:
                arguments, named = map_arg(map_aggregate((node.args, node.kwargs), sized), values.__getitem__)
                values[node] = node.target(*arguments, **named)
    found: torch.Tensor = values[wanted]
    return found
