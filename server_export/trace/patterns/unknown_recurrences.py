"""Recurrences that no pattern supports: such a model is refused before it is traced token by token."""

from __future__ import annotations

from typing import Any

from prge.errors import Refusal
from server_export.trace.patterns import Pattern, patterns, register, replaceable_functions


def _check(model: Any, longest: int) -> None:
    # Stateful models have this class attribute, or linear attention among the types of their layers.
    types = getattr(getattr(model, "config", None), "layer_types", None) or ()
    if not getattr(model, "_is_stateful", False) and "linear_attention" not in types:
        return
    known = [name for pattern in patterns() if pattern.keeps_state for name in pattern.functions]
    if not any(name in known for _, name, _ in replaceable_functions(model)):
        raise Refusal(
            "unknown-recurrence",
            f"{type(model).__name__} has a recurrence that prge does not support. Supported are delta "
            "rules, state spaces of Mamba 1 and 2, gated linear recurrences and RWKV's, as the functions "
            f"{', '.join(known)} of transformers.",
            remedy="Use a model with attention or with one of these recurrences.",
        )


register(
    Pattern(
        "unknown recurrences",
        serves="models with a recurrence that no other pattern supports, which are refused",
        model_types=("minimax", "zaya"),
        example="minimax",
        check=_check,
    )
)
