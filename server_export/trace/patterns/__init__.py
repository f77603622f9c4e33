"""Peculiarities of architectures: each is one file of this package, which registers a `Pattern`.

A pattern says what it matches, what it does to a model before and while that is traced, which passes it has
over the graph, which model types it is for, and of which type a tiny model tests it. Nothing else names it:
whatever file of this package registers a pattern takes part in every export.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from server_export.trace.cutting import ModelBlock
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.passes import Changes, Pass

# Of the whole model's graph: as it was traced; once it is known what depends on positions alone; before
# tables are made of that. Of a block type's graph.
Stage = Literal["traced", "positions", "tables", "block"]
# Tokens i64 [rows, tokens], arguments, and an encoder's padding as an additive mask -> what a model returns.
Call: TypeAlias = Callable[[torch.Tensor, dict[str, Any], torch.Tensor | None], Any]
Wrap: TypeAlias = Callable[[TracedModel, Call], Call]


@dataclass(frozen=True)
class Rewrite:
    """A pass of a pattern over a graph.

    Args:
        run: rewrites it in place: a `ModelGraph`, or of the stage `block` a graph module.
        stage: when.
        operators: any of these must be in the graph; none: whatever is.
        of: the models whose graph it is; None: all.
    """

    run: Callable[[Any], None]
    stage: Stage = "traced"
    operators: tuple[Any, ...] = ()
    of: Literal["decoder", "encoder"] | None = None


@dataclass(frozen=True)
class Pattern:
    """A peculiarity of some architectures.

    A model may have it if it has one of `attributes` or `settings`, or the pattern has none; then `check`,
    `unread` and `blocks` are for it. It has it if `matches` says so too; without `matches` if it has one of
    these, or its code calls one of `functions`; then `prepare`, `tracing` and `call` are for it. `retrace` is
    for models that did not read their masks, passes for graphs with one of their operators.

    Args:
        name: a few words.
        serves: what models have it, in words.
        model_types: transformers' types that have it, as far as they are known.
        example: the one of them that tests make tiny.
        attributes: names of attributes that mark modules.
        settings: names in a model's configuration.
        functions: by the names of functions in transformers' files, or of methods of its layers, what takes
            their place while a model is traced; the model's tables come first, then their own arguments.
        keeps_state: whether these functions are recurrences.
        matches: whether a model has it.
        check: raises Refusal for a model, and texts of up to so many tokens, that can't be exported.
        unread: names of modules whose layers no adapter is for; the model may lack its weights.
        prepare: changes a model before it is traced.
        tracing: a context in which it is traced.
        call: how a model is called while it is traced, from how others are.
        retrace: a context in which a model is traced once more that did not read the masks that it was given,
            which gives what `call` is; None: it is not for this model.
        rewrites: passes over graphs.
        blocks: more blocks behind those of a model, for states of so many rows.
    """

    name: str
    serves: str
    model_types: tuple[str, ...]
    example: str
    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    keeps_state: bool = False
    matches: Callable[[TracedModel], bool] | None = None
    check: Callable[[Any, int], None] | None = None
    unread: Callable[[nn.Module], Collection[str]] | None = None
    prepare: Callable[[TracedModel], None] | None = None
    tracing: Callable[[TracedModel], AbstractContextManager[None]] | None = None
    call: Wrap | None = None
    retrace: Callable[[TracedModel], AbstractContextManager[Wrap] | None] | None = None
    rewrites: tuple[Rewrite, ...] = ()
    blocks: Callable[[Any, Sequence[ModelBlock], int], list[ModelBlock]] | None = None


REGISTRY: dict[str, Pattern] = {}


def register(pattern: Pattern) -> Pattern:
    """Let a pattern take part in every export from now on."""
    REGISTRY[pattern.name] = pattern
    return pattern


def patterns() -> list[Pattern]:
    """All patterns, by name; those of this package's files are registered first."""
    _discover()
    return [REGISTRY[name] for name in sorted(REGISTRY)]


@cache
def _discover() -> None:
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")


def passes_at(stage: Stage) -> list[Pass[Any]]:
    """The passes of all patterns at a stage, by name."""
    return [
        Pass(pattern.name, pattern.serves, partial(_run, rewrite))
        for pattern in patterns()
        for rewrite in pattern.rewrites
        if rewrite.stage == stage
    ]


def _run(rewrite: Rewrite, graph: ModelGraph | GraphModule) -> None:
    """Run a pass if the graph has what it is for, and is of a model that it is for."""
    graph_module = graph.graph_module if isinstance(graph, ModelGraph) else graph
    is_decoder = graph.traced.is_decoder if isinstance(graph, ModelGraph) else None
    if rewrite.of is not None and is_decoder != (rewrite.of == "decoder"):
        return
    if rewrite.stage == "tables" and isinstance(graph, ModelGraph) and not graph.positions.ends:
        return
    find = graph_module.graph.find_nodes
    if not rewrite.operators or any(find(op="call_function", target=each) for each in rewrite.operators):
        rewrite.run(graph)


