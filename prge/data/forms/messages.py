"""Rows of messages, rendered by the model's chat template; the assistant's turns are trained on.

A conversation becomes one text, or several if the template renders a turn differently once others follow. A
conversation that is too long for the bundle is divided between its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prge.data.columns import Fields, RowError, decode_column
from prge.data.readers.feedback import TEMPLATE_KWARGS
from prge.data.readers.files import Row
from prge.data.row_report import (
    CONTROL_IN_MESSAGES,
    CONTROL_OF_MESSAGES,
    KWARGS_UNREAD,
    LEFT_OUT,
    SEVERAL,
    TOOLS_UNREAD,
    TURN_INEXACT,
    TURN_REFUSED,
)
from prge.data.segments import Segment, SegmentedText, Segmenter, Texts
from prge.data.tokenization.control_tokens import MessageTexts, RenderedText, in_messages
from prge.errors import BundleError, DataError, format_value

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate, Message, Rendering

SYSTEM, TOOLS = "system", "tools"
# Roles in ShareGPT's turns, and the corresponding roles of chat templates.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    "tool": "tool",
}
# Arguments of a chat template that prge sets itself.
_RESERVED = frozenset({"messages", "add_generation_prompt"})


def messages_texts(segmenter: Segmenter, row: Row) -> Texts:
    """Convert a row of `messages`, with optional `chat_template_kwargs`, to texts.

    Raises:
        RowError: the messages are invalid, or have no answer to train on.
        DataError: the template refuses the messages.
        BundleError: the template exceeds its limits.
    """
    from prge.data.tokenization.chat import check_messages, trained_turns

    try:
        messages = check_messages(row.fields["messages"])
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None
    variables = row.fields.get(TEMPLATE_KWARGS, {})
    whole = make_conversation(segmenter, row.number, messages, trained_turns(messages), variables)
    renderings = whole.renderings()
    left_out = whole.chat.left_out(messages[: max(whole.trained) + 1], variables)
    events = [*_unread(whole.chat, variables), *(f"{name} {LEFT_OUT}" for name in left_out)]
    if len(renderings) > 1:
        events.append(SEVERAL)
    if sum(len(each.turns) for each in renderings) < len(whole.trained):
        events.append(TURN_REFUSED)
    texts = []
    for each in renderings:
        conversation = replace(whole, messages=messages[: each.turns[-1] + 1], trained=each.turns)
        texts.append(replace(conversation.to_segments(each), divide=conversation.divide))
    return Texts(tuple(texts), events=tuple(events))


def sharegpt_messages(fields: Fields) -> list[Mapping[str, Any]]:
    """Convert a row of ShareGPT's `conversations` to messages; raises RowError."""
    turns = decode_column("conversations", fields["conversations"])
    if not isinstance(turns, list) or not turns:
        raise RowError("conversations must be a list of at least one turn", code="turns-malformed")
    return [_sharegpt_message(number, turn) for number, turn in enumerate(turns, 1)]


def _sharegpt_message(number: int, turn: object) -> Mapping[str, Any]:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(role, str) or not {"value", "role"} & turn.keys():
        raise RowError(
            f"turn {number} is {format_value(turn)}, must have the texts from and value",
            code="turns-malformed",
        )
    if role.lower() not in SHAREGPT_ROLES:
        raise RowError(
            f"turn {number} is from {format_value(role)}; known are {', '.join(SHAREGPT_ROLES)}",
            code="role-unknown",
        )
    content = turn.get("value", turn.get("content"))
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[role.lower()], "content": content}


def to_messages(value: Any, role: str) -> Any:
    """Convert a text to one message of a role; return any other value unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) and value.strip() else value


def without_training(messages: Sequence[Any]) -> list[Any]:
    """Return the messages marked so that none is trained on."""
    return [
        {**each, "train": False} if isinstance(each, Mapping) and each.get("role") == "assistant" else each
        for each in messages
    ]


def with_system(system: Any, messages: Any) -> Any:
    """Prepend the text of the column `system`, if there is one, to the messages.

    Raises:
        RowError: the column is not a text, or the messages begin with a different system message.
    """
    if system is None or system == "" or not isinstance(messages, list):
        return messages
    if not isinstance(system, str):
        raise RowError(f"{SYSTEM} must be a text, not {format_value(system)}", code="column-not-text")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise RowError(
            f"its column {SYSTEM} and its system message differ: remove one of them", code="system-twice"
        )
    return messages


def template_kwargs(value: Any) -> dict[str, Any]:
    """Return the arguments of a chat template from a mapping, its JSON, or None; raises RowError."""
    kwargs = decode_column(TEMPLATE_KWARGS, value or {}, "a mapping")
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise RowError(
            f"{TEMPLATE_KWARGS} must be a mapping of names to values, not {format_value(kwargs)}",
            code="template-kwargs",
        )
    if reserved := _RESERVED & kwargs.keys():
        raise RowError(
            f"{TEMPLATE_KWARGS} must not name {', '.join(sorted(reserved))}, which prge sets itself",
            code="template-kwargs",
        )
    return {name: value for name, value in kwargs.items() if value is not None}


def template_variables(fields: Fields, names: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a row's chat template besides the messages.

    Args:
        fields: columns of the row.
        names: columns that are variables of the template.

    Raises:
        RowError: tools is not a list, or chat_template_kwargs is not a mapping or names a reserved argument.
    """
    variables = {name: fields[name] for name in names if fields.get(name) is not None}
    variables |= template_kwargs(fields.get(TEMPLATE_KWARGS))
    tools = decode_column(TOOLS, fields.get(TOOLS) or variables.get(TOOLS) or [])
    if not isinstance(tools, list):
        raise RowError(
            f"{TOOLS} must be a list, or JSON of one, not {format_value(tools)}", code="column-not-json"
        )
    return (
        {**variables, TOOLS: tools}
        if tools
        else {name: variables[name] for name in variables if name != TOOLS}
    )


