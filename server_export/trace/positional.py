"""What a model computes of positions alone, such as sines of their numbers, becomes a table.

Such operators depend on the length of a row and on nothing else. They are run here, and their numbers tell
which table holds them: the numbers of positions, a causal mask, or rows of one tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from prge.errors import BundleError
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import attribute
from server_export.ir.operators import Category, members
from server_export.ir.shapes import fill_in_values, resized
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.writer import Writer
from server_export.trace.scores import (
    HIDDEN,
    add_masks,
    causal_window,
    drop_least,
    give_numbers,
    give_places,
    slopes_and_places,
)
from server_export.trace.tables import TABLE, ModelTable, ModelTables, asked
from server_export.trace.tracing import WHOLE_PREFIX

aten = torch.ops.aten

# What only lays numbers out in another way.
_LAYOUTS = members(
    *(Category.IDENTITY, Category.CAST, Category.CAST_LIKE, Category.SPLIT, Category.RESHAPE),
    *(Category.SQUEEZE, Category.PERMUTE, Category.EXPAND, Category.EXPAND_LIKE),
)
_ARITHMETIC = members(Category.ARITHMETIC)
# Positions that a table may have before those of a row.
_MOST_MORE = 8
_REMEDY = "this architecture isn't supported; take another checkpoint, and please report it"


def fold_positions(
    graph_module: GraphModule, tables: ModelTables, buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Make tables and constants of what depends on positions alone, in place; returns the constants by name.

    Args:
        graph_module: as it was traced, with `TABLE` nodes of `tables`.
        tables: of the model; more are asked for.
        buffers: values of tensors that no file has, by the model's names.

    Raises:
        BundleError: numbers that depend on positions are of no kind that a table has.
    """
    _drop_casts(graph_module)
    _choose_all(graph_module, tables.longest)
    positions = _Positions(graph_module, tables, buffers)
    _choose_rows(graph_module, positions)
    if _is_decoder(graph_module):
        give_numbers(Writer(graph_module), positions.known)
    ends = [node for node in positions.ends() if not _is_written(graph_module, node, positions, tables)]
    ends = [node for node in ends if node.users]
    for node in ends:
        # Before any is replaced: some are made of others.
        positions.of(node, tables.longest)
    for node in ends:
        _replace(graph_module, node, positions, tables)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    names = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    tensors = {name: attribute(graph_module, name) for name in names}
    return {
        name.removeprefix(WHOLE_PREFIX): tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }


class _Positions:
    """The nodes of a graph that depend on the length of a row alone, and their values."""

    def __init__(
        self, graph_module: GraphModule, tables: ModelTables, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._graph_module, self._tables = graph_module, tables
        self.longest = tables.longest
        self._buffers = {WHOLE_PREFIX + name: buffer for name, buffer in buffers.items()}
        self._known: dict[tuple[Node, int], Any] = {}
        # Whether it is made of more than tables.
        self.is_made: dict[Node, bool] = {}
        for node in graph_module.graph.nodes:
            sources = node.all_input_nodes
            if node.op == "get_attr" and self._constant(str(node.target)) is not None:
                self.is_made[node] = True
            elif node.target is TABLE:
                self.is_made[node] = False
            elif node.op == "call_function" and self.is_made.keys() >= set(sources) and _is_computed(node):
                made = not sources or any(map(self.is_made.__getitem__, sources))
                self.is_made[node] = made or _repeats(node)

    def ends(self) -> list[Node]:
        """What was computed and is read by what depends on more."""
        found: dict[Node, None] = {}
        for node, is_made in self.is_made.items():
            if is_made and any(user not in self.is_made for user in node.users):
                while node.target in _LAYOUTS and any(map(self.is_made.get, node.all_input_nodes)):
                    if _repeats(node):
                        break
                    (node, *_) = node.all_input_nodes
                if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
                    found[node] = None
        return list(found)

    def known(self, value: Any) -> torch.Tensor | None:
        """A node's numbers in the longest row, if it depends on positions alone."""
        found = self.of(value, self.longest) if value in self.is_made else None
        return found if isinstance(found, torch.Tensor) else None

    def of(self, node: Node, length: int) -> Any:
        """A node's value in a row of so many tokens."""
        if (node, length) not in self._known:
            self._known[node, length] = self._computed(node, length)
        return self._known[node, length]

    def _computed(self, node: Node, length: int) -> Any:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if node.target is TABLE:
            return self._tables.all[node.args[0]].of(length)
        of_arange = str(node.target).startswith("aten.arange")
        # Of what is laid out such a number may be a width, if it isn't just larger.
        more = TOKENS if of_arange else _MOST_MORE if node.target in _LAYOUTS else 0

        def sized(value: Any) -> Any:
            if type(value) is int and TOKENS < value < TOKENS + more:
                return value - TOKENS + length
            if of_arange and type(value) is int and -TOKENS < value < -TOKENS // 2:
                return value + TOKENS - length
            for marker, size in ((COPIES, 1), (BATCH, 1), (TOKENS, length)):
                value = resized(value, marker, size)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self.of(source, length))
        arguments, named = map_aggregate(given, sized)
        with torch.no_grad():
            value = node.target(*arguments, **named)
            # What is made without numbers is written over before it is read.
            return value.zero_() if "empty" in str(node.target) else value

    def _constant(self, name: str) -> torch.Tensor | None:
        tensor = attribute(self._graph_module, name)
        if name in self._buffers:
            return self._buffers[name]
        is_known = isinstance(tensor, torch.Tensor) and not tensor.is_meta
        return tensor if is_known and not isinstance(tensor, torch.nn.Parameter) else None


