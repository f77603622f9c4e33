"""Decoders with an attention of their own, which gets masks that transformers makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from server_export.trace.attention import NAME
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import Pattern, Wrap, register

_ATTENTION = "eager"


def _retrace(traced: TracedModel) -> AbstractContextManager[Wrap] | None:
    is_asked = traced.model.config._attn_implementation == NAME
    return _eager(traced) if traced.is_decoder and is_asked else None


@contextmanager
def _eager(traced: TracedModel) -> Iterator[Wrap]:
    # The attention of its other parts is asked by name.
    traced.model.set_attn_implementation(_ATTENTION)
    yield lambda _, call: call


register(
    Pattern(
        "eager masks",
        serves="decoders with an attention of their own",
        model_types=("git",),
        example="git",
        retrace=_retrace,
    )
)
