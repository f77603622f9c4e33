"""Rotary position tables as constants.

A row's positions never change, so neither do their sines and cosines. Some kinds (longrope, dynamic) choose
their frequencies by looking at the positions, which can't be traced at all.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from server_export.adapter.layers import replace_module


class ConstantRotary(nn.Module):
    """A rotary embedding that returns what it returned first, when it was called eagerly."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.tables: dict[Any, int] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [1, length, width] of the program's positions, per type of layer."""
        if layer_type not in self.tables:
            arguments = () if layer_type is None else (layer_type,)
            self.tables[layer_type] = len(self.tables)
            for name, table in zip(("cos", "sin"), self.rotary(x, position_ids, *arguments), strict=True):
                self.register_buffer(f"{name}_{self.tables[layer_type]}", table.clone(), persistent=False)
        return tuple(getattr(self, f"{name}_{self.tables[layer_type]}") for name in ("cos", "sin"))


def rotary_names(model: nn.Module) -> list[str]:
    """Paths of a model's rotary embeddings."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "rope_type") and "position_ids" in inspect.signature(module.forward).parameters
    ]


def make_rotary_constant(model: nn.Module) -> int:
    """Wrap every rotary embedding of a model; returns how many."""
    names = rotary_names(model)
    for name in names:
        replace_module(model, name, ConstantRotary(model.get_submodule(name)))
    return len(names)