def _drop_casts(graph_module: GraphModule) -> None:
    """Take out what brings numbers to a place or type that they have, in place."""
    for node in graph_module.graph.nodes:
        if node.target in (aten.to.dtype, aten.to.dtype_layout) and node.args:
            (source,) = node.all_input_nodes
            if source.meta["val"].dtype is node.meta["val"].dtype:
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)


def _choose_all(graph_module: GraphModule, longest: int) -> None:
    """Write marks of tokens that are chosen without a choice, in place: a row has no more than those.

    Raises:
        BundleError: a row may have more.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.scatter.value):
        marked, dim, chosen, number = node.args
        choice: Any = chosen.args[0] if chosen.target is operator.getitem else chosen
        if choice.target is not aten.topk.default or marked.meta["val"].shape[dim] != TOKENS:
            continue
        if choice.args[1] < longest:
            raise BundleError(
                f"the model chooses {choice.args[1]} tokens of a row, and rows have up to {longest}",
                remedy=f"--sequence-length and --context of at most {choice.args[1]} leave it no choice",
            )
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(
                aten.full.default, ([*node.meta["val"].shape], number), {"dtype": node.meta["val"].dtype}
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)


def _choose_rows(graph_module: GraphModule, positions: _Positions) -> None:
    """Write what chooses all rows, or none, without a choice, in place, such as layers for one language."""
    graph = graph_module.graph
    changed = False
    for node in [*graph.nodes]:
        if node.target is aten.masked_fill.Scalar and positions.is_made.get(node.args[1]):
            if not bool(positions.of(node.args[1], positions.longest).any()):
                node.replace_all_uses_with(node.args[0])
            continue
        is_put = node.target is aten.index_put.default
        if not is_put and node.target is not aten.index.Tensor:
            continue
        source, (mask, *others), *values = node.args
        if others or not positions.is_made.get(mask) or mask.meta["val"].dtype is not torch.bool:
            continue
        chosen = positions.of(mask, positions.longest)
        if bool(chosen.all()) or (is_put and not bool(chosen.any())):
            node.replace_all_uses_with(values[0] if is_put and bool(chosen.all()) else source)
            changed = True
    if changed:
        for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        for node in graph.nodes:
            # How many rows are chosen wasn't known.
            if any(type(size) is not int for size in getattr(node.meta.get("val"), "shape", ())):
                del node.meta["val"]
        fill_in_values(graph_module)


def _repeats(node: Node) -> bool:
    """Whether it repeats numbers of each position, as rotations of neighbours do with a table's."""
    if node.target is not aten.expand.default or not node.meta["val"].dtype.is_floating_point:
        return False
    before, behind = node.args[0].meta["val"].shape, node.meta["val"].shape
    return len(before) == len(behind) and before[1:] != behind[1:]


