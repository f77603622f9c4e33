"""Graphs of functions, as if a model had been traced, and chains of tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from server_export.adapter.layers import (
    default_target_modules,
    match_target_modules,
    per_token_layers,
    refused_by_peft,
)
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.ir.markers import BATCH, TOKENS
from server_export.model.chain import ModelChain
from server_export.pipeline import WHOLE, build_chain, linearize_conv1d, with_patterns
from server_export.trace.functional import functional_graph
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.passes import Changes, run_passes
from server_export.trace.patterns import unadapted_modules
from server_export.trace.tables import ModelTables
from tests.server_export.derive.jvp.graphs import Function

RANK = 2


def model_graph(
    function: Callable, *inputs: torch.Tensor, longest: int = 9, decoder: bool = True
) -> ModelGraph:
    """Return the graph of a function as if a model had been traced."""
    program = torch.export.export(Function(function), inputs, strict=False)
    model: Any = torch.nn.Module()
    model.config = SimpleNamespace()
    return ModelGraph(functional_graph(program), TracedModel(model, ModelTables(longest), decoder))


def with_tables(function: Callable, width: int, longest: int, decoder: bool) -> ModelGraph:
    """Return the graph of a function of states [rows, tokens, width] after the passes of a whole graph."""
    with torch.device("meta"):
        states = torch.empty(BATCH, TOKENS, width)
        graph = model_graph(function, states, longest=longest, decoder=decoder)
    # Tests refer to operators as they wrote them.
    passes = [each for each in with_patterns(WHOLE) if each.name != "plain operators"]
    run_passes(passes, graph, graph.graph_module, None)
    return graph


def chain_in(folder: Path, longest: int = 16, changes: Changes | None = None) -> ModelChain:
    """Return the chain of the model in a folder, with an adapter on its default layers."""
    outline, files = load_meta_model(str(folder)), find_files(str(folder))
    model = outline.model
    transposed, unread = linearize_conv1d(model), unadapted_modules(model)
    names = match_target_modules(model, default_target_modules(model, unread), unread)
    refused = refused_by_peft(model, names)
    names = [name for name in names if name not in refused]
    lora_a = {
        name: torch.zeros(RANK, model.get_submodule(name).in_features)
        for name in per_token_layers(model, names) or names
    }
    return build_chain(outline, files, lora_a, longest=longest, transposed=transposed, changes=changes)