def _unread(chat: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """Return the report's events for variables that the template doesn't read."""
    unread = variables.keys() - chat.variables
    return [TOOLS_UNREAD] * (TOOLS in unread) + [KWARGS_UNREAD] * bool(unread - {TOOLS})


@dataclass(frozen=True)
class Conversation:
    """The messages of a row with their chat template.

    Attributes:
        row: row number.
        messages: the messages.
        trained: indices of the messages that are trained on.
        variables: arguments of the template besides the messages.
        chat: the chat template.
        texts: distinguishes control tokens that are written in the messages from those of the template.
        events: events for the report.
    """

    row: int
    messages: Sequence[Message]
    trained: Sequence[int]
    variables: Mapping[str, Any]
    chat: ChatTemplate
    texts: MessageTexts
    events: tuple[str, ...] = ()

    def renderings(self) -> list[Rendering]:
        """Render the conversation with its template.

        Raises:
            DataError: the template refuses the conversation.
            BundleError: the template exceeds its limits; the error names the row.
        """
        try:
            protect = self.texts.protect
            return self.chat.renderings(protect(self.messages), self.trained, protect(self.variables))
        except BundleError as error:
            raise BundleError(
                f"{error.what.rstrip('.')} (row {self.row}).", remedy=error.remedy, code=error.code
            ) from None

    def to_segments(self, rendering: Rendering) -> SegmentedText:
        """Split a rendering into segments that are alternately context and trained on."""
        text = self.texts.restore(rendering.text)
        bounds, end = [0], 0
        for span in rendering.spans:
            # Spans may overlap if a template rewrites its earlier text.
            start, end = (max(text.position(position), end) for position in span)
            bounds += [start, end]
        events = self.events if rendering.is_exact else (TURN_INEXACT, *self.events)
        return SegmentedText(
            _segments(text, [*bounds, len(text.text)]),
            "trained" if rendering.is_tagged else "untrained",
            "none",
            events,
        )

    def divide(self, fits: Callable[[SegmentedText], bool]) -> list[SegmentedText]:
        """Divide the conversation into texts of consecutive turns that fit, each after the system message.

        Each text begins with the user's messages. The last text has as many turns as fit, then the one before
        it, and so on. A text that doesn't fit has a single exchange.

        Raises:
            DataError: the template refuses a part, or renders its turns differently once others follow.
        """
        roles = [message["role"] for message in self.messages]
        first = int(roles[0] == "system")
        starts = [
            index
            for index in range(first, len(roles))
            if index == first or (roles[index] != "assistant" and roles[index - 1] == "assistant")
        ]
        end = max(self.trained) + 1
        starts = [start for start in starts if start < end]
        parts: list[SegmentedText] = []
        while starts and any(index < end for index in self.trained):
            start = starts.pop()
            part = self._part(first, start, end)
            while starts and fits(longer := self._part(first, starts[-1], end)):
                start, part = starts.pop(), longer
            parts.insert(0, part)
            end = start
        return parts

    def _part(self, first: int, start: int, end: int) -> SegmentedText:
        """Return the text of messages[start:end], after the messages before the first turn."""
        skipped = start - first
        chosen = [index - skipped for index in self.trained if start <= index < end]
        messages = [*self.messages[:first], *self.messages[start:end]]
        part = replace(self, messages=messages, trained=chosen)
        if not chosen:
            protect = self.texts.protect
            text = self.texts.restore(self.chat.render(protect(messages), variables=protect(self.variables)))
            return SegmentedText(_segments(text, [0, len(text.text)]), "untrained", "none")
        renderings = part.renderings()
        if len(renderings) > 1:
            raise DataError(
                "The chat template renders turns differently once others follow.",
                [],
                code="turns-rendered-differently",
            )
        return part.to_segments(renderings[0])


def make_conversation(
    segmenter: Segmenter,
    row: int,
    messages: Sequence[Message],
    trained: Sequence[int],
    variables: Mapping[str, Any],
) -> Conversation:
    """Create the conversation of a row, of which the messages at the indices `trained` are trained on.

    Raises:
        RowError: the model has no chat template.
    """
    if segmenter.chat is None:
        raise RowError("it has messages, but the model has no chat template", code="chat-template-missing")
    texts = MessageTexts(segmenter.tokenizer, segmenter.control_tokens, [*messages, variables])
    is_read = in_messages(segmenter.control_tokens)
    events = ((CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES),) if texts.written else ()
    return Conversation(row, messages, trained, variables, segmenter.chat, texts, events)


def _segments(text: RenderedText, bounds: Sequence[int]) -> tuple[Segment, ...]:
    """Split a text at the given positions; every second segment is trained on."""
    segments = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        control = text.control
        if not isinstance(control, bool):
            control = tuple(position - start for position in control if start <= position < end)
        segments.append(Segment(text.text[start:end], number % 2 == 1, control))
    return tuple(segments)