def _is_computed(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return "getitem" in str(node.target)
    return node.target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_written(graph_module: GraphModule, node: Node, positions: _Positions, tables: ModelTables) -> bool:
    """Whether a decoder's mask or bias that meets scores in another way was written in that of blocks."""
    if not _is_decoder(graph_module):
        return False
    shape, writer, known = _of_one_row(node), Writer(graph_module), positions.known

    def mask(before: Node, window: int) -> Node:
        table = _causal(before, tables, window)
        with before.graph.inserting_before(before):
            new = before.graph.call_function(
                aten.reshape.default, (table, [1] * (before.meta["val"].dim() - 2) + [TOKENS, TOKENS])
            )
        new.meta["val"] = table.meta["val"].reshape(new.args[1])
        return new

    if drop_least(node, known):
        return True
    if shape[-1:] != [TOKENS]:
        return False
    if sum(size % TOKENS == 0 for size in shape) == 2:
        return add_masks(writer, node, known, mask)
    value = known(node)
    found = None
    if value is not None and value.dtype == torch.float32 and value.numel() > tables.longest:
        found = slopes_and_places(value)
    if found is None:
        return False
    slopes, numbers = found
    table = ModelTable("rotary", values=numbers.reshape(-1, 1))
    key = ("places", numbers.numpy().tobytes())

    def places(before: Node) -> Node:
        return asked(before, tables, key, table, [1, TOKENS, 1], torch.float32)

    return give_places(writer, node, known, slopes, places)


def _replace(graph_module: GraphModule, node: Node, positions: _Positions, tables: ModelTables) -> None:
    shape = _of_one_row(node)
    long = [dim for dim, size in enumerate(shape) if size % TOKENS == 0]
    value = positions.of(node, tables.longest)
    writer = Writer(graph_module)
    if not long:
        _write_constant(graph_module, node, value)
    elif bool((value == value.reshape(-1)[0]).all()):
        ones = torch.full([1] * len(shape), value.reshape(-1)[0].item(), dtype=value.dtype)
        writer.replace(node, lambda writer: _spread(writer, node, writer.constant(ones)))
    elif value.dtype == torch.long and value.numel() == tables.longest and _counts(value):
        writer.replace(node, lambda writer: _numbers(writer, node, tables, int(value.reshape(-1)[0])))
    elif len(long) == 1 and (value.dtype == torch.float32 or _is_number(node, positions)):
        writer.replace(node, lambda writer: _rows(writer, node, tables, long[0], value.float()))
    elif len(long) == 2 and (window := _causal_window(value)) is not None:
        writer.replace(node, lambda writer: _mask(writer, node, tables, window))
    elif len(long) == 2 and not _is_decoder(graph_module) and (values := _by_distance(value)) is not None:
        writer.replace(node, lambda writer: _relative(writer, node, tables, values))
    else:
        raise BundleError(
            f"the model computes {node.target} of positions, {list(value.shape)} {value.dtype} of a row of "
            f"{tables.longest} tokens; masks, positions and tables with a row for each token are known",
            remedy=_REMEDY,
        )


def _is_number(node: Node, positions: _Positions) -> bool:
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


def _numbers(writer: Writer, node: Node, tables: ModelTables, first: int) -> Node:
    key = "positions" if first == 0 else ("positions", first)
    found = asked(node, tables, key, ModelTable("positions", first=first), [1, TOKENS], torch.long)
    are_looked_up = all(user.target is aten.embedding.default and _meets_rows(user) for user in node.users)
    if _of_one_row(node) == [TOKENS] and are_looked_up:
        # A row keeps a dimension of its own: there may be one for each sequence.
        for user in node.users:
            user.meta["val"] = user.meta["val"].unsqueeze(0)
        return found
    return _spread(writer, node, writer.reshape(found, _of_one_row(node)))


def _meets_rows(node: Node) -> bool:
    """Whether what has no dimension of rows meets nothing but what has one."""
    dimensions = node.meta["val"].dim()
    return all(user.target in _ARITHMETIC and user.meta["val"].dim() > dimensions for user in node.users)


def _of_one_row(node: Node) -> list[int]:
    """The shape of a value, were there one row."""
    return [resized(resized(size, COPIES, 1), BATCH, 1) for size in node.meta["val"].shape]


def _spread(writer: Writer, node: Node, found: Node) -> Node:
    """What takes a node's place, as often as there are rows where more than arithmetic reads it."""
    shape = list(node.meta["val"].shape)
    if shape == list(found.meta["val"].shape) or all(user.target in _ARITHMETIC for user in node.users):
        return found
    return writer.call(aten.expand.default, found, shape)


def _rows(writer: Writer, node: Node, tables: ModelTables, dim: int, value: torch.Tensor) -> Node:
    """A tensor whose dimension `dim` is the tokens, as rows of a table."""
    shape = _of_one_row(node)
    rest = [size for place, size in enumerate(shape) if place != dim]
    rows = value.movedim(dim, 0).reshape(tables.longest, math.prod(rest)).contiguous()
    table = ModelTable("rotary", values=rows)
    key = ("rows", rows.shape, rows.numpy().tobytes())
    found = asked(node, tables, key, table, [1, TOKENS, rows.shape[1]], torch.float32)
    if dim == 0 and _meets_rows(node):
        return writer.reshape(found, [1, *shape])
    if not any(size > 1 for size in rest[:dim]):
        return _spread(writer, node, writer.reshape(found, shape))
    apart = writer.reshape(found, [TOKENS, *rest])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    return _spread(writer, node, writer.call(aten.permute.default, apart, order))


def _causal_window(value: torch.Tensor) -> int | None:
    """The window of a causal mask that is added; as long as the row if a token sees all behind it."""
    if not value.dtype.is_floating_point:
        return None
    hidden = value <= HIDDEN
    return causal_window(hidden) if not bool(value[~hidden].any()) else None


def _is_decoder(graph_module: GraphModule) -> bool:
    """Whether rows may go in pieces, for which there are no tables by distance."""
    return any(node.target is SOFTMAX_PARTS for node in graph_module.graph.nodes)


def _by_distance(value: torch.Tensor) -> torch.Tensor | None:
    """The numbers [2 length - 1] of a square by the distance of two tokens, if it depends on that alone."""
    length = value.shape[-1]
    if value.numel() != length**2 or value.dtype not in (torch.float32, torch.long, torch.bool):
        return None
    square = value.reshape(length, length)
    values = torch.cat([square[0, 1:].flip(0), square[:, 0]])
    is_it = torch.equal(ModelTable("relative", values=values).of(length)[0], square)
    return values if is_it else None


def _relative(writer: Writer, node: Node, tables: ModelTables, values: torch.Tensor) -> Node:
    """A square of numbers by distance; what holds or doesn't is 1 or 0 in its table."""
    dtype = torch.float32 if values.dtype is torch.bool else values.dtype
    values = values.to(dtype)
    key = ("relative", dtype, values.numpy().tobytes())
    found = asked(node, tables, key, ModelTable("relative", values=values), [1, TOKENS, TOKENS], dtype)
    found = writer.reshape(found, _of_one_row(node))
    if node.meta["val"].dtype is torch.bool:
        found = writer.call(aten.ne.Scalar, found, 0)
    return _spread(writer, node, found)


def _mask(writer: Writer, node: Node, tables: ModelTables, window: int) -> Node:
    return _spread(writer, node, writer.reshape(_causal(node, tables, window), _of_one_row(node)))


def _causal(before: Node, tables: ModelTables, window: int) -> Node:
    window_or_none = None if window >= tables.longest else window
    table = ModelTable("causal", window_or_none)
    return asked(before, tables, ("causal", window_or_none, 1), table, [1, TOKENS, TOKENS], torch.float32)
