"""Calls of recurrence operators while a model is traced, with the tables that these operators read.

How all tokens of a call are computed at once is for server_export.ir.recurrences.
"""

from __future__ import annotations

import torch

from server_export.ir.recurrences import RECURRENCE, SCAN
from server_export.trace.tables import ModelTables


def scan(tables: ModelTables, factor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Numbers that decay each for itself: answer[t] = factor[t] answer[t - 1] + source[t].

    Args:
        tables: of the model.
        factor, source: f32 [rows, width, tokens].
    """
    tokens, shifts, back = source.shape[-1], [], 1
    while back < tables.chunk:
        shifts.append(tables.relation("behind", tokens, back, 1))
        back *= 2
    found: torch.Tensor = SCAN(
        factor,
        source,
        shifts,
        tables.relation("entering", tokens, 1, 1),
        tables.relation("leaving", tokens, 0, 1),
    )
    return found


def recurrence(
    tables: ModelTables,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor | None,
) -> torch.Tensor:
    """A matrix of each head that tokens add to and read: f32 [rows, tokens, heads, width].

    Args:
        tables: of the model.
        query, key, value: f32 [rows, tokens, heads, width].
        decay: f32 [rows, tokens, heads], or [rows, tokens, heads, width] of each number of a key.
        strength: f32 [rows, tokens, heads] of the delta rule; None: tokens add their values as they are.
    """
    rows, tokens, heads, width = value.shape

    def flat(by_token: torch.Tensor) -> torch.Tensor:
        turned = by_token.transpose(1, 2)
        return turned.reshape(rows * heads, *turned.shape[2:])

    halves, meeting, size = [], [], 1
    own = decay.dim() == key.dim()
    while (own or strength is not None) and size < tables.chunk:
        halves.append(tables.relation("halves", tokens, size))
        if own:
            meeting.append(tables.relation("meeting", tokens, size))
        size *= 2
    found: torch.Tensor = RECURRENCE(
        *map(flat, (query, key, value, decay)),
        None if strength is None else flat(strength),
        tables.relation("behind", tokens),
        tables.relation("behind", tokens, 1),
        halves,
        meeting,
    )
    turned = found.reshape(rows, heads, tokens, width).transpose(1, 2)
    # A copy, as a view of it needs: one that is called so is taken for none.
    return turned.reshape(rows, tokens, heads * width).reshape(rows, tokens, heads, width)


def by_head(by_group: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, tokens, groups, width], each group as often as it has heads: [rows, tokens, heads, width]."""
    rows, tokens, groups, width = by_group.shape
    if groups == heads:
        return by_group
    spread = by_group.unsqueeze(3).expand(rows, tokens, groups, heads // groups, width)
    return spread.reshape(rows, tokens, heads, width)
