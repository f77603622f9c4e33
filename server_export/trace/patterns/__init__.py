"""Patterns: peculiarities of architectures, one module each, which registers a `Pattern`.

A pattern says which models it matches, how it modifies a model before and while it is traced, which passes it
adds, and which model type a tiny model tests it with. Nothing else refers to a pattern: every module of this
package that registers one takes part in every export.
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

# Graph of the whole model: after tracing; when values that depend on positions alone are known; before they
# become tables. Graph of a block type.
Stage = Literal["traced", "positions", "tables", "block"]
# (tokens i64 [rows, tokens], keyword arguments, an encoder's additive padding mask) -> output of the model.
Call: TypeAlias = Callable[[torch.Tensor, dict[str, Any], torch.Tensor | None], Any]
Wrap: TypeAlias = Callable[[TracedModel, Call], Call]


@dataclass(frozen=True)
class Rewrite:
    """A pass of a pattern over a graph.

    Args:
        run: rewrites a `ModelGraph` in place, or a graph module at the stage `block`.
        stage: when the pass runs.
        operators: the pass runs if the graph has any of these; an empty tuple: always.
        of: the models whose graph the pass is for; None: all.
    """

    run: Callable[[Any], None]
    stage: Stage = "traced"
    operators: tuple[Any, ...] = ()
    of: Literal["decoder", "encoder"] | None = None


@dataclass(frozen=True)
class Pattern:
    """A peculiarity of some architectures.

    A model may have a pattern if it has one of `attributes` or `settings`, or if the pattern has none of
    them; then `check`, `unadapted` and `blocks` apply. The model has the pattern if `matches` says so too.
    Without `matches`, it has the pattern if it has one of these, or if its code calls one of `functions`.
    Then `prepare`, `tracing` and `call` apply. `retrace` applies to models that did not read their masks, and
    passes apply to graphs with one of their operators.

    Args:
        name: a few words.
        serves: the models that have the pattern, in words.
        model_types: model types of transformers that are known to have the pattern.
        example: the model type that tests build a tiny model of.
        attributes: names of attributes that mark modules.
        settings: names in the configuration of a model.
        functions: replacements, used while a model is traced, by the names of functions in transformers'
            modules or of methods of its layers. They take the model's tables before the original arguments.
        keeps_state: whether these functions are recurrences.
        matches: returns whether a model has the pattern.
        check: raises Refusal for a model that can't be exported with sequences of up to the given length.
        unadapted: returns names of modules whose layers can't be adapted; the model may lack its weights.
        prepare: modifies a model before it is traced.
        tracing: a context in which the model is traced.
        call: wraps the function that calls the model while it is traced.
        retrace: a context in which a model that did not read its masks is traced again; it yields the same
            kind of wrapper as `call`. None: the pattern doesn't apply to this model.
        rewrites: passes over graphs.
        blocks: adds blocks to those of a model, for hidden states of the given number of rows.
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
    unadapted: Callable[[nn.Module], Collection[str]] | None = None
    prepare: Callable[[TracedModel], None] | None = None
    tracing: Callable[[TracedModel], AbstractContextManager[None]] | None = None
    call: Wrap | None = None
    retrace: Callable[[TracedModel], AbstractContextManager[Wrap] | None] | None = None
    rewrites: tuple[Rewrite, ...] = ()
    blocks: Callable[[Any, Sequence[ModelBlock], int], list[ModelBlock]] | None = None


REGISTRY: dict[str, Pattern] = {}


def register(pattern: Pattern) -> Pattern:
    """Add a pattern to every export from now on."""
    REGISTRY[pattern.name] = pattern
    return pattern


def patterns() -> list[Pattern]:
    """Return all patterns by name, after importing the modules of this package."""
    _discover()
    return [REGISTRY[name] for name in sorted(REGISTRY)]


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def passes_at(stage: Stage) -> list[Pass[Any]]:
    """Return the passes of all patterns at a stage, by name."""
    return [
        Pass(pattern.name, pattern.serves, partial(_run, rewrite))
        for pattern in patterns()
        for rewrite in pattern.rewrites
        if rewrite.stage == stage
    ]


def _run(rewrite: Rewrite, graph: ModelGraph | GraphModule) -> None:
    """Run a pass if it applies to the graph and its model."""
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
    """Raise Refusal if a pattern of a model makes the model impossible to export.

    Args:
        model: may lack its weights.
        longest: the number of tokens of the longest sequence.
    """
    for pattern in patterns():
        if pattern.check is not None and _may_have(pattern, model):
            pattern.check(model, longest)


