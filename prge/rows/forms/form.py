"""What a row is by its columns, where no task says it: text, prompt and completion, or messages.

    pairs                 chosen and rejected, and prompt where there is one (preferences.py)
    messages              messages, each with role and content
    ShareGPT              conversations, each turn with from and value, or role and content: messages
    ratings               prompt, completion and label
    prompt and completion texts; or lists of messages: messages, of which the completion is learnt
    Alpaca                instruction, output, and input, system and history where they are there: messages
                          where the model has a chat template, else a prompt under headings and its completion
    text

A file has one form: the first of these whose columns are there. Rows that become messages may have further
columns: `system`, and what their chat template is given: `tools`, `chat_template_kwargs`, and any column that
has the name of a variable of the template, such as `enable_thinking`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prge.errors import DataError, shown
from prge.learning.preferences import PREFERENCES, ObjectiveName, Preferring
from prge.rows.columns import Fields, RowError, column_names, decoded, present_columns
from prge.rows.forms.completions import completion_fields, completion_text, whole_text
from prge.rows.forms.instructions import HISTORY, instruction_fields
from prge.rows.forms.messages import (
    SYSTEM,
    TOOLS,
    messages_texts,
    sharegpt_messages,
    template_variables,
    with_system,
)
from prge.rows.forms.preferences import liked_fields, pair_candidates, rated_fields, rating_candidates
from prge.rows.readers.feedback import TEMPLATE_KWARGS
from prge.rows.readers.files import Row
from prge.rows.segments import Candidates, Segmenter, Texts

WEIGHT = "weight"
# Of a row: more would be an oversight.
MOST_WEIGHT = 1e6
# Columns that have a meaning of their own, whatever a template calls by these names.
_OF_CHATS = frozenset({WEIGHT, SYSTEM, TOOLS, TEMPLATE_KWARGS, HISTORY})


@dataclass(frozen=True)
class Form:
    """A set of columns, and how they become one of the three things that are learnt.

    `asked` are the columns that a prompt is made of; `plain` makes the fields `text`, `prompt` and
    `completion`, or `messages` of a row's, for a model with a chat template or without. `chat` says if it
    needs such a template, or takes it where there is one. `prefers` says what of its rows are preferences;
    `plain` makes of these what is liked. `of_chats` are optional columns of rows that become messages, and
    `variables` those among them that the template knows by their names.
    """

    name: str
    columns: tuple[str, ...]
    asked: tuple[str, ...]
    plain: Callable[[Fields, bool], Fields]
    optional: tuple[str, ...] = ()
    chat: Literal["needs", "takes", ""] = ""
    prefers: Preferring = ""
    of_chats: tuple[str, ...] = (SYSTEM, TOOLS, TEMPLATE_KWARGS)
    variables: tuple[str, ...] = ()

    def rendered_by(self, variables: Collection[str], present: Collection[str]) -> Form:
        """The same form for rows that a chat template with these variables renders.

        Args:
            variables: that the template reads.
            present: columns of the rows.
        """
        known = {*self.columns, *self.optional, *self.of_chats, *_OF_CHATS}
        given = tuple(name for name in present if name in variables and name not in known)
        optional = (*self.optional, *(name for name in self.of_chats if name not in self.optional), *given)
        return replace(self, optional=optional, variables=given)

    def needed(self, asked: bool) -> tuple[str, ...]:
        """Columns that a row must have; `asked`: it may lack what is to be answered."""
        return self.asked if asked else self.columns

    def row(self, row: Row, *, chat: bool, asked: bool = False) -> Row:
        """A row as text, prompt and completion, or messages with `chat_template_kwargs` where it has some.

        Args:
            row: of a file of this form.
            chat: whether the model has a chat template.
            asked: the row may lack what is to be answered.

        Raises:
            RowError: it lacks a column, or has what isn't of this form.
        """
        self.check(row, asked)
        fields = self.own(row).fields
        made = self.plain(fields, chat)
        if "messages" in made:
            made = {"messages": with_system(fields.get(SYSTEM), made["messages"])}
            if variables := template_variables(fields, self.variables):
                made[TEMPLATE_KWARGS] = variables
        return Row(row.number, made)

    def segments(self, objective: ObjectiveName, segmenter: Segmenter, row: Row) -> Texts | Candidates:
        """What is learnt of a row by an objective, in segments.

        Raises:
            RowError: the row can't be learnt.
            DataError: the chat template refuses its messages.
            BundleError: the chat template takes too much for them.
        """
        segments = self._segments(objective, segmenter, row)
        if WEIGHT not in self.optional or row.fields.get(WEIGHT) is None:
            return segments
        return replace(segments, weight=_weight_of(row.fields[WEIGHT]))

    def _segments(self, objective: ObjectiveName, segmenter: Segmenter, row: Row) -> Texts | Candidates:
        if objective in PREFERENCES:
            self.check(row)
            compared = rating_candidates if objective == "kto" else pair_candidates
            return compared(segmenter, self.variables, row)
        row = self.row(row, chat=segmenter.chat is not None)
        if "messages" in row.fields and segmenter.chat is not None:
            return messages_texts(segmenter, row)
        return (whole_text if self is TEXT else completion_text)(segmenter, row)

    def check(self, row: Row, asked: bool = False) -> None:
        """Raise RowError if a row lacks a column; see `needed`."""
        if any(column not in row.fields for column in self.needed(asked)):
            raise RowError(
                f"is no row of {self.name}: its columns are {', '.join(map(str, row.fields)) or 'none'}",
                code="row-of-other-form",
            )

    def own(self, row: Row) -> Row:
        """A row with the columns of this form alone."""
        columns = (*self.columns, *self.optional)
        return Row(row.number, {name: row.fields[name] for name in columns if name in row.fields})


def _weight_of(value: object) -> float:
    """How much a row counts, by its column; raises RowError."""
    try:
        weight = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight <= MOST_WEIGHT:
        raise RowError(
            f"its weight is {shown(value)}, must be a number above 0, at most {MOST_WEIGHT:g}: how much the "
            "row counts; give a column that says something else another name",
            code="weight-unusable",
        )
    return weight


def _as_it_is(fields: Fields, chat: bool) -> Fields:
    return fields


def _message_fields(fields: Fields, chat: bool) -> Fields:
    return {"messages": decoded("messages", fields["messages"])}


def _sharegpt_fields(fields: Fields, chat: bool) -> Fields:
    return {"messages": sharegpt_messages(fields)}


CONTROL_TOKENS = "control_tokens"
_OF_ROW = (WEIGHT, CONTROL_TOKENS)
TEXT = Form("text", ("text",), ("text",), _as_it_is, of_chats=())
_PAIR, _RATING = ("chosen", "rejected"), ("prompt", "completion", "label")
_TURNS, _INSTRUCTION = ("conversations",), ("instruction", "output")
_BESIDE_INSTRUCTION = ("input", SYSTEM, HISTORY, WEIGHT)
FORMS = (
    Form("pairs", _PAIR, _PAIR, liked_fields, ("prompt", *_OF_ROW), prefers="pairs"),
    Form("messages", ("messages",), ("messages",), _message_fields, _OF_ROW, "needs"),
    Form("ShareGPT", _TURNS, _TURNS, _sharegpt_fields, (WEIGHT,), "needs"),
    Form("ratings", _RATING, _RATING, rated_fields, _OF_ROW, prefers="ratings"),
    Form("prompt and completion", ("prompt", "completion"), ("prompt",), completion_fields, _OF_ROW),
    Form("Alpaca", _INSTRUCTION, _INSTRUCTION[:1], instruction_fields, _BESIDE_INSTRUCTION, "takes"),
    TEXT,
)


def find_form(
    rows: Sequence[Row],
    source: str,
    named: Collection[str] = (),
    *,
    asked: bool = False,
    objective: ObjectiveName = "auto",
) -> Form:
    """The form of all rows of a file.

    Args:
        rows: of the file.
        source: names the data in errors.
        named: columns that the user gave names of; other forms than theirs aren't looked for.
        asked: rows may lack what is to be answered.
        objective: what is learnt; `completion` takes rated answers whatever their label.

    Raises:
        DataError: their columns are of no form, or of several.
    """
    what = f"{source} can't be used"
    forms = [form for form in FORMS if set(named) <= {*form.columns, *form.optional, *form.of_chats}]
    if objective == "completion":
        forms = [form for form in forms if form.prefers != "ratings"]
    found = {
        next((form for form in forms if {*form.needed(asked)} <= row.fields.keys()), None) for row in rows
    } - {None}
    if not found:
        known = "; ".join(f"{form.name}: {', '.join(form.needed(asked))}" for form in FORMS)
        raise DataError(
            what,
            [f"its columns are {column_names(present_columns(rows))}; known are {known}"],
            remedy="name them, such as --columns prompt=question completion=answer, or give a --task",
            code="form-unknown",
        )
    if len(found) > 1:
        names = ", ".join(form.name for form in FORMS if form in found)
        raise DataError(
            what,
            [f"it mixes rows of several forms: {names}"],
            remedy="make a file of each",
            code="forms-mixed",
        )
    form = next(form for form in forms if form in found)
    holds_messages = any(isinstance(row.fields.get(column), list) for row in rows for column in form.columns)
    return replace(form, chat="needs") if form is not TEXT and not form.chat and holds_messages else form
