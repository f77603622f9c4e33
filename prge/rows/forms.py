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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prge.errors import DataError, printable, shortened, shown
from prge.files.documents import DocumentError, parse_json
from prge.learning.preferences import ObjectiveName, Preferring
from prge.rows.feedback import TEMPLATE_KWARGS
from prge.rows.preferences import as_messages, pair_fields, rating_fields
from prge.rows.readers import Row
from prge.rows.task import RowError

LONGEST_COLUMNS = 300
# Who speaks in ShareGPT's turns, and the role that chat templates know them by.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    "tool": "tool",
}
Fields = Mapping[str, Any]
WEIGHT, SYSTEM, TOOLS, HISTORY = "weight", "system", "tools", "history"
# Columns that have a meaning of their own, whatever a template calls by these names.
_OF_CHATS = frozenset({WEIGHT, SYSTEM, TOOLS, TEMPLATE_KWARGS, HISTORY})
# Arguments that a row's columns are, or that say how it is rendered.
_GIVEN = frozenset({"messages", "add_generation_prompt"})


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


def _of_messages(fields: Fields, chat: bool) -> Fields:
    return {"messages": _decoded("messages", fields["messages"])}


def _of_completion(fields: Fields, chat: bool) -> Fields:
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return fields
    asked, answer = as_messages(prompt, "user"), as_messages(completion, "assistant")
    for name, said in (("prompt", asked), ("completion", [] if completion is None else answer)):
        if not isinstance(said, list):
            raise RowError(f"its {name} is {shown(said)}, must be a text or a list of messages")
    if asked and isinstance(asked[-1], Mapping) and asked[-1].get("role") == "assistant":
        raise RowError("its prompt ends with an answer: put that into the completion, or leave it out")
    return {"messages": [*unlearnt(asked), *(answer or [])]}


def unlearnt(messages: Sequence[Any]) -> list[Any]:
    """Messages, of which none is learnt."""
    return [
        {**each, "train": False} if isinstance(each, Mapping) and each.get("role") == "assistant" else each
        for each in messages
    ]


def _of_turns(fields: Fields, chat: bool) -> Fields:
    turns = _decoded("conversations", fields["conversations"])
    if not isinstance(turns, list) or not turns:
        raise RowError("conversations must be a list of at least one turn")
    return {"messages": [_message(number, turn) for number, turn in enumerate(turns, 1)]}


def _message(number: int, turn: object) -> Mapping[str, Any]:
    speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(speaker, str) or not {"value", "role"} & turn.keys():
        raise RowError(f"turn {number} is {shown(turn)}, must have from and value, both texts")
    if speaker.lower() not in SPEAKERS:
        raise RowError(f"turn {number} is from {shown(speaker)}; known are {', '.join(SPEAKERS)}")
    content = turn.get("value", turn.get("content"))
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**rest, "role": SPEAKERS[speaker.lower()], "content": content}


