"""Walks through a graph: what depends on a node, what it is computed of, who reads it in another layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.fx import Node


def descendants(sources: Iterable[Node], until: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """Some nodes, and all that depend on them, a graph's output included.

    Args:
        sources: where the walk begins.
        until: nodes that the walk reaches and doesn't leave.
    """
    reached, ahead = set[Node](), [*sources]
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead += [] if until(node) else node.users
    return reached


def ancestors(ends: Iterable[Node], without: Collection[Node] = ()) -> set[Node]:
    """Some nodes, and all that they are computed of.

    Args:
        ends: where the walk begins.
        without: nodes that are left out, and whatever only they are computed of.
    """
    needed, ahead = set[Node](), [*ends]
    while ahead:
        node = ahead.pop()
        if node not in needed and node not in without:
            needed.add(node)
            ahead += node.all_input_nodes
    return needed


def readers(node: Node, layouts: Collection[Any]) -> Iterator[Node]:
    """What reads a node, or another layout of it; a reader of several layouts comes several times.

    Args:
        node: it.
        layouts: operators that aren't readers themselves.
    """
    for user in [*node.users]:
        yield from readers(user, layouts) if user.target in layouts else [user]


def origin(node: Any, layouts: Collection[Any]) -> tuple[Any, list[Node]]:
    """What a node is another layout of, and the operators from there to the node in order.

    Args:
        node: it, or anything that is no node.
        layouts: operators of one value.
    """
    steps = list[Node]()
    while isinstance(node, Node) and node.target in layouts:
        steps.insert(0, node)
        (node,) = node.all_input_nodes
    return node, steps
