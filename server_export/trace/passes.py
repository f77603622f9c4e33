"""Passes over a graph, and what each of them changed.

A pass rewrites a graph in place. Whoever wants to know what it did compares the nodes before and after: no
pass keeps count itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn
from torch.fx import GraphModule, Node

G = TypeVar("G")

ALL = "all models"
_STACK = "nn_module_stack"
# What paths of a traced model begin with.
_WHOLE = "model."
_MOST_NAMES = 4


@dataclass(frozen=True)
class Pass(Generic[G]):
    """A step that rewrites a graph in place.

    Args:
        name: a few words that `prge export --explain` prints.
        serves: the models that it is for; `ALL`, or what they have in common.
        run: rewrites what it is given, which has a `graph_module` or is one.
    """

    name: str
    serves: str
    run: Callable[[G], None]


@dataclass
class Change:
    """What one pass, or one pattern, changed: nodes of graphs by operator, and names of what it is about."""

    name: str
    serves: str
    removed: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    modules: dict[str, None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Nodes that went or came, whichever are more, and parts of the model that were replaced."""
        return max(self.removed.total(), self.added.total()) + self.replaced.total()

    def describe(self) -> str:
        """One line: the name, what changed and how often, and in which modules."""
        parts = []
        if self.replaced:
            parts.append(f"replaces {_counted(self.replaced)} of the model")
        if self.removed and self.added:
            parts.append(f"{_counted(self.removed)} -> {_counted(self.added)}")
        elif self.removed:
            parts.append(f"removes {_counted(self.removed)}")
        elif self.added:
            parts.append(f"adds {_counted(self.added)}")
        names = [*self.modules]
        more = f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
        where = f" [{', '.join(names[:_MOST_NAMES])}{more}]" if names else ""
        return f"{self.name}: {'; '.join(parts)}{where}"


class Changes:
    """What passes changed, in their order; a pass that runs for several block types is one entry."""

    def __init__(self) -> None:
        self._by_name: dict[str, Change] = {}

    def __iter__(self) -> Iterator[Change]:
        return iter(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of what changed something, in order."""
        return [change.name for change in self]

    @contextmanager
    def of_graph(self, name: str, serves: str, graph_module: GraphModule) -> Iterator[None]:
        """Note what happens to a graph meanwhile."""
        before = _nodes(graph_module)
        yield
        after = _nodes(graph_module)
        removed = [node for node, target in before.items() if after.get(node) != target]
        added = [node for node, target in after.items() if before.get(node) != target]
        if removed or added:
            change = self._of(name, serves)
            change.removed.update(before[node] for node in removed)
            change.added.update(after[node] for node in added)
            paths = (module_of(node).removeprefix(_WHOLE) for node in removed or added)
            change.modules.update(dict.fromkeys(_without_numbers(path) for path in paths if path))

    @contextmanager
    def of_model(self, name: str, serves: str, model: nn.Module) -> Iterator[None]:
        """Note which modules, tensors and settings of a model are others afterwards."""
        before = _parts(model)
        yield
        self.of_parts(
            name, serves, [part for part, value in _parts(model).items() if before.get(part) != value]
        )

    def of_parts(self, name: str, serves: str, parts: Iterable[str]) -> None:
        """Note that a model's parts of these names, such as functions, have been replaced."""
        if replaced := Counter(map(_without_numbers, parts)):
            self._of(name, serves).replaced.update(replaced)

    def _of(self, name: str, serves: str) -> Change:
        return self._by_name.setdefault(name, Change(name, serves))


def run_passes(
    passes: Iterable[Pass[G]], graph: G, graph_module: GraphModule, changes: Changes | None
) -> None:
    """Run passes in order on a graph, and note what each changes if `changes` is given."""
    for each in passes:
        if changes is None:
            each.run(graph)
        else:
            with changes.of_graph(each.name, each.serves, graph_module):
                each.run(graph)


def _nodes(graph_module: GraphModule) -> dict[Node, str]:
    """The operators of a graph by node; a node that becomes another operator is another node."""
    return {node: _operator(node) for node in graph_module.graph.nodes if node.op == "call_function"}


def _operator(node: Node) -> str:
    target: Any = node.target
    return str(target).removeprefix("aten.").rpartition(".")[0] if "." in str(target) else target.__name__


def module_of(node: Node) -> str:
    """The path of the module that a node belongs to; empty if it isn't known."""
    stack: Mapping[str, Any] = node.meta.get(_STACK) or {}
    return next((str(path) for path, _ in reversed([*stack.values()])), "")


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _parts(model: Any) -> dict[str, Any]:
    """What of a model a pattern may replace, by name: modules and their forward, tensors, attention."""
    modules = {
        name or "model": (id(each), id(vars(each).get("forward"))) for name, each in model.named_modules()
    }
    tensors = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    tensors |= {name: id(each) for name, each in model.named_buffers(remove_duplicate=False)}
    config: Any = getattr(model, "config", None)
    settings = {name: str(getattr(config, f"_{name}_implementation", None)) for name in ("attn", "experts")}
    return {**modules, **tensors, **settings}


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
