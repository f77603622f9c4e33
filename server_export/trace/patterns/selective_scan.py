"""State spaces of Mamba 1, whose elements decay separately."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from server_export.trace.patterns import Pattern, register
from server_export.trace.recurrent import scan
from server_export.trace.tables import ModelTables


def selective_scan(
    tables: ModelTables,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Compute Mamba 1's scan of [rows, width, tokens]; A is [width, size], B and C [rows, size, tokens]."""
    (rows, width, tokens), size = hidden_states.shape, A.shape[1]
    dt = dt if delta_bias is None else dt + delta_bias.reshape(width, 1)
    dt = F.softplus(dt) if delta_softplus else dt
    factor = torch.exp(A.reshape(width, size, 1) * dt.unsqueeze(2))
    source = (dt * hidden_states).unsqueeze(2) * B.unsqueeze(1)
    states = scan(
        tables, factor.reshape(rows, width * size, tokens), source.reshape(rows, width * size, tokens)
    )
    output = (states.reshape(rows, width, size, tokens) * C.unsqueeze(1)).sum(2)
    output = output if D is None else output + hidden_states * D.reshape(width, 1)
    return output if z is None else output * F.silu(z)


register(
    Pattern(
        "selective scan",
        serves="state spaces of Mamba 1",
        model_types=("falcon_mamba", "jamba", "mamba"),
        example="mamba",
        functions={"mamba_selective_scan": selective_scan},
        keeps_state=True,
    )
)
