"""Linear attention with the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch

from server_export.trace.patterns import Pattern, register
from server_export.trace.recurrent import by_head, recurrence
from server_export.trace.tables import ModelTables


def delta_rule(
    tables: ModelTables,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the gated delta rule of [rows, tokens, heads, width]; `g` and `beta` are [rows, tokens, heads].

    Decays may differ for the elements of a key: [rows, tokens, heads, width].
    """
    heads = value.shape[2]
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = by_head(query, heads) * query.shape[-1] ** -0.5
    output = recurrence(tables, query, by_head(key, heads), value, g, beta)
    return output, None


register(
    Pattern(
        "delta rule",
        serves="linear attention by the delta rule, such as Qwen 3.5's and Kimi Linear's",
        model_types=tuple(
            """
            bailing_hybrid kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
            qwen3_next qwen4_exp qwen4_exp_text
            """.split()
        ),
        example="qwen3_5_text",
        functions={"torch_chunk_gated_delta_rule": delta_rule, "chunk_kimi_delta_attention": delta_rule},
        keeps_state=True,
    )
)
