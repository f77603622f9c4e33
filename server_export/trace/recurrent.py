"""Call the recurrence operators while a model is traced, with the tables that they read.

`server_export.ir.recurrences` describes how all tokens of a call are computed at once.
"""

from __future__ import annotations

import torch

from server_export.ir.recurrences import RECURRENCE, SCAN
from server_export.trace.tables import ModelTables


def scan(tables: ModelTables, factor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Compute an elementwise recurrence: output[t] = factor[t] output[t - 1] + source[t].

    Args:
        tables: the tables of the model.
        factor, source: f32 [rows, width, tokens].
    """
    tokens, shifts, distance = source.shape[-1], [], 1
    while distance < tables.chunk:
        shifts.append(tables.relation("behind", tokens, distance, 1))
        distance *= 2
    output: torch.Tensor = SCAN(
        factor,
        source,
        shifts,
        tables.relation("entering", tokens, 1, 1),
        tables.relation("leaving", tokens, 0, 1),
    )
    return output


def recurrence(
    tables: ModelTables,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor | None,
) -> torch.Tensor:
    """Update a matrix state per head by tokens, which read it; return f32 [rows, tokens, heads, width].

    Args:
        tables: the tables of the model.
        query, key, value: f32 [rows, tokens, heads, width].
        decay: f32 [rows, tokens, heads], or [rows, tokens, heads, width] with one decay per element of a key.
        strength: f32 [rows, tokens, heads] for the delta rule; None: tokens add their values unchanged.
    """
    rows, tokens, heads, width = value.shape

    def flat(by_token: torch.Tensor) -> torch.Tensor:
        heads_first = by_token.transpose(1, 2)
        return heads_first.reshape(rows * heads, *heads_first.shape[2:])

    halves, meeting, size = [], [], 1
    has_own_decays = decay.dim() == key.dim()
    while (has_own_decays or strength is not None) and size < tables.chunk:
        halves.append(tables.relation("halves", tokens, size))
        if has_own_decays:
            meeting.append(tables.relation("meeting", tokens, size))
        size *= 2
    output: torch.Tensor = RECURRENCE(
        *map(flat, (query, key, value, decay)),
        None if strength is None else flat(strength),
        tables.relation("behind", tokens),
        tables.relation("behind", tokens, 1),
        halves,
        meeting,
    )
    tokens_first = output.reshape(rows, heads, tokens, width).transpose(1, 2)
    # The two reshapes force a copy, which a later view needs; contiguous() would be removed as an identity.
    return tokens_first.reshape(rows, tokens, heads * width).reshape(rows, tokens, heads, width)


def by_head(by_group: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each group for its heads: [rows, tokens, groups, width] -> [rows, tokens, heads, width]."""
    rows, tokens, groups, width = by_group.shape
    if groups == heads:
        return by_group
    expanded = by_group.unsqueeze(3).expand(rows, tokens, groups, heads // groups, width)
    return expanded.reshape(rows, tokens, heads, width)
