"""Chains of transpositions and reshapes become one transposition each.

XNNPACK carries every transposition out in memory, a full read and write of the activations. Heads are moved
in front of tokens, positions in front of rows, slots of tangents in front of both: each where it is needed,
and most of it again right after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_TRANSPOSITIONS = {aten.transpose.int, aten.permute.default}
_RESHAPES = {aten.reshape.default, aten.view.default}
# XNNPACK's tensors have no more.
_MOST_DIMENSIONS = 6


def join_transpositions(graph: Graph) -> None:
    """Join them in place; nodes carry `meta["val"]`."""
    for last in reversed(list(graph.nodes)):
        if last.target not in _TRANSPOSITIONS | _RESHAPES or not _ends_a_chain(last):
            continue
        chain = _chain(last)
        if sum(node.target in _TRANSPOSITIONS for node in chain) < 2:
            continue
        axes = _joined(chain)
        if axes is not None:
            _replace(last, chain[0].args[0], *axes.merged())
    for node in graph.nodes:
        while node.target in _RESHAPES and node.args[0].target in _RESHAPES:
            node.update_arg(0, node.args[0].args[0])
    graph.eliminate_dead_code()


class _Axes:
    """How the numbers of a tensor were moved: its axes, split where need be, and their order now."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.size = {axis: size for axis, size in enumerate(shape) if size > 1}
        self.at_first = list(self.size)
        self.order = list(self.size)

    def permute(self, shape: Sequence[int], dims: Sequence[int]) -> bool:
        """Reorder the dimensions of the tensor as `shape`; whether it can be written so."""
        groups = self._groups(shape)
        if groups is not None:
            self.order = [axis for dim in dims for axis in groups[dim]]
        return groups is not None

    def merged(self) -> tuple[list[int], list[int]]:
        """The least shape of the tensor at first, and the order of its dimensions now."""
        place = {axis: number for number, axis in enumerate(self.at_first)}
        groups: list[list[int]] = []
        for axis in self.order:
            if groups and place[axis] == place[groups[-1][-1]] + 1:
                groups[-1].append(axis)
            else:
                groups.append([axis])
        by_place = sorted(groups, key=lambda group: place[group[0]])
        shape = [math.prod(self.size[axis] for axis in group) for group in by_place]
        return shape, [by_place.index(group) for group in groups]

    def _groups(self, shape: Sequence[int]) -> list[list[int]] | None:
        """The axes that make up each dimension of `shape`, split until they do; None if they can't."""
        groups: list[list[int]] = []
        place = 0
        for size in shape:
            groups.append([])
            while size > 1:
                axis = self.order[place]
                if size % self.size[axis]:
                    if self.size[axis] % size:
                        return None
                    self._split(axis, size)
                size //= self.size[axis]
                groups[-1].append(axis)
                place += 1
        return groups

    def _split(self, axis: int, size: int) -> None:
        """Leave an axis the outer `size` of its size, and give the rest to a new one inside of it."""
        inner = len(self.at_first) + max(self.size)
        self.size[inner] = self.size[axis] // size
        self.size[axis] = size
        for order in (self.at_first, self.order):
            order.insert(order.index(axis) + 1, inner)


def _ends_a_chain(node: Node) -> bool:
    users = list(node.users)
    if any(user.op == "output" for user in users):  # the program's signature knows its outputs by name
        return False
    return len(users) != 1 or users[0].target not in _TRANSPOSITIONS | _RESHAPES


def _chain(last: Node) -> list[Node]:
    """Transpositions and reshapes that end in `last`, each read by the next one only."""
    chain = [last]
    while True:
        source = chain[0].args[0]
        if source.target not in _TRANSPOSITIONS | _RESHAPES or len(source.users) > 1:
            break
        chain.insert(0, source)
    return chain


def _joined(chain: Sequence[Node]) -> _Axes | None:
    axes = _Axes(chain[0].args[0].meta["val"].shape)
    for node in chain:
        if node.target in _RESHAPES:
            continue
        shape = node.args[0].meta["val"].shape
        if not axes.permute(shape, _order(node, len(shape))):
            return None
    return axes


def _order(node: Node, rank: int) -> list[int]:
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]
    first, second = (dim % rank for dim in node.args[1:3])
    order = list(range(rank))
    order[first], order[second] = second, first
    return order


def _replace(last: Node, source: Node, shape: list[int], order: list[int]) -> None:
    """Put a transposition of `source`, seen as `shape`, in the place of the chain that ends in `last`."""
    if len(shape) > _MOST_DIMENSIONS:
        return
    value = last.meta["val"]

    def call(target: torch._ops.OpOverload, argument: Node, numbers: list[int], result: list[int]) -> Node:
        node = last.graph.call_function(target, (argument, numbers))
        node.meta["val"] = value.new_empty(result)
        return node

    def reshaped(node: Node, result: list[int]) -> Node:
        return (
            node
            if list(node.meta["val"].shape) == result
            else call(aten.reshape.default, node, result, result)
        )

    with last.graph.inserting_before(last):
        node = source
        if order != sorted(order):
            sizes = list(source.meta["val"].shape)
            groups = _grouped(sizes, shape) if len(sizes) <= _MOST_DIMENSIONS else None
            if groups is None:
                node, sizes, groups = reshaped(source, shape), shape, [[dim] for dim in range(len(shape))]
            dims = [dim for place in order for dim in groups[place]]
            node = call(aten.permute.default, node, dims, [sizes[dim] for dim in dims])
        node = reshaped(node, list(value.shape))
    last.replace_all_uses_with(node)
    last.graph.erase_node(last)


def _grouped(sizes: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """The dimensions of `sizes` that make up each one of `shape`; None if one would have to be split."""
    groups: list[list[int]] = []
    place = 0
    for size in shape:
        group, held = [], 1
        while place < len(sizes) and held * sizes[place] <= size:
            held *= sizes[place]
            group.append(place)
            place += 1
        if held != size:
            return None
        groups.append(group)
    return groups
