"""Rows of messages to texts by the model's chat template, of which the assistant's turns are learnt.

A conversation is one text, or several where the template renders turns otherwise once others follow. One that
is too long for a bundle is divided between its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prge.errors import BundleError, DataError, shown
from prge.rows.columns import Fields, RowError, decoded
from prge.rows.readers.feedback import TEMPLATE_KWARGS
from prge.rows.readers.files import Row
from prge.rows.report import (
    CONTROL_IN_MESSAGES,
    CONTROL_OF_MESSAGES,
    KWARGS_UNREAD,
    LEFT_OUT,
    SEVERAL,
    TOOLS_UNREAD,
    TURN_INEXACT,
    TURN_REFUSED,
)
from prge.rows.segments import Segment, SegmentedText, Segmenter, Texts
from prge.rows.tokenization.control_tokens import MessageTexts, RenderedText, in_messages

if TYPE_CHECKING:
    from prge.rows.tokenization.chat import ChatTemplate, Message, Rendering

SYSTEM, TOOLS = "system", "tools"
# Roles in ShareGPT's turns, and those that chat templates know them by.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    "tool": "tool",
}
# Arguments of a chat template that a row's columns are, or that say how it is rendered.
_GIVEN = frozenset({"messages", "add_generation_prompt"})


def messages_texts(segmenter: Segmenter, row: Row) -> Texts:
    """The texts of a row of `messages`, with `chat_template_kwargs` where the row has some.

    Raises:
        RowError: they are no messages, or have no answer to learn.
        DataError: the template refuses them.
        BundleError: the template takes too much for them.
    """
    from prge.rows.tokenization.chat import check_messages, learnt_turns

    try:
        messages = check_messages(row.fields["messages"])
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None
    variables = row.fields.get(TEMPLATE_KWARGS, {})
    whole = conversation_of(segmenter, row.number, messages, learnt_turns(messages), variables)
    renderings = whole.renderings()
    left_out = whole.chat.left_out(messages[: max(whole.learnt) + 1], variables)
    events = [*_unread(whole.chat, variables), *(f"{name} {LEFT_OUT}" for name in left_out)]
    if len(renderings) > 1:
        events.append(SEVERAL)
    if sum(len(each.turns) for each in renderings) < len(whole.learnt):
        events.append(TURN_REFUSED)
    texts = []
    for each in renderings:
        part = replace(whole, messages=messages[: each.turns[-1] + 1], learnt=each.turns)
        texts.append(replace(part.segmented(each), divide=part.divide))
    return Texts(tuple(texts), events=tuple(events))


def sharegpt_messages(fields: Fields) -> list[Mapping[str, Any]]:
    """The messages of a row of ShareGPT's `conversations`; raises RowError."""
    turns = decoded("conversations", fields["conversations"])
    if not isinstance(turns, list) or not turns:
        raise RowError("conversations must be a list of at least one turn", code="turns-malformed")
    return [_sharegpt_message(number, turn) for number, turn in enumerate(turns, 1)]


def _sharegpt_message(number: int, turn: object) -> Mapping[str, Any]:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(role, str) or not {"value", "role"} & turn.keys():
        raise RowError(
            f"turn {number} is {shown(turn)}, must have from and value, both texts", code="turns-malformed"
        )
    if role.lower() not in SHAREGPT_ROLES:
        raise RowError(
            f"turn {number} is from {shown(role)}; known are {', '.join(SHAREGPT_ROLES)}", code="role-unknown"
        )
    content = turn.get("value", turn.get("content"))
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[role.lower()], "content": content}


def as_messages(said: Any, role: str) -> Any:
    """Messages, where a text stands for one of a role; what is neither stays as it is."""
    return [{"role": role, "content": said}] if isinstance(said, str) and said.strip() else said


def unlearnt(messages: Sequence[Any]) -> list[Any]:
    """Messages, of which none is learnt."""
    return [
        {**each, "train": False} if isinstance(each, Mapping) and each.get("role") == "assistant" else each
        for each in messages
    ]


def with_system(system: Any, messages: Any) -> Any:
    """Messages after the text of a column `system`, where it has one.

    Raises:
        RowError: it is no text, or the messages begin with another one of the system.
    """
    if system is None or system == "" or not isinstance(messages, list):
        return messages
    if not isinstance(system, str):
        raise RowError(f"{SYSTEM} must be a text, not {shown(system)}", code="column-not-text")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise RowError(
            f"its column {SYSTEM} and its system message differ: leave one of them out", code="system-twice"
        )
    return messages


def template_kwargs(given: Any) -> dict[str, Any]:
    """Arguments of a chat template by a mapping, JSON of one, or nothing; raises RowError."""
    kwargs = decoded(TEMPLATE_KWARGS, given or {}, "a mapping")
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise RowError(
            f"{TEMPLATE_KWARGS} must be a mapping of names to values, not {shown(kwargs)}",
            code="template-kwargs",
        )
    if taken := _GIVEN & kwargs.keys():
        raise RowError(
            f"{TEMPLATE_KWARGS} must not name {', '.join(sorted(taken))}, which every chat gives",
            code="template-kwargs",
        )
    return {name: value for name, value in kwargs.items() if value is not None}


