"""Rows of messages: by the chat template to tokens, of which the assistant's are learnt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prge.errors import BundleError, DataError
from prge.rows.control_tokens import MessageTexts, in_messages
from prge.rows.feedback import TEMPLATE_KWARGS
from prge.rows.forms import TOOLS
from prge.rows.readers import Row
from prge.rows.report import CONTEXT_CUT, CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES, TURNS_CUT, TURNS_SPLIT
from prge.rows.task import RowError
from prge.rows.windows import Made, Mask, Masked, Reading, fits, learnt

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate, Message, Rendering

INEXACT = "completions encoded apart, a token would straddle the end of the prompt"
TURN_INEXACT = "assistant turns that have a part of the generation prompt alone, learnt after that part"
TURN_REFUSED = "assistant turns that the chat template refuses to end with, not learnt"
SEVERAL = "chats that the template renders otherwise once they go on, an example for each way"
TOOLS_UNREAD = "tools that the chat template does not read"
KWARGS_UNREAD = f"{TEMPLATE_KWARGS} that the chat template does not read"
LEFT_OUT = "that the chat template leaves out"
# Behind every text.
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Conversation:
    """Messages of a row, the indices of those that are learnt, and what their template is given with them.

    `texts` keeps control tokens that are written in the messages apart from those of the template.
    """

    row: int
    messages: Sequence[Message]
    learnt: Sequence[int]
    variables: Mapping[str, Any]
    texts: MessageTexts


def conversation_of(
    reading: Reading,
    row: int,
    messages: Sequence[Message],
    learnt: Sequence[int],
    variables: Mapping[str, Any],
) -> Conversation:
    """A row's messages, of which those at the indices `learnt` are learnt."""
    texts = MessageTexts(reading.tokenizer, reading.control_tokens, [*messages, variables])
    return Conversation(row, messages, learnt, variables, texts)


def chat_examples(reading: Reading, chat: ChatTemplate, row: Row) -> Made:
    """Examples of a row of messages; one that is too long is split between its turns."""
    from prge.rows.chat import check_messages, learnt_turns

    try:
        messages = check_messages(row.fields["messages"])
    except ValueError as error:
        raise RowError(str(error)) from None
    variables = row.fields.get(TEMPLATE_KWARGS, {})
    whole = conversation_of(reading, row.number, messages, learnt_turns(messages), variables)
    texts = rendered(chat, whole)
    left_out = chat.left_out(messages[: max(whole.learnt) + 1], variables)
    made = Made((), (*_unread(chat, variables), *(f"{name} {LEFT_OUT}" for name in left_out)))
    if len(texts) > 1:
        made += Made((), (SEVERAL,))
    if sum(len(text.turns) for text in texts) < len(whole.learnt):
        made += Made((), (TURN_REFUSED,))
    for text in texts:
        part = replace(whole, messages=messages[: text.turns[-1] + 1], learnt=text.turns)
        made += _fitting(reading, chat, part, encoded(reading, part, text))
    return made


def rendered(chat: ChatTemplate, conversation: Conversation) -> list[Rendering]:
    """A conversation as its template renders it.

    Raises:
        DataError: the template refuses it.
        BundleError: the template takes too much for it; the error names the row.
    """
    try:
        protect = conversation.texts.protect
        messages, variables = protect(conversation.messages), protect(conversation.variables)
        return chat.renderings(messages, conversation.learnt, variables)
    except BundleError as error:
        raise BundleError(f"{error.what} (row {conversation.row})", remedy=error.remedy) from None


