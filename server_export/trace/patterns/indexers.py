"""Attention to tokens that an indexer selects; texts must be short enough that it selects all of them."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from prge.errors import Refusal
from server_export.trace.attention import grouped_attention
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import Pattern, register

# Attributes with the number of tokens that a module selects.
_COUNTS = ("index_topk", "token_budget")
_ATTENTION = "prge_indexed"


def indexers(model: nn.Module) -> dict[str, int]:
    """Return how many tokens each indexer of a model selects, by the name of the module."""
    return {
        name: int(getattr(module, count))
        for name, module in model.named_modules()
        for count in _COUNTS
        if hasattr(module, count)
    }


def _check(model: Any, longest: int) -> None:
    budget = min(indexers(model).values(), default=longest)
    if budget < longest:
        raise Refusal(
            "indexer-budget",
            f"The attention of {type(model).__name__} sees only {budget} tokens, which an indexer "
            f"selects, but texts may have {longest}.",
            remedy=f"Export it with --context {budget}.",
        )


def _prepare(traced: TracedModel) -> None:
    """Replace indexers by a function that selects every token."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _without_mask)
    # Decoders pass their mask to the indexer too; this one masks nothing.
    AttentionMaskInterface.register(_ATTENTION, lambda **_: torch.zeros(1, 1, 1, 1))
    traced.model.set_attn_implementation(_ATTENTION)
    for name in indexers(traced.model):
        module: Any = traced.model.get_submodule(name)
        module.forward = MethodType(_select_all, module)


def _select_all(self: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
    # Models expect indices or booleans here, but no attention reads them.
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _without_mask(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    return grouped_attention(module, query, key, value, None, **more)


register(
    Pattern(
        "indexers",
        serves="attention to tokens that an indexer selects, such as DeepSeek V3.2's",
        model_types=tuple(
            """
            axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text
            """.split()
        ),
        example="deepseek_v32",
        attributes=_COUNTS,
        check=_check,
        unadapted=indexers,
        prepare=_prepare,
    )
)
