"""Sizes that mark where a graph's numbers come from, and what they say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from server_export.graph.modules import attribute


@dataclass(frozen=True)
class Sizes:
    """Large primes. One more than `queries` is a prime as well, and `queries` twice one."""

    rows: int
    tokens: int
    queries: int

    def explained(self, number: int) -> tuple[int, str]:
        """What is left of a number without its markers, and these."""
        markers = {"rows": self.rows, "tokens": self.tokens, "slots": self.queries + 1}
        found = ""
        for name, marker in markers.items():
            while number and number % marker == 0:
                number, found = number // marker, f"{found} {name}"
        while number and number % (self.queries // 2) == 0:
            number, found = number // (self.queries // 2), f"{found} queries/2"
        return number, found


FIRST, SECOND = Sizes(7919, 7927, 7606), Sizes(6101, 6113, 5926)


def described(graph_module: GraphModule, sizes: Sizes) -> Iterator[Any]:
    """Every node of a graph with its numbers explained, and the shapes of its constants."""
    numbers = {node: number for number, node in enumerate(graph_module.graph.nodes)}

    def shown(value: Any) -> Any:
        if isinstance(value, Node):
            return f"node {numbers[value]}"
        if isinstance(value, tuple | list):
            return [shown(part) for part in value]
        if isinstance(value, dict):
            return {name: shown(part) for name, part in value.items()}
        return sizes.explained(value) if type(value) is int else str(value)

    for node in graph_module.graph.nodes:
        shape = tuple(attribute(graph_module, str(node.target)).shape) if node.op == "get_attr" else ()
        yield str(node.target), shown(node.args), shown(node.kwargs), shape
