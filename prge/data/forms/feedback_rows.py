"""Converts feedback to rows for training: completions, pairs, or rated answers.

    objective             corrections                             ratings
    completion            completions                             good answers are completions
    dpo, ipo, simpo, orpo pairs of correction and answer          left out
    kto, grpo             the answer is false, the correction true  true or false
    auto                  kto if there is a bad rating, else completion

The earlier answers of a conversation are not trained on: their `weight` is 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from prge.data.forms.form import CONTROL_TOKENS
from prge.data.readers.feedback import BAD, GOOD, TEMPLATE_KWARGS, Fields, with_leading_space
from prge.data.readers.files import Row
from prge.objectives.preferences import PREFERENCES, ObjectiveName


def rows_from_feedback(rows: Sequence[Row], objective: ObjectiveName = "auto") -> tuple[list[Row], str]:
    """Return rows for training, and a line that summarises the conversion.

    Args:
        rows: valid feedback.
        objective: objective of the training.
    """
    corrected = [row for row in rows if "correction" in row.fields]
    rated = [row for row in rows if "correction" not in row.fields]
    good = [row for row in rated if row.fields["rating"] == GOOD]
    counts = f"feedback: {len(corrected)} corrections, {len(good)} {GOOD}, {len(rated) - len(good)} {BAD}"
    if objective == "auto":
        objective = "kto" if len(good) < len(rated) else "completion"
    if objective in ("kto", "grpo"):
        labelled = [fields for row in rows for fields in _labelled(row.fields)]
        return [Row(number, fields) for number, fields in enumerate(labelled, 1)], f"{counts}; rated answers"
    if objective in PREFERENCES:
        skipped = f", {len(rated)} ratings left out" if rated else ""
        return [Row(row.number, _pair(row.fields)) for row in corrected], f"{counts}; pairs{skipped}"
    skipped = f", {BAD} ratings left out" if len(good) < len(rated) else ""
    learnable = [row for row in rows if has_positive_answer(row.fields)]
    return [Row(row.number, _completion(row.fields)) for row in learnable], f"{counts}; completions{skipped}"


def has_positive_answer(row: Fields) -> bool:
    """Return whether a row has an answer to learn, and not only one to avoid."""
    return "correction" in row or row["rating"] == GOOD


def prompt_key(row: Fields) -> str:
    """Return the prompt or the messages of a row as canonical JSON."""
    return json.dumps(row.get("messages", row.get("prompt")), sort_keys=True)


def _completion(row: Fields) -> dict[str, Any]:
    prompt, answer = _prompt(row), _answer(row, row.get("correction", row["answer"]))
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer, **_template_fields(row)}
    history = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
    return {"messages": [*history, *answer], **_template_fields(row)}


def _pair(row: Fields) -> dict[str, Any]:
    sides = {"chosen": row["correction"], "rejected": row["answer"]}
    return {
        "prompt": _prompt(row),
        **{name: _answer(row, text) for name, text in sides.items()},
        **_template_fields(row),
    }


def _labelled(row: Fields) -> Iterator[dict[str, Any]]:
    if "correction" in row:
        yield {**_rated(row, row["correction"]), "label": True}
    yield {**_rated(row, row["answer"]), "label": row.get("rating") == GOOD}


def _rated(row: Fields, text: str) -> dict[str, Any]:
    return {"prompt": _prompt(row), "completion": _answer(row, text), **_template_fields(row)}


def _template_fields(row: Fields) -> Fields:
    """Return the arguments of a conversation's chat template, or how control tokens of a prompt are read."""
    if "messages" in row:
        return {TEMPLATE_KWARGS: row[TEMPLATE_KWARGS]} if row.get(TEMPLATE_KWARGS) else {}
    return {CONTROL_TOKENS: row.get(CONTROL_TOKENS, "prompt")}


def _prompt(row: Fields) -> Any:
    return row["messages"] if "messages" in row else row["prompt"]


def _answer(row: Fields, text: str) -> Any:
    """Return an answer as a text after its prompt, or as a message."""
    if "messages" in row:
        return [{"role": "assistant", "content": text}]
    return with_leading_space(text, row["answer"])
