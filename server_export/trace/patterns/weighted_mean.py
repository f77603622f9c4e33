"""RWKV's weighted mean of previous values, with weights that come from the keys and decay over time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from server_export.trace.patterns import Pattern, register
from server_export.trace.recurrent import scan
from server_export.trace.tables import ModelTables


def weighted_mean(
    tables: ModelTables,
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the mean [rows, tokens, width] of the values so far, weighted by their decaying keys.

    Weights of keys above 88 overflow float32; outputs that are not finite are refused.
    """
    weight, width = torch.exp(key), key.shape[-1]
    by_width = key.transpose(1, 2)
    factor = torch.exp(-torch.exp(time_decay)).reshape(width, 1).expand(by_width.shape)

    def sum_before(source: torch.Tensor) -> torch.Tensor:
        shifted = F.pad(source, (0, 0, 1, -1)).transpose(1, 2)
        return scan(tables, factor, shifted).transpose(1, 2)

    own_weight = torch.exp(key + time_first)
    return (sum_before(weight * value) + own_weight * value) / (sum_before(weight) + own_weight), None


register(
    Pattern(
        "weighted mean",
        serves="RWKV's means of the values so far",
        model_types=("rwkv",),
        example="rwkv",
        functions={"rwkv_linear_attention": weighted_mean},
        keeps_state=True,
    )
)
