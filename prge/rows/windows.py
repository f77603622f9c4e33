"""Tokens of which some are learnt to examples that fit a bundle: whole, cut or split.

tokens, mask -> windows: where each starts, which targets it has -> examples, and what became of the row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prge.engine import Target, TokenSequence
from prge.learning.examples import Example
from prge.model_spec import ModelSpec
from prge.rows.control_tokens import ControlTokens, in_prompts, in_texts
from prge.rows.report import END_CUT, PROMPT_CUT, SPLIT
from prge.rows.task import RowError
from prge.rows.tokenizer import Ids, Pair, Tokenizer

Overflow = Literal["auto", "error", "truncate", "split"]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """How the rows of one file are read: for which bundle, with which tokenizer, and what is too long.

    `overflow` is never `auto`; `append_eos` and `control_tokens` as in BuildOptions.
    """

    tokenizer: Tokenizer
    model: ModelSpec
    overflow: Overflow
    append_eos: bool = True
    control_tokens: ControlTokens = "special"

    @property
    def length(self) -> int:
        """Most tokens of a sequence."""
        return self.model.sequence_length

    def text(self, text: str) -> Ids:
        """Token ids of a whole text, after the model's `begin`."""
        return self.tokenizer.ids(text, control=in_texts(self.control_tokens), before=self.tokenizer.begin)

    def pair(self, prompt: str, completion: str) -> Pair:
        """A prompt and what follows it."""
        control = self.control_tokens
        return self.tokenizer.encode_pair(
            prompt, completion, control=in_prompts(control), control_after=in_texts(control)
        )

    def ended(self, tokens: Ids) -> Ids:
        """Tokens with the end-of-sequence token after them, if there is one and they don't end with it."""
        eos = self.tokenizer.eos_id
        if not self.append_eos or eos is None or (len(tokens) and tokens[-1] == eos):
            return tokens
        return np.append(tokens, np.int32(eos))


@dataclass(frozen=True)
class Masked:
    """Tokens of a sequence and which are learnt; `begin` of them begin every example.

    `dropped` were left out after these. `events` are what a report tells of it.
    """

    tokens: Ids
    mask: Mask
    begin: int
    dropped: int = 0
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """The examples of a row, and what a report tells of it.

    `dropped` target tokens didn't fit, `unknown` ones the tokenizer can't spell; `label` is a task's class;
    `written` are control tokens that are written in the row, by their names.
    """

    examples: tuple[Example, ...]
    events: tuple[str, ...] = ()
    dropped: int = 0
    unknown: int = 0
    label: str | None = None
    written: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Made) -> Made:
        return replace(
            self,
            examples=self.examples + other.examples,
            events=self.events + other.events,
            dropped=self.dropped + other.dropped,
            unknown=self.unknown + other.unknown,
        )


@dataclass(frozen=True)
class Windows:
    """Where the tokens of each example start, `begin` aside, and the targets that it has and ends with."""

    cuts: list[tuple[int, list[int]]]
    events: tuple[str, ...] = ()
    dropped: int = 0


def learnt_after(context: int, count: int) -> Mask:
    """A mask of `count` tokens that learns all but the first ones."""
    mask = np.ones(count, np.bool_)
    mask[:context] = False
    return mask


def fits(mask: Mask, model: ModelSpec) -> bool:
    """Whether a bundle takes a sequence up to its last target."""
    return int(np.flatnonzero(mask).max(initial=-1)) < model.sequence_length


def windows(masked: Masked, model: ModelSpec, overflow: Overflow) -> Windows:
    """Cut or split a sequence to fit a bundle.

    Every target is in at most one window and keeps at least the token before it. A cut completion leaves
    its prompt up to half of the bundle; a split text is learnt entirely.

    Raises:
        RowError: it doesn't fit, and overflow is `error`; or the bundle has no room to learn anything.
    """
    mask, begin, dropped = masked.mask, masked.begin, masked.dropped
    room = model.sequence_length
    if fits(mask, model):
        return Windows([(begin, (1 + np.flatnonzero(mask[1:])).tolist())])
    count, end = int(np.count_nonzero(mask[1:])), len(mask) - int(mask[::-1].argmax())
    if overflow == "error":
        raise RowError(
            f"has {end + dropped} tokens, the bundle takes {room}: "
            "shorten it, export with a larger --sequence-length, or set overflow to truncate or split"
        )
    cuts: list[tuple[int, list[int]]] = []
    events: list[str] = []
    done, first = 0, 1
    while done < count and not (cuts and overflow == "truncate"):
        first += int(mask[first:].argmax())
        context = min(first, max(begin + 1, room // 2 if overflow == "truncate" else 0))
        chosen = (first + np.flatnonzero(mask[first : first + room - context])).tolist()
        if not chosen:
            raise RowError(f"the bundle takes {room} tokens, too few to learn anything: export a longer one")
        start = max(begin, chosen[-1] + 1 - (room - begin))
        if not cuts and (start > begin or dropped):
            events.append(PROMPT_CUT)
        cuts.append((start, chosen))
        done, first = done + len(chosen), chosen[-1] + 1
    if len(cuts) > 1:
        events.append(SPLIT)
    if done < count:
        events.append(END_CUT)
    return Windows(cuts, tuple(events), count - done)


def check_learnt(masked: Masked) -> None:
    """Raise RowError where no token of a sequence is learnt, as where a chat template renders nothing."""
    # Nothing precedes the first token, so nothing predicts it.
    if not masked.mask[1:].any():
        raise RowError(f"has {len(masked.tokens)} tokens and none to learn from")


def learnt(reading: Reading, row: int, masked: Masked) -> Made:
    """Examples of a sequence whose masked tokens are learnt, cut or split to fit the bundle."""
    tokens, begin = masked.tokens, masked.begin
    check_vocabulary(reading, tokens)
    check_learnt(masked)
    found = windows(masked, reading.model, reading.overflow)
    examples, unknown = [], 0
    for start, chosen in found.cuts:
        shift = start - begin
        kept = [*tokens[:begin].tolist(), *tokens[start : chosen[-1] + 1].tolist()]
        unknown += count_unknown(reading, tokens[chosen])
        weight = 1 / len(chosen)
        targets = [Target(index - shift - 1, kept[index - shift], weight, 0) for index in chosen]
        examples.append(Example(row, (TokenSequence(tuple(kept), tuple(targets)),), 1, None))
    return Made(tuple(examples), masked.events + found.events, found.dropped, unknown)


def check_vocabulary(reading: Reading, tokens: Ids | Sequence[int]) -> None:
    """Raise RowError if a token isn't the bundle's."""
    largest = int(np.max(tokens, initial=0))
    if largest >= reading.model.vocabulary_size:
        raise RowError(
            f"has the token {reading.tokenizer.token(largest)!r} ({largest}), "
            f"the bundle knows {reading.model.vocabulary_size}: the tokenizer is not this bundle's"
        )


def count_unknown(reading: Reading, targets: Ids) -> int:
    """Target tokens that the tokenizer can't spell."""
    unknown = reading.tokenizer.unknown_id
    return 0 if unknown is None else int(np.count_nonzero(targets == unknown))
