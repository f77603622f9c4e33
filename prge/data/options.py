"""Options for building examples from rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prge.data.tokenization.control_tokens import ControlTokens
from prge.objectives.preferences import ObjectiveName

Overflow = Literal["auto", "error", "truncate", "split"]


@dataclass(frozen=True)
class BuildOptions:
    """Options for building examples from rows."""

    overflow: Overflow = "error"
    """How to handle rows that are too long for the bundle: `error`, `truncate`, or `split` (not for
    candidates); `auto` splits texts and chats and truncates all others."""
    append_eos: bool = True
    """Train on an end-of-sequence token after texts, completions and answers, if the model has one and they
    don't end with it."""
    max_dropped: float | None = None
    """Largest share of target tokens that may be dropped; None for no limit."""
    skip_unusable: bool = False
    """Skip rows that can't be used, unless there are no others; the report lists them."""
    objective: ObjectiveName | None = None
    """Objective of the training; None refuses rows of preferences."""
    date: str | None = None
    """Date that a chat template sees as today, in ISO 8601; None for the current date."""
    control_tokens: ControlTokens = "special"
    """Where control tokens that are written in rows are read as such: `special`, in texts, prompts and
    completions; `prompt`, in prompts only; `all`, also in messages; `text`, nowhere."""
