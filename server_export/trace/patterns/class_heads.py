"""Encoders with their own classification head, which may count the tokens of a row."""

from __future__ import annotations

from typing import Any

import torch

from server_export.checkpoint.classifier import override_base_inputs
from server_export.trace.attention import seen_tokens
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import Call, Pattern, register


def _call(traced: TracedModel, call: Call) -> Call:
    def with_head(tokens: torch.Tensor, arguments: dict[str, Any], padding: torch.Tensor | None) -> Any:
        assert padding is not None
        seen = seen_tokens(padding).float()
        # The encoder gets the same arguments as other encoders, whatever the head passes to it.
        with override_base_inputs(traced.model, arguments):
            return traced.model(input_ids=tokens, attention_mask=seen, return_dict=True)

    return with_head


register(
    Pattern(
        "classification heads",
        serves="encoders with a classification head of their own",
        model_types=("bert", "roberta"),
        example="roberta",
        matches=lambda traced: traced.has_classes,
        call=_call,
    )
)