def check_model(model: Any, longest: int) -> None:
    """Raise Refusal if a pattern of a model makes it one that can't be exported.

    Args:
        model: which may lack its weights.
        longest: tokens of the longest sequence.
    """
    for pattern in patterns():
        if pattern.check is not None and _may_have(pattern, model):
            pattern.check(model, longest)


def unread_modules(model: nn.Module) -> list[str]:
    """Names of the modules of a model whose layers no adapter is for."""
    return [
        name
        for pattern in patterns()
        if pattern.unread is not None and _may_have(pattern, model)
        for name in pattern.unread(model)
    ]


def _may_have(pattern: Pattern, model: nn.Module) -> bool:
    """Whether a model has what marks a pattern, if anything does."""
    return not (pattern.attributes or pattern.settings) or _is_marked(pattern, model)


def _is_marked(pattern: Pattern, model: Any) -> bool:
    config = getattr(model, "config", None)
    return any(hasattr(config, name) for name in pattern.settings) or any(
        hasattr(module, name) for name in pattern.attributes for module in model.modules()
    )


def functions_of(model: nn.Module) -> list[tuple[ModuleType | type, str, Any]]:
    """The functions that patterns replace: a file or class of the model's, a name, and the function there."""
    names = [name for pattern in patterns() for name in pattern.functions]
    classes = [*dict.fromkeys(type(module) for module in model.modules())]
    files = [sys.modules[name] for name in dict.fromkeys(each.__module__ for each in classes)]
    places: list[ModuleType | type] = [*files, *classes]
    return [
        (place, name, vars(place)[name])
        for place in places
        for name in names
        if inspect.isfunction(vars(place).get(name))
    ]


def patterns_of(traced: TracedModel) -> list[Pattern]:
    """The patterns that a model has, by name."""
    called = {name for _, name, _ in functions_of(traced.model)}
    return [pattern for pattern in patterns() if _has(pattern, traced, called)]


def _has(pattern: Pattern, traced: TracedModel, called: set[str]) -> bool:
    if pattern.matches is not None:
        return _may_have(pattern, traced.model) and pattern.matches(traced)
    return not called.isdisjoint(pattern.functions) or _is_marked(pattern, traced.model)


def prepare(traced: TracedModel, changes: Changes | None) -> None:
    """Change a model before it is traced, as its patterns do."""
    for pattern in patterns_of(traced):
        if pattern.prepare is not None:
            with _noted(changes, pattern, traced.model):
                pattern.prepare(traced)


@contextmanager
def tracing(traced: TracedModel, call: Call, changes: Changes | None) -> Iterator[Call]:
    """Contexts of a model's patterns, in which it is traced; gives how it is called."""
    with ExitStack() as stack:
        for pattern in patterns_of(traced):
            if pattern.functions:
                stack.enter_context(_replaced(pattern, traced, changes))
            if pattern.tracing is not None:
                with _noted(changes, pattern, traced.model):
                    stack.enter_context(pattern.tracing(traced))
            if pattern.call is not None:
                call = pattern.call(traced, call)
                if changes is not None:
                    changes.of_parts(pattern.name, pattern.serves, ["call"])
        yield call


@contextmanager
def _replaced(pattern: Pattern, traced: TracedModel, changes: Changes | None) -> Iterator[None]:
    """Let a pattern's functions take the place of a model's own meanwhile."""
    own = [found for found in functions_of(traced.model) if found[1] in pattern.functions]
    if changes is not None and own:
        changes.of_parts(pattern.name, pattern.serves, [name for _, name, _ in own])
    try:
        for place, name, _ in own:
            ours = partial(pattern.functions[name], traced.tables)
            # A layer that has it as a method isn't among its arguments.
            setattr(place, name, staticmethod(ours) if isinstance(place, type) else ours)
        yield
    finally:
        for place, name, function in own:
            setattr(place, name, function)


def _noted(changes: Changes | None, pattern: Pattern, model: nn.Module) -> AbstractContextManager[None]:
    """Note what a pattern replaces of a model meanwhile."""
    return nullcontext() if changes is None else changes.of_model(pattern.name, pattern.serves, model)


def with_blocks(model: Any, blocks: Sequence[ModelBlock], rows: int) -> list[ModelBlock]:
    """A model's blocks with those that patterns put behind them.

    Args:
        model: as it was traced.
        blocks: of its graph, in order.
        rows: of a state.
    """
    found = [*blocks]
    for pattern in patterns():
        if pattern.blocks is not None and _may_have(pattern, model):
            found = pattern.blocks(model, found, rows)
    return found
