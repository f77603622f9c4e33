"""State spaces of Mamba 2: a matrix per head that decays by its own step size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from server_export.trace.patterns import Pattern, register
from server_export.trace.recurrent import by_head, recurrence
from server_export.trace.tables import ModelTables


def state_space(
    tables: ModelTables,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute Mamba 2's scan of [rows, tokens, heads, width], steps [rows, tokens, heads]; B, C by group."""
    heads = hidden_states.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    low, high = dt_limit
    # Softplus is positive, and most models have no other limits.
    if low > 0 or not dt_softplus:
        dt = dt.clamp(min=low)
    if high != float("inf"):
        dt = dt.clamp(max=high)
    output = recurrence(
        tables, by_head(C, heads), by_head(B, heads), hidden_states * dt.unsqueeze(-1), dt * A, None
    )
    output = output if D is None else output + hidden_states * D.reshape(heads, 1)
    return output if z is None else output * F.silu(z)


register(
    Pattern(
        "state space",
        serves="state spaces of Mamba 2",
        model_types=("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"),
        example="mamba2",
        functions={"mamba2_chunk_scan": state_space},
        keeps_state=True,
    )
)
