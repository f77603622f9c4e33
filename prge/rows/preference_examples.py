"""Pairs and rated answers to examples of two candidates: a sequence each, after one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prge.engine import TokenSequence
from prge.learning.examples import Example
from prge.rows.conversations import conversation_of, encoded, rendered
from prge.rows.forms import SYSTEM, Form, template_variables, with_system
from prge.rows.preferences import OTHER, pair_fields, rating_fields
from prge.rows.readers import Row
from prge.rows.report import PROMPT_CUT
from prge.rows.task import RowError
from prge.rows.task_examples import completed
from prge.rows.windows import Made, Masked, Reading, check_learnt, learnt

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate


def pair(form: Form, chat: ChatTemplate | None, reading: Reading, row: Row) -> Made:
    """The example of a pair: the chosen answer, then the rejected one."""
    fields = pair_fields(row.fields)
    return _compared(form, chat, reading, row, fields["prompt"], [fields["chosen"], fields["rejected"]])


def rating(form: Form, chat: ChatTemplate | None, reading: Reading, row: Row) -> Made:
    """The example of a row of `rated_rows`: the answer, then that of the other row after the same prompt."""
    # A pair that can't be used tells why.
    fields = rating_fields(row.fields) if OTHER in row.fields else pair_fields(row.fields)
    if type(fields[OTHER]) is not type(fields["prompt"]):
        raise RowError("it and the row before are not both texts or both messages")
    made = _compared(form, chat, reading, row, fields["prompt"], [fields["completion"], fields[OTHER]])
    rated = tuple(replace(each, label=None, liked=fields["label"]) for each in made.examples)
    return replace(made, examples=rated, label=str(fields["label"]).lower())


def _compared(
    form: Form, chat: ChatTemplate | None, reading: Reading, row: Row, prompt: Any, answers: Sequence[Any]
) -> Made:
    """An example of answers to one prompt, which is cut alike for all of them."""
    if isinstance(prompt, list):
        masked = _spoken(form, chat, reading, row, prompt, answers)
    else:
        masked = [completed(reading, prompt, answer) for answer in answers]
    for each in masked:
        check_learnt(each)
    events: tuple[str, ...] = ()
    if reading.overflow != "error" and (cut := _beyond(reading, masked)):
        events = (PROMPT_CUT,)
        masked = [_without(each, cut) for each in masked]
    made = [learnt(reading, row.number, each) for each in masked]
    sequences = [_candidate(each.examples[0].sequences[0], index) for index, each in enumerate(made)]
    events += tuple(event for each in made for event in each.events if event not in events)
    return Made(
        (Example(row.number, tuple(sequences), len(sequences), 0),),
        tuple(dict.fromkeys(events)),
        sum(each.dropped for each in made),
        sum(each.unknown for each in made),
    )


def _spoken(
    form: Form,
    chat: ChatTemplate | None,
    reading: Reading,
    row: Row,
    prompt: list[Any],
    answers: Sequence[list[Any]],
) -> list[Masked]:
    """Conversations of which what follows the prompt is learnt."""
    from prge.rows.chat import check_messages, learnt_turns

    if chat is None:
        raise RowError("it holds messages and the model has no chat template")
    variables = template_variables(row.fields, form.variables)
    try:
        asked = check_messages(with_system(row.fields.get(SYSTEM), prompt), answered=False)
        whole = [check_messages([*asked, *answer]) for answer in answers]
    except ValueError as error:
        raise RowError(str(error)) from None
    masked = []
    for messages in whole:
        turns = [index for index in learnt_turns(messages) if index >= len(asked)]
        if not turns:
            raise RowError("one of its answers has no message of the assistant's that is learnt")
        conversation = conversation_of(reading, row.number, messages, turns, variables)
        texts = rendered(chat, conversation)
        if len(texts) != 1 or len(texts[0].turns) < len(turns):
            raise RowError(
                "one of its answers has several turns, which the chat template renders otherwise once others "
                "follow: end it after the first one"
            )
        masked.append(encoded(reading, conversation, texts[0]))
    return masked


def _beyond(reading: Reading, masked: Sequence[Masked]) -> int:
    """Tokens of the prompt that leave it so that the longest answer fits; half of the room stays for it."""
    context = min(int(each.mask.argmax()) for each in masked)
    longest = max(len(each.tokens) for each in masked)
    kept = max(context - max(longest - reading.length, 0), min(context, reading.length // 2))
    return min(context - kept, max(context - masked[0].begin - 1, 0))


def _without(masked: Masked, count: int) -> Masked:
    """A sequence without so many tokens after its beginning."""
    gone = slice(masked.begin, masked.begin + count)
    return replace(masked, tokens=np.delete(masked.tokens, gone), mask=np.delete(masked.mask, gone))


def _candidate(sequence: TokenSequence, index: int) -> TokenSequence:
    return replace(sequence, targets=tuple(replace(each, candidate=index) for each in sequence.targets))
