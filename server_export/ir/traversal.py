"""Traverse an fx graph: dependent nodes, ancestors, and values before changes of layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.fx import Node


def descendants(sources: Iterable[Node], until: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """Return the given nodes and all nodes that depend on them, including the graph's output node.

    Args:
        sources: nodes where the traversal starts.
        until: nodes for which this is true are included, but their users are not followed.
    """
    reached, pending = set[Node](), [*sources]
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [] if until(node) else node.users
    return reached


def ancestors(ends: Iterable[Node], without: Collection[Node] = ()) -> set[Node]:
    """Return the given nodes and all nodes that they depend on.

    Args:
        ends: nodes where the traversal starts.
        without: nodes that are excluded, with everything that only they depend on.
    """
    needed, pending = set[Node](), [*ends]
    while pending:
        node = pending.pop()
        if node not in needed and node not in without:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def readers(node: Node, layouts: Collection[Any]) -> Iterator[Node]:
    """Yield the users of a node, looking through operators that only change the layout.

    A user that reads several layouts of the value is yielded several times.

    Args:
        node: the node whose users are wanted.
        layouts: operators to look through.
    """
    for user in [*node.users]:
        yield from readers(user, layouts) if user.target in layouts else [user]


def origin(node: Any, layouts: Collection[Any]) -> tuple[Any, list[Node]]:
    """Return the value that a node is another layout of, and the operators from the value to the node.

    Args:
        node: a node, or any other value, which is returned unchanged.
        layouts: operators with a single input that only change the layout.
    """
    steps = list[Node]()
    while isinstance(node, Node) and node.target in layouts:
        steps.insert(0, node)
        (node,) = node.all_input_nodes
    return node, steps