def _decoded(column: str, value: Any, needed: str = "a list") -> Any:
    """What a column holds, which in a table may be JSON text; raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except DocumentError as error:
        raise RowError(f"{column} must be {needed}, or JSON of one, not {shown(value)}: {error}") from None


def with_system(system: Any, messages: Any) -> Any:
    """Messages after the text of a column `system`, where it has one.

    Raises:
        RowError: it is no text, or the messages begin with another one of the system.
    """
    if system is None or system == "" or not isinstance(messages, list):
        return messages
    if not isinstance(system, str):
        raise RowError(f"{SYSTEM} must be a text, not {shown(system)}")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise RowError(f"its column {SYSTEM} and its system message differ: leave one of them out")
    return messages


def template_kwargs(given: Any) -> dict[str, Any]:
    """Arguments of a chat template by a mapping, JSON of one, or nothing; raises RowError."""
    kwargs = _decoded(TEMPLATE_KWARGS, given or {}, "a mapping")
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise RowError(f"{TEMPLATE_KWARGS} must be a mapping of names to values, not {shown(kwargs)}")
    if taken := _GIVEN & kwargs.keys():
        raise RowError(f"{TEMPLATE_KWARGS} must not name {', '.join(sorted(taken))}, which every chat gives")
    return {name: value for name, value in kwargs.items() if value is not None}


def template_variables(fields: Fields, names: Collection[str] = ()) -> dict[str, Any]:
    """What a row's chat template is given beside the messages.

    Args:
        fields: of the row.
        names: of columns that are variables of the template.

    Raises:
        RowError: tools are no list, or chat_template_kwargs are no mapping of names that are free.
    """
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    found |= template_kwargs(fields.get(TEMPLATE_KWARGS))
    tools = _decoded(TOOLS, fields.get(TOOLS) or found.get(TOOLS) or [])
    if not isinstance(tools, list):
        raise RowError(f"{TOOLS} must be a list, or JSON of one, not {shown(tools)}")
    return {**found, TOOLS: tools} if tools else {name: found[name] for name in found if name != TOOLS}


def _of_instruction(fields: Fields, chat: bool) -> Fields:
    instruction, given = text_of(fields, "instruction"), fields.get("input")
    given = "" if given is None else text_of(fields, "input")
    asked = [text for text in (instruction, given) if text.strip()]
    if not asked:
        raise RowError("its instruction is empty: there is nothing to answer")
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
        raise RowError("its output is empty: there is nothing to learn from")
    turns = [*earlier, ("\n\n".join(asked), answer)]
    roles = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return {"messages": [{"role": role, "content": text} for role, text in roles if text]}


def _history(fields: Fields) -> Iterator[tuple[str, str]]:
    """Earlier questions with their answers; raises RowError."""
    history = _decoded(HISTORY, fields.get(HISTORY) or [])
    if not isinstance(history, list):
        raise RowError(f"{HISTORY} must be a list of questions with their answers, not {shown(history)}")
    for each in history:
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(text, str) for text in each):
            raise RowError(f"{HISTORY} must have lists of a question and its answer, not {shown(each)}")
        yield each[0], each[1]


def _of_pair(fields: Fields, chat: bool) -> Fields:
    pair = pair_fields(fields)
    return _answered(pair["prompt"], pair["chosen"])


def _of_rating(fields: Fields, chat: bool) -> Fields:
    rating = rating_fields(fields)
    return _answered(rating["prompt"], rating["completion"])


def _answered(prompt: Any, answer: Any) -> Fields:
    if isinstance(prompt, list):
        return {"messages": [*unlearnt(prompt), *answer]}
    return {"prompt": prompt, "completion": answer}


def text_of(fields: Fields, column: str) -> str:
    """A column's text; raises RowError where it is missing, or no text."""
    value = fields.get(column)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise RowError(f"column {column!r} is {kind}, must be a text")
    return value


CONTROL_TOKENS = "control_tokens"
_OF_ROW = (WEIGHT, CONTROL_TOKENS)
TEXT = Form("text", ("text",), ("text",), _as_it_is, of_chats=())
_PAIR, _RATING = ("chosen", "rejected"), ("prompt", "completion", "label")
_TURNS, _INSTRUCTION = ("conversations",), ("instruction", "output")
_BESIDE_INSTRUCTION = ("input", SYSTEM, HISTORY, WEIGHT)
FORMS = (
    Form("pairs", _PAIR, _PAIR, _of_pair, ("prompt", *_OF_ROW), prefers="pairs"),
    Form("messages", ("messages",), ("messages",), _of_messages, _OF_ROW, "needs"),
    Form("ShareGPT", _TURNS, _TURNS, _of_turns, (WEIGHT,), "needs"),
    Form("ratings", _RATING, _RATING, _of_rating, _OF_ROW, prefers="ratings"),
    Form("prompt and completion", ("prompt", "completion"), ("prompt",), _of_completion, _OF_ROW),
    Form("Alpaca", _INSTRUCTION, _INSTRUCTION[:1], _of_instruction, _BESIDE_INSTRUCTION, "takes"),
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
        )
    if len(found) > 1:
        names = ", ".join(form.name for form in FORMS if form in found)
        raise DataError(what, [f"it mixes rows of several forms: {names}"], remedy="make a file of each")
    form = next(form for form in forms if form in found)
    holds_messages = any(isinstance(row.fields.get(column), list) for row in rows for column in form.columns)
    return replace(form, chat="needs") if form is not TEXT and not form.chat and holds_messages else form


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
