"""Alpaca's rows: an instruction with its output, as messages or as a prompt under headings."""

from __future__ import annotations

from collections.abc import Iterator

from prge.errors import shown
from prge.rows.columns import Fields, RowError, decoded, text_of
from prge.rows.forms.messages import SYSTEM

HISTORY = "history"


def instruction_fields(fields: Fields, chat: bool) -> Fields:
    """An instruction as `messages` for a model with a chat template, else as `prompt` and `completion`.

    Raises:
        RowError: a column is no text, or there is nothing to answer or to learn.
    """
    instruction, given = text_of(fields, "instruction"), fields.get("input")
    given = "" if given is None else text_of(fields, "input")
    asked = [text for text in (instruction, given) if text.strip()]
    if not asked:
        raise RowError("its instruction is empty: there is nothing to answer", code="prompt-empty")
    answer = text_of(fields, "output") if "output" in fields else ""
    earlier = list(_history(fields))
    if not chat:
        system = text_of(fields, SYSTEM) if fields.get(SYSTEM) else ""
        headings = [
            heading
            for question, reply in earlier
            for heading in (("Instruction", question), ("Response", reply))
        ]
        headings += [("Instruction", instruction), ("Input", given)]
        parts = [f"### {heading}:\n{text}\n\n" for heading, text in headings if text.strip()]
        parts = [f"{system}\n\n", *parts] if system else parts
        return {"prompt": "".join([*parts, "### Response:\n"]), "completion": answer}
    if "output" in fields and not answer:
        raise RowError("its output is empty: there is nothing to learn from", code="answer-empty")
    turns = [*earlier, ("\n\n".join(asked), answer)]
    roles = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return {"messages": [{"role": role, "content": text} for role, text in roles if text]}


def _history(fields: Fields) -> Iterator[tuple[str, str]]:
    """Earlier questions with their answers; raises RowError."""
    history = decoded(HISTORY, fields.get(HISTORY) or [])
    if not isinstance(history, list):
        raise RowError(
            f"{HISTORY} must be a list of questions with their answers, not {shown(history)}",
            code="history-malformed",
        )
    for each in history:
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(text, str) for text in each):
            raise RowError(
                f"{HISTORY} must have lists of a question and its answer, not {shown(each)}",
                code="history-malformed",
            )
        yield each[0], each[1]
