"""What passes over the whole model share: the traced model and its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from server_export.trace.known_positions import Positions
from server_export.trace.tables import ModelTables

# Prefix of weight names in a graph, before the names of transformers.
WHOLE_PREFIX = "model."


@dataclass(frozen=True)
class TracedModel:
    """A model that is about to be traced.

    Args:
        model: the model on the meta device, with its adapter inserted.
        tables: the tables of its blocks.
        is_decoder: whether the model returns parts of log-probabilities; an encoder returns hidden states.
        has_classes: whether an encoder has its own classification head, without the last layer of it.
    """

    model: Any
    tables: ModelTables
    is_decoder: bool
    has_classes: bool = False

    @property
    def base(self) -> Any:
        """The module that takes tokens and masks: the encoder of a classification model, or the model."""
        return getattr(self.model, self.model.base_model_prefix) if self.has_classes else self.model


@dataclass(frozen=True)
class ModelGraph:
    """The graph of a whole model.

    Args:
        graph_module: the traced graph; all its nodes have `meta["val"]`.
        traced: the model that was traced.
        buffers: values of tensors that no checkpoint file has, by their names in the model; passes add
            constants.
    """

    graph_module: GraphModule
    traced: TracedModel
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tables(self) -> ModelTables:
        """The tables of the model; passes may add tables."""
        return self.traced.tables

    @cached_property
    def positions(self) -> Positions:
        """Values that depend only on positions, computed at first use."""
        buffers = {WHOLE_PREFIX + name: buffer for name, buffer in self.buffers.items()}
        return Positions(self.graph_module, self.tables, buffers)
