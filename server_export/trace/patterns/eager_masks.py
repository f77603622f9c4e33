"""Decoders with their own attention implementation, which reads masks that transformers builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from server_export.trace.attention import NAME
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import Pattern, Wrap, register

_ATTENTION = "eager"


def _retrace(traced: TracedModel) -> AbstractContextManager[Wrap] | None:
    uses_prge = traced.model.config._attn_implementation == NAME
    return _eager(traced) if traced.is_decoder and uses_prge else None


@contextmanager
def _eager(traced: TracedModel) -> Iterator[Wrap]:
    # Other parts of the model look their attention up by name.
    traced.model.set_attn_implementation(_ATTENTION)
    yield lambda _, call: call


register(
    Pattern(
        "eager masks",
        serves="decoders with their own attention implementation",
        model_types=("git",),
        example="git",
        retrace=_retrace,
    )
)
