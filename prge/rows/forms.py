"""What a row is by its columns, where no task says it: text, prompt and completion, or messages.

    pairs                 chosen and rejected, and prompt where there is one (preferences.py)
    messages              messages, each with role and content
    ShareGPT              conversations, each turn with from and value, or role and content: messages
    ratings               prompt, completion and label
    prompt and completion
    Alpaca                instruction, output, and input where there is one: messages where the model has a
                          chat template, else a prompt under headings and its completion
    text

A file has one form: the first of these whose columns are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prge.errors import DataError, printable, shortened, shown
from prge.learning.preferences import ObjectiveName, Preferring
from prge.rows.preferences import pair_fields, rating_fields
from prge.rows.readers import Row
from prge.rows.task import RowError

LONGEST_COLUMNS = 300
# Who speaks in ShareGPT's turns, and the role that chat templates know them by.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """A set of columns, and how they become one of the three things that are learnt.

    `asked` are the columns that a prompt is made of; `plain` makes the fields `text`, `prompt` and
    `completion`, or `messages` of a row's, for a model with a chat template or without. `chat` says if it
    needs such a template, or takes it where there is one. `prefers` says what of its rows are preferences;
    `plain` makes of these what is liked.
    """

    name: str
    columns: tuple[str, ...]
    asked: tuple[str, ...]
    plain: Callable[[Fields, bool], Fields]
    optional: tuple[str, ...] = ()
    chat: Literal["needs", "takes", ""] = ""
    prefers: Preferring = ""

    def needed(self, asked: bool) -> tuple[str, ...]:
        """Columns that a row must have; `asked`: it may lack what is to be answered."""
        return self.asked if asked else self.columns

    def row(self, row: Row, *, chat: bool, asked: bool = False) -> Row:
        """A row as text, prompt and completion, or messages.

        Args:
            row: of a file of this form.
            chat: whether the model has a chat template.
            asked: the row may lack what is to be answered.

        Raises:
            RowError: it lacks a column, or has what isn't of this form.
        """
        self.check(row, asked)
        return Row(row.number, self.plain(self.own(row).fields, chat))

    def check(self, row: Row, asked: bool = False) -> None:
        """Raise RowError if a row lacks a column; see `needed`."""
        if any(column not in row.fields for column in self.needed(asked)):
            raise RowError(
                f"is no row of {self.name}: its columns are {', '.join(map(str, row.fields)) or 'none'}"
            )

    def own(self, row: Row) -> Row:
        """A row with the columns of this form alone."""
        columns = (*self.columns, *self.optional)
        return Row(row.number, {name: row.fields[name] for name in columns if name in row.fields})


def _as_it_is(fields: Fields, chat: bool) -> Fields:
    return fields


def _of_turns(fields: Fields, chat: bool) -> Fields:
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise RowError("conversations must be a list of at least one turn")
    return {"messages": [_message(number, turn) for number, turn in enumerate(turns, 1)]}


def _message(number: int, turn: object) -> dict[str, str]:
    speaker, content = None, None
    if isinstance(turn, dict):
        speaker = turn.get("from", turn.get("role"))
        content = turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or not isinstance(content, str):
        raise RowError(f"turn {number} is {shown(turn)}, must have from and value, both texts")
    if speaker.lower() not in SPEAKERS:
        raise RowError(f"turn {number} is from {shown(speaker)}; known are {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker.lower()], "content": content}


def _of_instruction(fields: Fields, chat: bool) -> Fields:
    instruction, given = text_of(fields, "instruction"), fields.get("input")
    given = "" if given is None else text_of(fields, "input")
    asked = [text for text in (instruction, given) if text.strip()]
    if not asked:
        raise RowError("its instruction is empty: there is nothing to answer")
    answer = text_of(fields, "output") if "output" in fields else ""
    if not chat:
        headings = (("Instruction", instruction), ("Input", given))
        parts = [f"### {heading}:\n{text}\n\n" for heading, text in headings if text.strip()]
        return {"prompt": "".join([*parts, "### Response:\n"]), "completion": answer}
    if "output" in fields and not answer:
        raise RowError("its output is empty: there is nothing to learn from")
    roles = (("user", "\n\n".join(asked)), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in roles if text]}


def _of_pair(fields: Fields, chat: bool) -> Fields:
    pair = pair_fields(fields)
    return _answered(pair["prompt"], pair["chosen"])


def _of_rating(fields: Fields, chat: bool) -> Fields:
    rating = rating_fields(fields)
    return _answered(rating["prompt"], rating["completion"])


def _answered(prompt: Any, answer: Any) -> Fields:
    if isinstance(prompt, list):
        return {"messages": [*prompt, *answer]}
    return {"prompt": prompt, "completion": answer}


def text_of(fields: Fields, column: str) -> str:
    """A column's text; raises RowError where it is missing, or no text."""
    value = fields.get(column)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise RowError(f"column {column!r} is {kind}, must be a text")
    return value


TEXT = Form("text", ("text",), ("text",), _as_it_is)
WEIGHT = "weight"
CONTROL_TOKENS = "control_tokens"
_OF_ROW = (WEIGHT, CONTROL_TOKENS)
_PAIR, _RATING = ("chosen", "rejected"), ("prompt", "completion", "label")
FORMS = (
    Form("pairs", _PAIR, _PAIR, _of_pair, ("prompt", *_OF_ROW), prefers="pairs"),
    Form("messages", ("messages",), ("messages",), _as_it_is, _OF_ROW, "needs"),
    Form("ShareGPT", ("conversations",), ("conversations",), _of_turns, chat="needs"),
    Form("ratings", _RATING, _RATING, _of_rating, _OF_ROW, prefers="ratings"),
    Form("prompt and completion", ("prompt", "completion"), ("prompt",), _as_it_is, _OF_ROW),
    Form("Alpaca", ("instruction", "output"), ("instruction",), _of_instruction, ("input",), "takes"),
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
    forms = [form for form in FORMS if set(named) <= {*form.columns, *form.optional}]
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
        )
    if len(found) > 1:
        names = ", ".join(form.name for form in FORMS if form in found)
        raise DataError(what, [f"it mixes rows of several forms: {names}"], remedy="make a file of each")
    form = next(form for form in forms if form in found)
    holds_messages = any(isinstance(row.fields.get(column), list) for row in rows for column in form.columns)
    return replace(form, chat="needs") if form.prefers and holds_messages else form


def present_columns(rows: Sequence[Row]) -> list[str]:
    """Columns that some row has, in the order in which they come."""
    return list(dict.fromkeys(column for row in rows for column in row.fields))


def column_names(columns: Collection[str]) -> str:
    """Columns for a person to read."""
    return printable(shortened(", ".join(map(str, columns)), LONGEST_COLUMNS)) or "none"


def columns_text(read: Sequence[str], present: Sequence[str], renamed: Mapping[str, str]) -> str:
    """Which columns were read, from which of the file, and which were not."""
    used = [column for column in present if column in read]
    names = [
        column if renamed.get(column, column) == column else f"{column} from {renamed[column]}"
        for column in used
    ]
    left = [column for column in present if column not in used]
    return column_names(names) + (f"; not read: {column_names(left)}" if left else "")
