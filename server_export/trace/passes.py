"""Passes over a graph, and a record of what each of them changed.

A pass rewrites a graph in place. The record compares the nodes before and after a pass, so passes don't count
their changes themselves.
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
# Prefix of module paths in a traced graph.
_WHOLE = "model."
_MAX_NAMES = 4


@dataclass(frozen=True)
class Pass(Generic[G]):
    """A step that rewrites a graph in place.

    Args:
        name: a few words that `prge export --explain` prints.
        serves: the models that need the pass: `ALL`, or what they have in common.
        run: rewrites its argument, which has a `graph_module` or is one.
    """

    name: str
    serves: str
    run: Callable[[G], None]


@dataclass
class Change:
    """What one pass or pattern changed: nodes by operator, and the modules or parts that are affected."""

    name: str
    serves: str
    removed: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    modules: dict[str, None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of removed or added nodes, whichever is larger, plus the replaced parts of the model."""
        return max(self.removed.total(), self.added.total()) + self.replaced.total()

    def describe(self) -> str:
        """Return one line with the name of the pass, the changes and the affected modules."""
        parts = []
        if self.replaced:
            parts.append(f"replaces {_format_counts(self.replaced)} of the model")
        if self.removed and self.added:
            parts.append(f"{_format_counts(self.removed)} -> {_format_counts(self.added)}")
        elif self.removed:
            parts.append(f"removes {_format_counts(self.removed)}")
        elif self.added:
            parts.append(f"adds {_format_counts(self.added)}")
        names = [*self.modules]
        ellipsis = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMES else ""
        location = f" [{', '.join(names[:_MAX_NAMES])}{ellipsis}]" if names else ""
        return f"{self.name}: {'; '.join(parts)}{location}"


class Changes:
    """The changes of all passes in order; a pass that runs for several block types is one entry."""

    def __init__(self) -> None:
        self._by_name: dict[str, Change] = {}

    def __iter__(self) -> Iterator[Change]:
        return iter(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """The names of the passes and patterns that changed something, in order."""
        return [change.name for change in self]

    @contextmanager
    def of_graph(self, name: str, serves: str, graph_module: GraphModule) -> Iterator[None]:
        """Record the changes of a graph within the context."""
        before = _operators_by_node(graph_module)
        yield
        after = _operators_by_node(graph_module)
        removed = [node for node, target in before.items() if after.get(node) != target]
        added = [node for node, target in after.items() if before.get(node) != target]
        if removed or added:
            change = self._of(name, serves)
            change.removed.update(before[node] for node in removed)
            change.added.update(after[node] for node in added)
            paths = (module_of(node).removeprefix(_WHOLE) for node in removed or added)
            change.modules.update(dict.fromkeys(_mask_layer_numbers(path) for path in paths if path))

    @contextmanager
    def of_model(self, name: str, serves: str, model: nn.Module) -> Iterator[None]:
        """Record which modules, tensors and settings of a model are replaced within the context."""
        before = _identities(model)
        yield
        self.of_parts(
            name, serves, [part for part, value in _identities(model).items() if before.get(part) != value]
        )

    def of_parts(self, name: str, serves: str, parts: Iterable[str]) -> None:
        """Record that parts of a model with these names, such as functions, have been replaced."""
        if replaced := Counter(map(_mask_layer_numbers, parts)):
            self._of(name, serves).replaced.update(replaced)

    def _of(self, name: str, serves: str) -> Change:
        return self._by_name.setdefault(name, Change(name, serves))


def run_passes(
    passes: Iterable[Pass[G]], graph: G, graph_module: GraphModule, changes: Changes | None
) -> None:
    """Run passes in order on a graph, and record their changes if `changes` is given."""
    for each in passes:
        if changes is None:
            each.run(graph)
        else:
            with changes.of_graph(each.name, each.serves, graph_module):
                each.run(graph)


def _operators_by_node(graph_module: GraphModule) -> dict[Node, str]:
    """Return operator names by node, so that a node whose operator is exchanged counts as changed."""
    return {node: _operator_name(node) for node in graph_module.graph.nodes if node.op == "call_function"}


def _operator_name(node: Node) -> str:
    target: Any = node.target
    return str(target).removeprefix("aten.").rpartition(".")[0] if "." in str(target) else target.__name__


def module_of(node: Node) -> str:
    """Return the path of the module that a node was traced in, or an empty string if it is unknown."""
    stack: Mapping[str, Any] = node.meta.get(_STACK) or {}
    return next((str(path) for path, _ in reversed([*stack.values()])), "")


def _mask_layer_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _identities(model: Any) -> dict[str, Any]:
    """Return the identities of what a pattern may replace: modules, their forward, tensors, attention."""
    modules = {
        name or "model": (id(each), id(vars(each).get("forward"))) for name, each in model.named_modules()
    }
    tensors = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    tensors |= {name: id(each) for name, each in model.named_buffers(remove_duplicate=False)}
    config: Any = getattr(model, "config", None)
    settings = {name: str(getattr(config, f"_{name}_implementation", None)) for name in ("attn", "experts")}
    return {**modules, **tensors, **settings}


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