def unadapted_modules(model: nn.Module) -> list[str]:
    """Return names of the modules of a model whose layers can't be adapted."""
    return [
        name
        for pattern in patterns()
        if pattern.unadapted is not None and _may_have(pattern, model)
        for name in pattern.unadapted(model)
    ]


def _may_have(pattern: Pattern, model: nn.Module) -> bool:
    """Return whether a model has the attributes or settings of a pattern, or the pattern has none."""
    return not (pattern.attributes or pattern.settings) or _is_marked(pattern, model)


def _is_marked(pattern: Pattern, model: Any) -> bool:
    config = getattr(model, "config", None)
    return any(hasattr(config, name) for name in pattern.settings) or any(
        hasattr(module, name) for name in pattern.attributes for module in model.modules()
    )


def replaceable_functions(model: nn.Module) -> list[tuple[ModuleType | type, str, Any]]:
    """Return the functions of a model that patterns replace: module or class, name and function."""
    names = [name for pattern in patterns() for name in pattern.functions]
    classes = [*dict.fromkeys(type(module) for module in model.modules())]
    modules = [sys.modules[name] for name in dict.fromkeys(each.__module__ for each in classes)]
    owners: list[ModuleType | type] = [*modules, *classes]
    return [
        (owner, name, vars(owner)[name])
        for owner in owners
        for name in names
        if inspect.isfunction(vars(owner).get(name))
    ]


def patterns_of(traced: TracedModel) -> list[Pattern]:
    """Return the patterns that a model has, by name."""
    called = {name for _, name, _ in replaceable_functions(traced.model)}
    return [pattern for pattern in patterns() if _has(pattern, traced, called)]


def _has(pattern: Pattern, traced: TracedModel, called: set[str]) -> bool:
    if pattern.matches is not None:
        return _may_have(pattern, traced.model) and pattern.matches(traced)
    return not called.isdisjoint(pattern.functions) or _is_marked(pattern, traced.model)


def prepare(traced: TracedModel, changes: Changes | None) -> None:
    """Let the patterns of a model modify it before it is traced."""
    for pattern in patterns_of(traced):
        if pattern.prepare is not None:
            with _recording(changes, pattern, traced.model):
                pattern.prepare(traced)


@contextmanager
def tracing(traced: TracedModel, call: Call, changes: Changes | None) -> Iterator[Call]:
    """Enter the contexts of a model's patterns, and yield the function that calls the model."""
    with ExitStack() as stack:
        for pattern in patterns_of(traced):
            if pattern.functions:
                stack.enter_context(_replaced_functions(pattern, traced, changes))
            if pattern.tracing is not None:
                with _recording(changes, pattern, traced.model):
                    stack.enter_context(pattern.tracing(traced))
            if pattern.call is not None:
                call = pattern.call(traced, call)
                if changes is not None:
                    changes.of_parts(pattern.name, pattern.serves, ["call"])
        yield call


@contextmanager
def _replaced_functions(pattern: Pattern, traced: TracedModel, changes: Changes | None) -> Iterator[None]:
    """Replace functions of a model by those of a pattern within the context."""
    originals = [
        original for original in replaceable_functions(traced.model) if original[1] in pattern.functions
    ]
    if changes is not None and originals:
        changes.of_parts(pattern.name, pattern.serves, [name for _, name, _ in originals])
    try:
        for owner, name, _ in originals:
            replacement = partial(pattern.functions[name], traced.tables)
            # Without staticmethod, a layer would be passed to the replacement of its method.
            setattr(owner, name, staticmethod(replacement) if isinstance(owner, type) else replacement)
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _recording(changes: Changes | None, pattern: Pattern, model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that records what a pattern replaces in a model."""
    return nullcontext() if changes is None else changes.of_model(pattern.name, pattern.serves, model)


def with_blocks(model: Any, blocks: Sequence[ModelBlock], rows: int) -> list[ModelBlock]:
    """Return a model's blocks with those that patterns add.

    Args:
        model: the traced model.
        blocks: the blocks of its graph, in order.
        rows: the number of rows of the hidden states.
    """
    result = [*blocks]
    for pattern in patterns():
        if pattern.blocks is not None and _may_have(pattern, model):
            result = pattern.blocks(model, result, rows)
    return result
