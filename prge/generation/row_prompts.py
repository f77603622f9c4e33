"""The prompts of rows: texts, conversations up to the message to be written, and prompts of a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prge.data.columns import RowError, format_columns
from prge.data.forms.form import find_form
from prge.data.forms.task import Task
from prge.data.readers.feedback import TEMPLATE_KWARGS
from prge.data.readers.files import Row
from prge.data.sources import RowSource
from prge.errors import DataError, format_value
from prge.generation.prompts import Prompt, Prompts

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RowPrompt:
    """A row and its prompt, as the model reads it and as the row has it: a text or messages."""

    row: Row
    prompt: Prompt
    source: Any


def read_row_prompts(
    source: RowSource,
    rows: Sequence[Row],
    prompts: Prompts,
    *,
    task: Task | None = None,
    system: Messages = (),
    variables: Mapping[str, Any] | None = None,
    others: str = "not read",
) -> tuple[list[RowPrompt], list[str]]:
    """Return the prompts of a source's rows, and lines that say which columns were read.

    Args:
        source: the source of the rows.
        rows: the rows to read.
        prompts: encodes texts and messages.
        task: the task of the rows; None if their columns determine their form.
        system: a system message for conversations without one, or nothing.
        variables: variables of the chat template; those of a row come first.
        others: what the lines call the columns that are not of a prompt.

    Raises:
        DataError: rows have no prompt; all such rows are named.
    """
    read: list[RowPrompt] = []
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for row in rows:
        try:
            if task is not None:
                form_name, names = f"task {task.name}", [*task.needed_columns()]
                text: Any = task.prompt(row.fields)
                prompt = prompts.encode_text(text)
            else:
                form = find_form([row], source.name, source.renamed, prompts_only=True)
                has_template = form.chat != "" and prompts.chat is not None
                if form.chat and prompts.chat is not None:
                    form = form.rendered_by(prompts.chat.variables, [*row.fields])
                form_name, names = form.name, [*form.prompt_columns, *form.optional]
                converted = form.row(row, chat=has_template, prompts_only=True).fields
                if "messages" in converted:
                    text = _messages_to_answer(converted["messages"])
                    text = [*([] if text[0]["role"] == "system" else system), *text]
                    values = {**(variables or {}), **converted.get(TEMPLATE_KWARGS, {})}
                    prompt = prompts.encode_messages(text, values)
                else:
                    text = _text_of(converted)
                    prompt = prompts.encode_text(text)
            columns = format_columns(names, [*row.fields], source.renamed, others)
            counts[f"({form_name}), columns: {columns}"] += 1
            read.append(RowPrompt(row, prompt, text))
        except RowError as problem:
            problems.append(f"row {row.number}: {problem}")
        except DataError as error:
            problems.append(f"row {row.number}: {'; '.join(error.problems)}")
    if problems:
        raise DataError(f"{source.name} has rows that can't be answered:", problems, code="rows-unanswerable")
    return read, [f"{source.name}: {count} rows {columns}" for columns, count in counts.items()]


def check_answerable(messages: object) -> list[Mapping[str, Any]]:
    """Return messages that end with one to answer; raises RowError otherwise."""
    from prge.data.tokenization.chat import check_messages

    try:
        return check_messages(messages, answered=False)
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None


def _messages_to_answer(messages: object) -> list[Mapping[str, Any]]:
    """Return messages without those of the assistant at the end, which are the reference."""
    while isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        messages = messages[:-1]
    return check_answerable(messages)


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _text_of(fields: Mapping[str, Any]) -> str:
    for column in ("prompt", "text"):
        if column in fields:
            if not isinstance(fields[column], str):
                problem = f"column {column!r} is {format_value(fields[column])}, must be a text"
                raise RowError(problem, code="column-not-text")
            return str(fields[column])
    raise AssertionError("a form without a prompt")
