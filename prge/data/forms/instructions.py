"""Rows in the format of Alpaca, as messages or as a prompt with headings."""

from __future__ import annotations

from collections.abc import Iterator

from prge.data.columns import Fields, RowError, decode_column, get_text
from prge.data.forms.messages import SYSTEM
from prge.errors import format_value

HISTORY = "history"


def instruction_fields(fields: Fields, chat: bool) -> Fields:
    """Convert an instruction to `messages` if there is a chat template, else to `prompt` and `completion`.

    Raises:
        RowError: A column is not a text, or the instruction or the output is empty.
    """
    instruction, extra_input = get_text(fields, "instruction"), fields.get("input")
    extra_input = "" if extra_input is None else get_text(fields, "input")
    prompt_parts = [text for text in (instruction, extra_input) if text.strip()]
    if not prompt_parts:
        raise RowError("its instruction is empty: there is nothing to answer", code="prompt-empty")
    answer = get_text(fields, "output") if "output" in fields else ""
    history = list(_history(fields))
    if not chat:
        system = get_text(fields, SYSTEM) if fields.get(SYSTEM) else ""
        headings = [
            heading
            for question, reply in history
            for heading in (("Instruction", question), ("Response", reply))
        ]
        headings += [("Instruction", instruction), ("Input", extra_input)]
        parts = [f"### {heading}:\n{text}\n\n" for heading, text in headings if text.strip()]
        parts = [f"{system}\n\n", *parts] if system else parts
        return {"prompt": "".join([*parts, "### Response:\n"]), "completion": answer}
    if "output" in fields and not answer:
        raise RowError("its output is empty: there is nothing to learn from", code="answer-empty")
    exchanges = [*history, ("\n\n".join(prompt_parts), answer)]
    roles = [
        (role, text)
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    return {"messages": [{"role": role, "content": text} for role, text in roles if text]}


def _history(fields: Fields) -> Iterator[tuple[str, str]]:
    """Yield earlier questions with their answers; raises RowError."""
    history = decode_column(HISTORY, fields.get(HISTORY) or [])
    if not isinstance(history, list):
        raise RowError(
            f"{HISTORY} must be a list of questions with their answers, not {format_value(history)}",
            code="history-malformed",
        )
    for each in history:
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(text, str) for text in each):
            raise RowError(
                f"{HISTORY} must have lists of a question and its answer, not {format_value(each)}",
                code="history-malformed",
            )
        yield each[0], each[1]