def encoded(reading: Reading, conversation: Conversation, text: Rendering) -> Masked:
    """Tokens of a rendered conversation, and which of them are learnt."""
    tokenizer, events = reading.tokenizer, []
    if not text.is_exact:
        events.append(TURN_INEXACT)
    if conversation.texts.written:
        is_read = in_messages(reading.control_tokens)
        events.append(CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES)
    restored = conversation.texts.restore(text.text)
    spans = [(restored.position(start), restored.position(end)) for start, end in text.spans]
    first, last = np.array([*spans, (_FAR, _FAR)], np.int64).T
    tokens, mask = array("i"), bytearray()
    # The template writes the special tokens itself, `begin` among them.
    for part in tokenizer.parts(restored.text, control=restored.control):
        start, end = part[:, 1], part[:, 2]
        turn = np.searchsorted(first, start, side="right")
        inside = (turn > 0) & (end <= last[turn - 1]) & (end > start)
        straddles = (turn < len(first)) & (end > first[np.minimum(turn, len(first) - 1)])
        if text.is_tagged:  # as in transformers, every token that has a character of a tag's
            inside |= straddles | ((turn > 0) & (start < last[turn - 1]) & (end > start))
        elif straddles.any() and INEXACT not in events:
            events.append(INEXACT)
        tokens.frombytes(np.ascontiguousarray(part[:, 0]).tobytes())
        mask += inside.tobytes()
    begin = 1 if tokens[:1].tolist() == [tokenizer.bos_id] else 0
    ids = np.frombuffer(tokens, np.int32)
    learnt_tokens: Mask = np.frombuffer(mask, np.bool_)
    return Masked(ids, learnt_tokens, begin, events=tuple(events))


def _unread(chat: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """What a report tells of variables that the template doesn't have."""
    unread = variables.keys() - chat.variables
    return [TOOLS_UNREAD] * (TOOLS in unread) + [KWARGS_UNREAD] * bool(unread - {TOOLS})


def _fitting(reading: Reading, chat: ChatTemplate, whole: Conversation, masked: Masked) -> Made:
    """Examples of an encoded conversation, between whose turns it is divided if it is too long."""
    targets = int(np.count_nonzero(masked.mask[1:]))
    if reading.overflow == "error" or fits(masked.mask, reading.model) or not targets:
        return learnt(reading, whole.row, masked)
    try:
        parts = _parts(reading, chat, whole)
    except DataError:  # a template that wants conversations whole
        return learnt(reading, whole.row, masked)
    parts = [part for part in parts if part.mask[1:].any()]
    if not parts:
        return learnt(reading, whole.row, masked)
    is_cut = reading.overflow == "truncate"
    events = masked.events
    if len(parts) > 1:
        events += (TURNS_CUT if is_cut else TURNS_SPLIT,)
    elif len(parts[0].tokens) < len(masked.tokens):
        events += (CONTEXT_CUT,)
    dropped = 0
    if is_cut:
        parts = parts[-1:]
        dropped = targets - int(np.count_nonzero(parts[0].mask[1:]))
    made = Made((), events, dropped)
    for part in parts:
        made += learnt(reading, whole.row, part)
    return made


def _parts(reading: Reading, chat: ChatTemplate, whole: Conversation) -> list[Masked]:
    """A chat between its turns: parts that fit, the newest the longest, the system's message before each.

    A part begins with what the assistant was asked. One that doesn't fit has a single question.
    """
    roles = [message["role"] for message in whole.messages]
    first = int(roles[0] == "system")
    starts = [
        index
        for index in range(first, len(roles))
        if index == first or (roles[index] != "assistant" and roles[index - 1] == "assistant")
    ]
    end = max(whole.learnt) + 1
    starts = [start for start in starts if start < end]
    parts: list[Masked] = []
    while starts and any(index < end for index in whole.learnt):
        start = starts.pop()
        part = _between(reading, chat, whole, first, start, end)
        while starts:
            longer = _between(reading, chat, whole, first, starts[-1], end)
            if not fits(longer.mask, reading.model):
                break
            start, part = starts.pop(), longer
        parts.insert(0, replace(part, events=()))
        end = start
    return parts


def _between(
    reading: Reading, chat: ChatTemplate, whole: Conversation, first: int, start: int, end: int
) -> Masked:
    """The messages from a start to an end, after those before the first turn.

    Raises:
        DataError: the template refuses them, or renders their turns in several ways.
    """
    left_out = start - first
    chosen = [index - left_out for index in whole.learnt if start <= index < end]
    messages = [*whole.messages[:first], *whole.messages[start:end]]
    part = replace(whole, messages=messages, learnt=chosen)
    if not chosen:
        protect = whole.texts.protect
        text = whole.texts.restore(chat.render(protect(messages), variables=protect(whole.variables)))
        tokens = reading.tokenizer.ids(text.text, control=text.control)
        return Masked(tokens, np.zeros(len(tokens), np.bool_), 0)
    texts = rendered(chat, part)
    if len(texts) > 1:
        raise DataError("the chat template renders turns in several ways", [])
    return encoded(reading, part, texts[0])
