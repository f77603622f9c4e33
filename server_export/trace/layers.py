"""The boundaries of a model's layers, and the values that cross them if several values are live.

    hidden states   values that a layer computes for the next one only
    shared          values that several layers read, and values that their own layer reads too although it
                    also passes hidden states on: keys and values that later layers reuse, or inputs of which
                    every layer takes a part

The hidden states are the concatenation of all values of the first sort. A value of the second sort stays
separate, and goes from the block that computes it to the blocks that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from server_export.ir.operators import Category, members

aten = torch.ops.aten

_PARTS = (aten.select.int, aten.slice.Tensor)
_SHAPES = members(Category.RESHAPE)

Values: TypeAlias = tuple[Node, ...]


@dataclass(frozen=True)
class Stretch:
    """Nodes that become a block.

    Attributes:
        starts: the values that make up the hidden states before the block.
        ends: the values that make up the hidden states after the block.
        shared_in: shared values that the block reads.
        shared_out: shared values that the block computes.
        experts: the number of the layer whose experts follow the block.
    """

    starts: Values
    ends: Values
    shared_in: Values = ()
    shared_out: Values = ()
    experts: int | None = None


def stretches_of_layers(
    nodes: Sequence[Node], flow: set[Node], result: Node, all_read: bool = False
) -> list[Stretch] | None:
    """Return the stretches of a graph if several values are live where its layers end, else None.

    Parts that layers take of a value are computed where the value is: their nodes are moved.

    Args:
        nodes: the nodes of the graph.
        flow: the nodes that depend on the first placeholder.
        result: the output of the graph.
        all_read: whether a value that several layers read may be the hidden states of the first of them, if
            there are no others.
    """
    source = next(node for node in nodes if node.op == "placeholder")
    ends = ends_of_layers(nodes)
    if all(len(values) == 1 for values in _live_at(nodes, flow, ends)):
        return None
    parts = _move_parts_to_source(nodes, flow, ends)
    _move_reshapes_to_reader(nodes, flow, ends)
    nodes = list(result.graph.nodes)
    ends = ends_of_layers(nodes)
    (live_after,) = _live_at(nodes, flow, ends[-1:])
    if not _is_hidden_state(live_after, source):
        ends += _first_single_state(nodes, flow, source, ends[-1])
    block_of = _stretch_of_nodes(nodes, ends)
    state, shared_in, shared_out = ([list[Node]() for _ in range(len(ends) + 1)] for _ in range(3))
    crossing = [
        node for node in nodes if node in flow and {*map(block_of.get, node.users)} - {block_of[node]}
    ]
    if not all(_may_cross(node, source) for node in crossing):
        return None
    for number, group in groupby(crossing, block_of.__getitem__):
        computed = [*group]
        readers = {node: {block_of[user] for user in node.users} - {number} for node in computed}
        only_next = [node for node in computed if readers[node] == {number + 1} and node not in parts]
        last_use_here = [node for node in only_next if number not in map(block_of.get, node.users)]
        read_by_next = [
            node for node in computed if number + 1 in readers[node] and _is_hidden_state([node], source)
        ]
        state[number] = last_use_here or only_next or read_by_next[:all_read]
        for node in computed:
            other_readers = readers[node] - ({number + 1} if node in state[number] else set())
            shared_out[number] += [node] if other_readers else []
            for reader in other_readers:
                shared_in[reader].append(node)
    if not all(state[:-1]) or not _is_hidden_state(state[-2], source) or shared_in[-1]:
        return None
    starts = [[source], *state[:-1]]
    state[-1] = [result]
    sides = zip(starts, state, shared_in, shared_out, strict=True)
    return [
        Stretch(tuple(a), tuple(b), tuple(shared_inputs), tuple(shared_outputs))
        for a, b, shared_inputs, shared_outputs in sides
    ]


def ends_of_layers(nodes: Sequence[Node]) -> list[int]:
    """Return the indices of the last nodes before the model's list of layers and within each layer.

    If a model has several lists of layers, the one with the most nodes counts.
    """
    members: dict[str, dict[str, list[int]]] = {}
    for index, node in enumerate(nodes):
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        paths = (str(path).rpartition(".") for path, _ in stack.values())
        of_list = next((path for path in paths if path[2].isdigit()), None)
        if of_list is not None and node.op == "call_function":
            members.setdefault(of_list[0], {}).setdefault(of_list[2], []).append(index)
    sizes = {name: sum(map(len, layers.values())) for name, layers in members.items()}
    layers = list(members[max(sizes, key=sizes.__getitem__)].values()) if sizes else []
    starts, ends = [layer[0] for layer in layers], [layer[-1] for layer in layers]
    # The nodes of a layer that is called repeatedly aren't contiguous.
    in_order = all(end < start for end, start in zip(ends, starts[1:], strict=False))
    return [starts[0] - 1, *ends] if layers and in_order else []


def _live_at(nodes: Sequence[Node], flow: set[Node], indices: Sequence[int]) -> list[list[Node]]:
    """Return the values of the flow that are used after each index."""
    index_of = {node: index for index, node in enumerate(nodes)}
    last = {node: max(map(index_of.__getitem__, node.users), default=-1) for node in flow}
    return [[node for node in nodes[: end + 1] if last.get(node, -1) > end] for end in indices]


def _is_hidden_state(values: Sequence[Node], source: Node) -> bool:
    """Return whether the values are a single tensor f32 [rows, tokens, width]."""
    sizes = tuple(source.meta["val"].shape)
    return len(values) == 1 and tuple(values[0].meta["val"].shape[:-1]) == sizes


def _first_single_state(nodes: Sequence[Node], flow: set[Node], source: Node, start: int) -> list[int]:
    """Return the first index after `start` where hidden states are the only live value, if there is one."""
    indices = range(start + 1, len(nodes) - 1)
    live = zip(indices, _live_at(nodes, flow, indices), strict=True)
    return [index for index, values in live if _is_hidden_state(values, source)][:1]


def _move_parts_to_source(nodes: Sequence[Node], flow: set[Node], ends: Sequence[int]) -> set[Node]:
    """Move the parts that layers take of a value to where it is computed; return the moved nodes."""
    block_of, moved = _stretch_of_nodes(nodes, ends), set[Node]()
    for node in nodes:
        users = list(node.users)
        if node not in flow or len({block_of[user] for user in users}) < 2:
            continue
        if all(user.target in _PARTS for user in users):
            for user in reversed(users):
                node.append(user)
                user.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
            moved.update(users)
    return moved


def _move_reshapes_to_reader(nodes: Sequence[Node], flow: set[Node], ends: Sequence[int]) -> None:
    """Move a reshape into the next layer if only this layer reads it and it also reads the reshaped value."""
    block_of, index_of = _stretch_of_nodes(nodes, ends), {node: index for index, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node not in flow or node.target not in _SHAPES or not node.users:
            continue
        (value,) = node.all_input_nodes
        readers = {block_of[user] for user in node.users}
        if (
            len(readers) == 1
            and max(readers) > block_of[node]
            and readers & {*map(block_of.get, value.users)}
        ):
            first_user = min(node.users, key=index_of.__getitem__)
            first_user.prepend(node)
            node.meta["nn_module_stack"] = first_user.meta.get("nn_module_stack", {})


def _stretch_of_nodes(nodes: Sequence[Node], ends: Sequence[int]) -> dict[Node, int]:
    """Return how many of the given end indices precede each node."""
    numbers, number = dict[Node, int](), 0
    for index, node in enumerate(nodes):
        numbers[node] = number
        number += number < len(ends) and index == ends[number]
    return numbers


def _may_cross(node: Node, source: Node) -> bool:
    """Return whether a value is a float tensor with one row of numbers per token."""
    value, (rows, tokens) = node.meta.get("val"), source.meta["val"].shape
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    shape = list(value.shape)
    return len(shape) > 2 and shape.count(rows) == shape.count(tokens) == 1
