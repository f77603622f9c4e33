"""Attention of several streams, each of which predicts a token further on: such models are refused."""

from __future__ import annotations

from typing import Any

from prge.errors import Refusal
from server_export.trace.patterns import Pattern, register


def _check(model: Any, longest: int) -> None:
    raise Refusal(
        "ngram-attention",
        f"the attention of {type(model).__name__} has a stream for each of several tokens to come, whose "
        "distances are made for all positions at once",
        remedy="take a checkpoint of another type",
    )


register(
    Pattern(
        "n-gram attention",
        serves="decoders that predict several tokens at once, which are refused",
        model_types=("prophetnet",),
        example="prophetnet",
        attributes=("ngram",),
        check=_check,
    )
)
