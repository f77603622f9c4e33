"""The forms of rows, which are recognised by their columns if there is no task.

    pairs                 chosen, rejected, and optionally prompt (preferences.py)
    messages              messages, each with role and content
    ShareGPT              conversations, each turn with from and value, or role and content; become messages
    ratings               prompt, completion and label
    prompt and completion texts; or lists of messages, which become messages with a trained completion
    Alpaca                instruction, output, and optionally input, system and history; become messages if
                          the model has a chat template, else a prompt with headings and its completion
    text

A file has one form: the first of these whose columns are present. Rows that become messages may have more
columns: `system`, and arguments of their chat template: `tools`, `chat_template_kwargs`, and any column with
the name of a variable of the template, such as `enable_thinking`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prge.data.columns import Fields, RowError, decode_column, format_column_names, present_columns
from prge.data.forms.completions import completion_fields, completion_text, whole_text
from prge.data.forms.instructions import HISTORY, instruction_fields
from prge.data.forms.messages import (
    SYSTEM,
    TOOLS,
    messages_texts,
    sharegpt_messages,
    template_variables,
    with_system,
)
from prge.data.forms.preferences import chosen_fields, pair_candidates, rated_fields, rating_candidates
from prge.data.readers.feedback import TEMPLATE_KWARGS
from prge.data.readers.files import Row
from prge.data.segments import Candidates, Segmenter, Texts
from prge.errors import DataError, format_value
from prge.objectives.preferences import PREFERENCES, ObjectiveName, Preferring

WEIGHT = "weight"
# A larger weight of a row is probably a mistake.
MAX_WEIGHT = 1e6
# Columns with a fixed meaning, even if a template has variables of these names.
_CHAT_COLUMNS = frozenset({WEIGHT, SYSTEM, TOOLS, TEMPLATE_KWARGS, HISTORY})


@dataclass(frozen=True)
class Form:
    """A form of rows: a set of columns and their conversion.

    Attributes:
        name: name for users.
        columns: columns that a row must have.
        prompt_columns: columns that a prompt alone must have.
        to_plain: converts a row to `text`, to `prompt` and `completion`, or to `messages`, given whether the
            model has a chat template. For preferences, it returns the preferred answer.
        optional: columns that a row may have.
        chat: whether the form needs a chat template, or uses one if there is one.
        prefers: how the rows express preferences, if they do.
        chat_columns: optional columns of rows that become messages.
        variables: optional columns that are variables of the chat template.
    """

    name: str
    columns: tuple[str, ...]
    prompt_columns: tuple[str, ...]
    to_plain: Callable[[Fields, bool], Fields]
    optional: tuple[str, ...] = ()
    chat: Literal["needs", "takes", ""] = ""
    prefers: Preferring = ""
    chat_columns: tuple[str, ...] = (SYSTEM, TOOLS, TEMPLATE_KWARGS)
    variables: tuple[str, ...] = ()

    def rendered_by(self, variables: Collection[str], present: Collection[str]) -> Form:
        """Return this form for rows that are rendered by a chat template with the given variables.

        Args:
            variables: variables that the template reads.
            present: columns of the rows.
        """
        known = {*self.columns, *self.optional, *self.chat_columns, *_CHAT_COLUMNS}
        template_columns = tuple(name for name in present if name in variables and name not in known)
        optional = (
            *self.optional,
            *(name for name in self.chat_columns if name not in self.optional),
            *template_columns,
        )
        return replace(self, optional=optional, variables=template_columns)

    def required_columns(self, prompts_only: bool) -> tuple[str, ...]:
        """Return the columns that a row must have; with `prompts_only`, those of a prompt."""
        return self.prompt_columns if prompts_only else self.columns

    def row(self, row: Row, *, chat: bool, prompts_only: bool = False) -> Row:
        """Convert a row to a text, a prompt and a completion, or messages with `chat_template_kwargs`.

        Args:
            row: A row of this form.
            chat: whether the model has a chat template.
            prompts_only: the row may lack the answer.

        Raises:
            RowError: the row lacks a column, or has an invalid value.
        """
        self.check(row, prompts_only)
        fields = self.select_columns(row).fields
        converted = self.to_plain(fields, chat)
        if "messages" in converted:
            converted = {"messages": with_system(fields.get(SYSTEM), converted["messages"])}
            if variables := template_variables(fields, self.variables):
                converted[TEMPLATE_KWARGS] = variables
        return Row(row.number, converted)

    def segments(self, objective: ObjectiveName, segmenter: Segmenter, row: Row) -> Texts | Candidates:
        """Convert a row to segments for an objective.

        Raises:
            RowError: the row can't be used.
            DataError: the chat template refuses the messages.
            BundleError: the chat template exceeds its limits.
        """
        segments = self._segments(objective, segmenter, row)
        if WEIGHT not in self.optional or row.fields.get(WEIGHT) is None:
            return segments
        return replace(segments, weight=_weight_of(row.fields[WEIGHT]))

    def _segments(self, objective: ObjectiveName, segmenter: Segmenter, row: Row) -> Texts | Candidates:
        if objective in PREFERENCES:
            self.check(row)
            build_candidates = rating_candidates if objective in ("kto", "grpo") else pair_candidates
            return build_candidates(segmenter, self.variables, row)
        row = self.row(row, chat=segmenter.chat is not None)
        if "messages" in row.fields and segmenter.chat is not None:
            return messages_texts(segmenter, row)
        return (whole_text if self is TEXT else completion_text)(segmenter, row)

    def check(self, row: Row, prompts_only: bool = False) -> None:
        """Raise RowError if a row lacks a required column."""
        if any(column not in row.fields for column in self.required_columns(prompts_only)):
            raise RowError(
                f"it is not a row of {self.name}: its columns are "
                f"{', '.join(map(str, row.fields)) or 'none'}",
                code="row-of-other-form",
            )

    def select_columns(self, row: Row) -> Row:
        """Return a row with only the columns of this form."""
        columns = (*self.columns, *self.optional)
        return Row(row.number, {name: row.fields[name] for name in columns if name in row.fields})


def _weight_of(value: object) -> float:
    """Return the weight of a row from its column; raises RowError."""
    try:
        weight = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise RowError(
            f"its weight is {format_value(value)}, must be a number above 0, at most {MAX_WEIGHT:g}: it "
            "multiplies the row's loss; rename a column with another meaning",
            code="weight-unusable",
        )
    return weight


def _unchanged(fields: Fields, chat: bool) -> Fields:
    return fields


def _message_fields(fields: Fields, chat: bool) -> Fields:
    return {"messages": decode_column("messages", fields["messages"])}


def _sharegpt_fields(fields: Fields, chat: bool) -> Fields:
    return {"messages": sharegpt_messages(fields)}


CONTROL_TOKENS = "control_tokens"
_OPTIONAL = (WEIGHT, CONTROL_TOKENS)
TEXT = Form("text", ("text",), ("text",), _unchanged, chat_columns=())
_PAIR, _RATING = ("chosen", "rejected"), ("prompt", "completion", "label")
_TURNS, _INSTRUCTION = ("conversations",), ("instruction", "output")
_OPTIONAL_OF_INSTRUCTION = ("input", SYSTEM, HISTORY, WEIGHT)
FORMS = (
    Form("pairs", _PAIR, _PAIR, chosen_fields, ("prompt", *_OPTIONAL), prefers="pairs"),
    Form("messages", ("messages",), ("messages",), _message_fields, _OPTIONAL, "needs"),
    Form("ShareGPT", _TURNS, _TURNS, _sharegpt_fields, (WEIGHT,), "needs"),
    Form("ratings", _RATING, _RATING, rated_fields, _OPTIONAL, prefers="ratings"),
    Form("prompt and completion", ("prompt", "completion"), ("prompt",), completion_fields, _OPTIONAL),
    Form("Alpaca", _INSTRUCTION, _INSTRUCTION[:1], instruction_fields, _OPTIONAL_OF_INSTRUCTION, "takes"),
    TEXT,
)


def find_form(
    rows: Sequence[Row],
    source: str,
    named: Collection[str] = (),
    *,
    prompts_only: bool = False,
    objective: ObjectiveName = "auto",
) -> Form:
    """Return the form of all rows of a file.

    Args:
        rows: rows of the file.
        source: name of the data in errors.
        named: columns that the user renamed; only forms with all of them are considered.
        prompts_only: rows may lack the answer.
        objective: objective of the training; `completion` trains on rated answers with any label.

    Raises:
        DataError: the columns match no form, or the rows have several forms.
    """
    what = f"{source} can't be used:"
    forms = [form for form in FORMS if set(named) <= {*form.columns, *form.optional, *form.chat_columns}]
    if objective == "completion":
        forms = [form for form in forms if form.prefers != "ratings"]
    matches = {
        next((form for form in forms if {*form.required_columns(prompts_only)} <= row.fields.keys()), None)
        for row in rows
    } - {None}
    if not matches:
        known = "; ".join(f"{form.name}: {', '.join(form.required_columns(prompts_only))}" for form in FORMS)
        raise DataError(
            what,
            [f"its columns are {format_column_names(present_columns(rows))}; known are {known}"],
            remedy="Map them, for example with --columns prompt=question completion=answer, or give --task.",
            code="form-unknown",
        )
    if len(matches) > 1:
        names = ", ".join(form.name for form in FORMS if form in matches)
        raise DataError(
            what,
            [f"it mixes rows of several forms: {names}"],
            remedy="Make a file for each form.",
            code="forms-mixed",
        )
    form = next(form for form in forms if form in matches)
    holds_messages = any(isinstance(row.fields.get(column), list) for row in rows for column in form.columns)
    return replace(form, chat="needs") if form is not TEXT and not form.chat and holds_messages else form
