"""What passes over the whole model share: the model that is traced, and its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from server_export.trace.known_positions import Positions
from server_export.trace.tables import ModelTables

# What a graph's names of weights have before transformers' own.
WHOLE_PREFIX = "model."


@dataclass(frozen=True)
class TracedModel:
    """A model that is about to be traced.

    Args:
        model: on the meta device, with its adapter inserted.
        tables: of its blocks.
        is_decoder: whether it answers what it reads of logits; an encoder answers states.
        has_classes: whether an encoder has the layers of its own classification head, but for the last.
    """

    model: Any
    tables: ModelTables
    is_decoder: bool
    has_classes: bool = False

    @property
    def base(self) -> Any:
        """The part that takes tokens and masks: the encoder within a model of classes, or the model."""
        return getattr(self.model, self.model.base_model_prefix) if self.has_classes else self.model


@dataclass(frozen=True)
class ModelGraph:
    """The graph of a whole model.

    Args:
        graph_module: as it was traced; all its nodes carry `meta["val"]`.
        traced: the model that it is of.
        buffers: values of tensors that no file has, by the model's names; passes add constants.
    """

    graph_module: GraphModule
    traced: TracedModel
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tables(self) -> ModelTables:
        """Of the model; passes ask for more."""
        return self.traced.tables

    @cached_property
    def positions(self) -> Positions:
        """What depends on positions alone, found when a pass asks first."""
        buffers = {WHOLE_PREFIX + name: buffer for name, buffer in self.buffers.items()}
        return Positions(self.graph_module, self.tables, buffers)
