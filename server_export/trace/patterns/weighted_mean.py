"""RWKV's mean of the values so far, which weigh by their keys and grow lighter."""

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
    """Of [rows, tokens, width]: the mean of values so far, that weigh by their keys and grow lighter.

    Keys above 88 have weights that float32 lacks: answers that are not finite are refused.
    """
    weight, width = torch.exp(key), key.shape[-1]
    by_width = key.transpose(1, 2)
    factor = torch.exp(-torch.exp(time_decay)).reshape(width, 1).expand(by_width.shape)

    def before(source: torch.Tensor) -> torch.Tensor:
        moved = F.pad(source, (0, 0, 1, -1)).transpose(1, 2)
        return scan(tables, factor, moved).transpose(1, 2)

    own = torch.exp(key + time_first)
    return (before(weight * value) + own * value) / (before(weight) + own), None


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
