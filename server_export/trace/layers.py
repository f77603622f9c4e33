"""Where a model's layers begin and end, and what crosses there if several values are alive.

    state     what a layer makes for the next one alone
    shared    what several layers read, and what the layer that makes it reads beside what it makes for the
              next one: keys and values that later layers use again, or inputs that every layer has a part of

The state is all values of the first sort side by side. One of the second sort is a value of its own, which
goes from the block that makes it to those that read it.
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
    """Nodes that become a block: what its state is made of before and behind it, which shared values it takes
    and gives, and the number of the experts behind it."""

    starts: Values
    ends: Values
    shared_in: Values = ()
    shared_out: Values = ()
    experts: int | None = None


def of_layers(
    nodes: Sequence[Node], flow: set[Node], answer: Node, all_read: bool = False
) -> list[Stretch] | None:
    """The stretches of a graph whose layers have several values alive where they end; None of any other.

    What each layer takes its own part of is parted where it is made: nodes are moved.

    Args:
        nodes: of the graph.
        flow: those that depend on its first placeholder.
        answer: what the graph returns.
        all_read: what several layers read may be the state of the first of them too, if there is none else.
    """
    source = next(node for node in nodes if node.op == "placeholder")
    ends = ends_of_layers(nodes)
    if all(len(values) == 1 for values in _alive(nodes, flow, ends)):
        return None
    parts = _part_where_made(nodes, flow, ends)
    _lay_out_where_read(nodes, flow, ends)
    nodes = list(answer.graph.nodes)
    ends = ends_of_layers(nodes)
    (behind,) = _alive(nodes, flow, ends[-1:])
    if not _is_plain(behind, source):
        ends += _first_alone(nodes, flow, source, ends[-1])
    block_of = _numbers(nodes, ends)
    state, shared_in, shared_out = ([list[Node]() for _ in range(len(ends) + 1)] for _ in range(3))
    crossing = [
        node for node in nodes if node in flow and {*map(block_of.get, node.users)} - {block_of[node]}
    ]
    if not all(_may_cross(node, source) for node in crossing):
        return None
    for number, found in groupby(crossing, block_of.__getitem__):
        made = [*found]
        readers = {node: {block_of[user] for user in node.users} - {number} for node in made}
        ahead = [node for node in made if readers[node] == {number + 1} and node not in parts]
        ends_here = [node for node in ahead if number not in map(block_of.get, node.users)]
        both = [node for node in made if number + 1 in readers[node] and _is_plain([node], source)]
        state[number] = ends_here or ahead or both[:all_read]
        for node in made:
            others = readers[node] - ({number + 1} if node in state[number] else set())
            shared_out[number] += [node] if others else []
            for reader in others:
                shared_in[reader].append(node)
    if not all(state[:-1]) or not _is_plain(state[-2], source) or shared_in[-1]:
        return None
    starts = [[source], *state[:-1]]
    state[-1] = [answer]
    every = zip(starts, state, shared_in, shared_out, strict=True)
    return [Stretch(tuple(a), tuple(b), tuple(taken), tuple(given)) for a, b, taken, given in every]


def ends_of_layers(nodes: Sequence[Node]) -> list[int]:
    """The last nodes before the model's list of layers and of each of its members; of several lists, of that
    which most nodes belong to."""
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
    # A layer that is called again isn't in one piece.
    in_order = all(end < start for end, start in zip(ends, starts[1:], strict=False))
    return [starts[0] - 1, *ends] if layers and in_order else []


def _alive(nodes: Sequence[Node], flow: set[Node], places: Sequence[int]) -> list[list[Node]]:
    """What of the flow is needed behind each place."""
    place = {node: index for index, node in enumerate(nodes)}
    last = {node: max(map(place.__getitem__, node.users), default=-1) for node in flow}
    return [[node for node in nodes[: end + 1] if last.get(node, -1) > end] for end in places]


def _is_plain(values: Sequence[Node], source: Node) -> bool:
    """Whether they are one state f32 [rows, tokens, width]."""
    sizes = tuple(source.meta["val"].shape)
    return len(values) == 1 and tuple(values[0].meta["val"].shape[:-1]) == sizes


def _first_alone(nodes: Sequence[Node], flow: set[Node], source: Node, start: int) -> list[int]:
    """Where behind a place one plain state alone is alive for the first time."""
    behind = range(start + 1, len(nodes) - 1)
    found = zip(behind, _alive(nodes, flow, behind), strict=True)
    return [place for place, values in found if _is_plain(values, source)][:1]


def _part_where_made(nodes: Sequence[Node], flow: set[Node], ends: Sequence[int]) -> set[Node]:
    """Move the parts that layers take of a value to where it is made; returns them."""
    block_of, moved = _numbers(nodes, ends), set[Node]()
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


def _lay_out_where_read(nodes: Sequence[Node], flow: set[Node], ends: Sequence[int]) -> None:
    """Move another shape of a value, that is read in the next layer alone as the value is too, to there."""
    block_of, place = _numbers(nodes, ends), {node: index for index, node in enumerate(nodes)}
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
            first = min(node.users, key=place.__getitem__)
            first.prepend(node)
            node.meta["nn_module_stack"] = first.meta.get("nn_module_stack", {})


def _numbers(nodes: Sequence[Node], ends: Sequence[int]) -> dict[Node, int]:
    """How many of some places come before each node."""
    found, number = dict[Node, int](), 0
    for index, node in enumerate(nodes):
        found[node] = number
        number += number < len(ends) and index == ends[number]
    return found


def _may_cross(node: Node, source: Node) -> bool:
    """Whether a value is numbers of each token."""
    value, (rows, tokens) = node.meta.get("val"), source.meta["val"].shape
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    shape = list(value.shape)
    return len(shape) > 2 and shape.count(rows) == shape.count(tokens) == 1
