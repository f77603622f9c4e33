"""Attention within chunks of a text; it is supported for texts that are no longer than a chunk."""

from __future__ import annotations

from typing import Any

from prge.errors import Refusal
from server_export.trace.patterns import Pattern, register

_CHUNKED, _SIZE = "chunked_attention", "attention_chunk_size"


def _check(model: Any, longest: int) -> None:
    in_chunks = _CHUNKED in (getattr(model.config, "layer_types", None) or ())
    if in_chunks and longest > (chunk := int(getattr(model.config, _SIZE))):
        raise Refusal(
            "attention-chunk",
            f"The attention of {type(model).__name__} sees only the tokens of a chunk of {chunk} "
            f"({_SIZE}), but texts may have {longest} tokens.",
            remedy=f"Export it with --context {chunk}.",
        )


register(
    Pattern(
        "chunked attention",
        serves="attention within chunks of a text, such as Llama 4's",
        model_types=("llama4", "llama4_text"),
        example="llama4_text",
        settings=(_SIZE,),
        check=_check,
    )
)
