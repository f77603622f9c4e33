"""Gated linear recurrences, such as RecurrentGemma's, which a method of the layers computes."""

from __future__ import annotations

import torch

from server_export.trace.patterns import Pattern, register
from server_export.trace.recurrent import scan
from server_export.trace.tables import ModelTables


def gated_scan(
    tables: ModelTables,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: None = None,
) -> tuple[torch.Tensor, None]:
    """Compute the recurrence of states and factors [rows, tokens, width]; `reset` is [1, tokens, 1]."""
    factor = recurrent_gate * ~reset
    return scan(tables, factor.transpose(1, 2), hidden_states.transpose(1, 2)).transpose(1, 2), None


register(
    Pattern(
        "gated scan",
        serves="gated linear recurrences, such as RecurrentGemma's",
        model_types=("recurrent_gemma",),
        example="recurrent_gemma",
        functions={"_rnn_scan": gated_scan},
        keeps_state=True,
    )
)
