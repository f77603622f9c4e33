"""Feedback as rows to learn from: completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prge.rows.feedback import GOOD, Fields, spaced
from prge.rows.readers import Row


def asked_text(row: Fields) -> str:
    """What was asked, the same text for the same question."""
    return json.dumps(row.get("messages", row.get("prompt")), sort_keys=True)


def can_be_learnt(row: Fields) -> bool:
    """Whether a row says what should be answered, and not only what should not."""
    return "correction" in row or row.get("rating") == GOOD


def completions(rows: Sequence[Fields]) -> list[Row]:
    """Rows of prompts with corrections, or with answers that were rated good; bad ratings aren't there."""
    learnable = ((number, row) for number, row in enumerate(rows, 1) if can_be_learnt(row))
    return [Row(number, _completed(row, row.get("correction", row["answer"]))) for number, row in learnable]


def _completed(row: Fields, answer: str) -> dict[str, Any]:
    if "messages" in row:
        return {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
    return {"prompt": row["prompt"], "completion": spaced(answer, row["answer"])}
