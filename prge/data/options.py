"""How rows become examples, as a user sets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prge.data.tokenization.control_tokens import ControlTokens
from prge.objectives.preferences import ObjectiveName

Overflow = Literal["auto", "error", "truncate", "split"]


@dataclass(frozen=True)
class BuildOptions:
    """How rows become examples."""

    overflow: Overflow = "error"
    """What is too long for the bundle: `error`, `truncate`, or `split` (not candidates) it; `auto`: split
    texts and chats, truncate all else."""
    append_eos: bool = True
    """Learn an end-of-sequence token after texts, completions and answers, where the model has one and they
    don't end with it."""
    max_dropped: float | None = None
    """Largest share of target tokens that may be left out; None: any."""
    skip_unusable: bool = False
    """Leave out rows that can't be used, as long as there are others; the report has them."""
    objective: ObjectiveName | None = None
    """What is learnt of the rows; None: not of preferences, which are refused."""
    date: str | None = None
    """Day that a chat template takes for today, in ISO 8601; None: today."""
    control_tokens: ControlTokens = "special"
    """Where control tokens that are written in rows are control tokens: `special`, in texts, prompts and
    completions; `prompt`, in prompts alone; `all`, in messages too; `text`, nowhere."""
