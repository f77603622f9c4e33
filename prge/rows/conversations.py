"""Rows of messages: by the chat template to tokens, of which the assistant's are learnt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prge.errors import BundleError, DataError
from prge.rows.control_tokens import MessageTexts, in_messages
from prge.rows.readers import Row
from prge.rows.report import CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES, TURNS_CUT, TURNS_SPLIT
from prge.rows.task import RowError
from prge.rows.windows import Made, Masked, Reading, fits, learnt

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate, Message

INEXACT = "completions encoded apart, a token would straddle the end of the prompt"
TURN_INEXACT = "assistant turns learnt with their header, the generation prompt differs from it"
# Behind every text.
_FAR = np.iinfo(np.int64).max


def chat_examples(reading: Reading, chat: ChatTemplate, row: Row) -> Made:
    """Examples of a row of messages; one that is too long is split between its turns."""
    from prge.rows.chat import check_messages

    try:
        messages = check_messages(row.fields["messages"])
    except ValueError as error:
        raise RowError(str(error)) from None
    whole = conversation(reading, chat, row.number, messages)
    targets = int(np.count_nonzero(whole.mask[1:]))
    if reading.overflow == "error" or fits(whole.mask, reading.contract) or not targets:
        return learnt(reading, row.number, whole)
    try:
        parts = _parts(reading, chat, row.number, messages)
    except DataError:  # a template that wants conversations whole
        return learnt(reading, row.number, whole)
    parts = [part for part in parts if part.mask[1:].any()]
    is_cut = reading.overflow == "truncate"
    events = whole.events
    if len(parts) > 1:
        events += (TURNS_CUT if is_cut else TURNS_SPLIT,)
    dropped = 0
    if is_cut:
        parts = parts[-1:]
        dropped = targets - int(np.count_nonzero(parts[0].mask[1:]))
    made = Made((), events, dropped)
    for part in parts:
        made += learnt(reading, row.number, part)
    return made


def conversation(
    reading: Reading, chat: ChatTemplate, row: int, messages: Sequence[Message], before: int = 0
) -> Masked:
    """Tokens of messages by the template, and which are learnt: all that the assistant wrote but `before`.

    Nor is a message with the weight 0, as in OpenAI's rows.
    """
    tokenizer, events = reading.tokenizer, []
    texts = MessageTexts(tokenizer, reading.control_tokens, messages)
    try:
        text, spans, is_exact = chat.assistant_spans(texts.protect(messages))
    except BundleError as error:
        raise BundleError(f"{error.what} (row {row})", remedy=error.remedy) from None
    if not is_exact:
        events.append(TURN_INEXACT)
    if texts.written:
        is_read = in_messages(reading.control_tokens)
        events.append(CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES)
    rendered = texts.restore(text)
    spans = [(rendered.position(start), rendered.position(end)) for start, end in spans]
    # The template writes the special tokens itself, `begin` among them.
    answers = (message for message in messages if message["role"] == "assistant")
    learnt_turns = [
        span
        for number, (span, answer) in enumerate(zip(spans, answers, strict=True))
        if number >= before and answer.get("weight", 1) != 0
    ]
    first, last = np.array([*learnt_turns, (_FAR, _FAR)], np.int64).T
    tokens, mask = array("i"), bytearray()
    for part in tokenizer.parts(rendered.text, control=rendered.control):
        start, end = part[:, 1], part[:, 2]
        turn = np.searchsorted(first, start, side="right")
        inside = (turn > 0) & (end <= last[turn - 1]) & (end > start)
        straddles = (turn < len(first)) & (end > first[np.minimum(turn, len(first) - 1)])
        if straddles.any() and INEXACT not in events:
            events.append(INEXACT)
        tokens.frombytes(np.ascontiguousarray(part[:, 0]).tobytes())
        mask += inside.tobytes()
    begin = 1 if tokens[:1].tolist() == [tokenizer.bos_id] else 0
    ids = np.frombuffer(tokens, np.int32)
    return Masked(ids, np.frombuffer(mask, np.bool_), begin, events=tuple(events))


def _parts(reading: Reading, chat: ChatTemplate, row: int, messages: Sequence[Message]) -> list[Masked]:
    """A chat between its turns: parts that fit, the newest the longest, the system's message before each.

    A part begins with what the assistant was asked. One that doesn't fit has a single question.
    """
    roles = [message["role"] for message in messages]
    first = int(roles[0] == "system")
    starts = [
        index
        for index in range(first, len(roles))
        if index == first or (roles[index] != "assistant" and roles[index - 1] == "assistant")
    ]
    end = len(roles) - roles[::-1].index("assistant")
    starts = [start for start in starts if start < end]
    parts: list[Masked] = []
    while starts:
        start = starts.pop()
        part = conversation(reading, chat, row, [*messages[:first], *messages[start:end]])
        while starts:
            longer = conversation(reading, chat, row, [*messages[:first], *messages[starts[-1] : end]])
            if not fits(longer.mask, reading.contract):
                break
            start, part = starts.pop(), longer
        parts.insert(0, replace(part, events=()))
        end = start
    return parts