def template_variables(fields: Fields, names: Collection[str] = ()) -> dict[str, Any]:
    """What a row's chat template is given with the messages.

    Args:
        fields: of the row.
        names: of columns that are variables of the template.

    Raises:
        RowError: tools are no list, or chat_template_kwargs are no mapping of names that are free.
    """
    variables = {name: fields[name] for name in names if fields.get(name) is not None}
    variables |= template_kwargs(fields.get(TEMPLATE_KWARGS))
    tools = decoded(TOOLS, fields.get(TOOLS) or variables.get(TOOLS) or [])
    if not isinstance(tools, list):
        raise RowError(f"{TOOLS} must be a list, or JSON of one, not {shown(tools)}", code="column-not-json")
    return (
        {**variables, TOOLS: tools}
        if tools
        else {name: variables[name] for name in variables if name != TOOLS}
    )


def _unread(chat: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """What a report has of variables that the template doesn't read."""
    unread = variables.keys() - chat.variables
    return [TOOLS_UNREAD] * (TOOLS in unread) + [KWARGS_UNREAD] * bool(unread - {TOOLS})


@dataclass(frozen=True)
class Conversation:
    """Messages of a row, the indices of those that are learnt, and what their template is given with them.

    `texts` keeps control tokens that are written in the messages apart from those of the template.
    """

    row: int
    messages: Sequence[Message]
    learnt: Sequence[int]
    variables: Mapping[str, Any]
    chat: ChatTemplate
    texts: MessageTexts
    events: tuple[str, ...] = ()

    def renderings(self) -> list[Rendering]:
        """The conversation as its template renders it.

        Raises:
            DataError: the template refuses it.
            BundleError: the template takes too much for it; the error names the row.
        """
        try:
            protect = self.texts.protect
            return self.chat.renderings(protect(self.messages), self.learnt, protect(self.variables))
        except BundleError as error:
            raise BundleError(
                f"{error.what} (row {self.row})", remedy=error.remedy, code=error.code
            ) from None

    def segmented(self, rendering: Rendering) -> SegmentedText:
        """A rendering in segments: what is learnt, and what is between."""
        text = self.texts.restore(rendering.text)
        edges, end = [0], 0
        for span in rendering.spans:
            # Spans of a template that rewrites what it wrote may overlap.
            start, end = (max(text.position(at), end) for at in span)
            edges += [start, end]
        events = self.events if rendering.is_exact else (TURN_INEXACT, *self.events)
        return SegmentedText(
            _segments(text, [*edges, len(text.text)]),
            "trained" if rendering.is_tagged else "untrained",
            "none",
            events,
        )

    def divide(self, fits: Callable[[SegmentedText], bool]) -> list[SegmentedText]:
        """Texts of some turns each that fit, the newest the longest, the system's message before each.

        One begins with what the assistant was asked. One that doesn't fit has a single question.

        Raises:
            DataError: the template refuses them, or renders their turns in several ways.
        """
        roles = [message["role"] for message in self.messages]
        first = int(roles[0] == "system")
        starts = [
            index
            for index in range(first, len(roles))
            if index == first or (roles[index] != "assistant" and roles[index - 1] == "assistant")
        ]
        end = max(self.learnt) + 1
        starts = [start for start in starts if start < end]
        parts: list[SegmentedText] = []
        while starts and any(index < end for index in self.learnt):
            start = starts.pop()
            part = self._between(first, start, end)
            while starts and fits(longer := self._between(first, starts[-1], end)):
                start, part = starts.pop(), longer
            parts.insert(0, part)
            end = start
        return parts

    def _between(self, first: int, start: int, end: int) -> SegmentedText:
        """The messages from a start to an end, after those before the first turn."""
        left_out = start - first
        chosen = [index - left_out for index in self.learnt if start <= index < end]
        messages = [*self.messages[:first], *self.messages[start:end]]
        part = replace(self, messages=messages, learnt=chosen)
        if not chosen:
            protect = self.texts.protect
            text = self.texts.restore(self.chat.render(protect(messages), variables=protect(self.variables)))
            return SegmentedText(_segments(text, [0, len(text.text)]), "untrained", "none")
        renderings = part.renderings()
        if len(renderings) > 1:
            raise DataError(
                "the chat template renders turns in several ways", [], code="turns-rendered-differently"
            )
        return part.segmented(renderings[0])


def conversation_of(
    segmenter: Segmenter,
    row: int,
    messages: Sequence[Message],
    learnt: Sequence[int],
    variables: Mapping[str, Any],
) -> Conversation:
    """A row's messages, of which those at the indices `learnt` are learnt.

    Raises:
        RowError: the model has no chat template.
    """
    if segmenter.chat is None:
        raise RowError("it holds messages and the model has no chat template", code="chat-template-missing")
    texts = MessageTexts(segmenter.tokenizer, segmenter.control_tokens, [*messages, variables])
    is_read = in_messages(segmenter.control_tokens)
    events = ((CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES),) if texts.written else ()
    return Conversation(row, messages, learnt, variables, segmenter.chat, texts, events)


def _segments(text: RenderedText, edges: Sequence[int]) -> tuple[Segment, ...]:
    """A text cut at the edges, of which every second part is learnt."""
    segments = []
    for number, (start, end) in enumerate(pairwise(edges)):
        control = text.control
        if not isinstance(control, bool):
            control = tuple(at - start for at in control if start <= at < end)
        segments.append(Segment(text.text[start:end], number % 2 == 1, control))
    return tuple(segments)
