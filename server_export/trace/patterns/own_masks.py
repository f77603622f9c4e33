"""Encoders that compute masks themselves from which tokens are padding.

Other encoders add the padding mask to their scores and use it for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from server_export.ir.markers import TOKENS
from server_export.trace.attention import grouped_attention, padding_mask, seen_tokens
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import Call, Pattern, Wrap, register

_ATTENTION = "prge_padded"


class _WithKnownLengths(TorchFunctionMode):
    """Replaces integers that a model reads from a tensor, such as the longest row's length, by the marker."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.item and args[0].dtype is torch.long:
            return TOKENS
        return function(*args, **(kwargs or {}))


def _with_masks(traced: TracedModel, call: Call) -> Call:
    def call_with_masks(tokens: torch.Tensor, arguments: dict[str, Any], padding: torch.Tensor | None) -> Any:
        assert padding is not None
        updated = dict(arguments)
        if "position_ids" in updated:
            # Models with their own masks may expect position ids for every row.
            updated["position_ids"] = updated["position_ids"].expand(tokens.shape)
        return call(tokens, updated | {"attention_mask": seen_tokens(padding).long()}, padding)

    return call_with_masks


def _mask_of_padding(*, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the `padding_mask` of transformers' token mask; attention applies the windows."""
    return padding_mask(attention_mask.float())


def _retrace(traced: TracedModel) -> AbstractContextManager[Wrap] | None:
    return None if traced.is_decoder else _masked(traced)


@contextmanager
def _masked(traced: TracedModel) -> Iterator[Wrap]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, grouped_attention)
    AttentionMaskInterface.register(_ATTENTION, _mask_of_padding)
    traced.model.set_attn_implementation(_ATTENTION)
    with _WithKnownLengths():
        yield _with_masks


register(
    Pattern(
        "own masks",
        serves="encoders that compute masks themselves from the padding",
        model_types=("deberta", "deberta-v2", "esm", "layoutlm", "longformer", "tipsv2_text_model"),
        example="esm",
        retrace=_retrace,
    )
)
