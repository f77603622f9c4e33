"""transformers' own decoder as ExecuTorch's training exports it: masks and rotary tables are constants.

fix_length(model)        a program of it has one length, that of the first call
...
restore_length(model)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from server_export.adapter.layers import replace_module
from server_export.trace import attention
from server_export.trace.tables import rotary_names


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


class ConstantMasks:
    """Masks of `server_export.trace.attention` for the length of a call, in the place of tables."""

    def causal(self, length: int, window: int | None, members: int) -> torch.Tensor:
        """A causal mask f32 [members, length, length], for the queries of a group of heads."""
        return attention.causal_mask(length, window, torch.float32).repeat(members, 1, 1)


def fix_length(model: Any) -> None:
    """Give a decoder the attention and the rotary embeddings of a program of one length, in place."""
    attention.register()
    model.set_attn_implementation(attention.NAME)
    masks = ConstantMasks()
    for module in model.modules():
        module.tables = masks
    for name in rotary_names(model):
        replace_module(model, name, ConstantRotary(model.get_submodule(name)))


def restore_length(model: Any, implementation: str) -> None:
    """Take back what `fix_length` changed; `implementation` is the attention that the model had."""
    model.set_attn_implementation(implementation)
    for name, module in list(model.named_modules()):
        if isinstance(module, ConstantRotary):
            replace_module(model, name, module.rotary)
        elif isinstance(getattr(module, "tables", None), ConstantMasks):
            del module.tables
