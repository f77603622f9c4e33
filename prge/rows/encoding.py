"""Segments to token ids, with a mask of those that are trained on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prge.rows.columns import RowError
from prge.rows.report import INEXACT
from prge.rows.segments import Segment, SegmentedText
from prge.rows.tokenization.tokenizer import Control, Ids, Tokenizer

Mask = NDArray[np.bool_]
# Behind every text.
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class EncodedText:
    """Token ids i32 [n] of a text, and which are trained on, bool [n].

    The first `begin` and the last `end` of them are special tokens that were added. `events` are for the
    report.
    """

    ids: Ids
    is_trained: Mask
    begin: int
    end: int = 0
    events: tuple[str, ...] = ()

    @property
    def targets(self) -> NDArray[np.intp]:
        """Indices of the tokens that are learnt, [m]; never the first one, which nothing predicts."""
        return 1 + np.flatnonzero(self.is_trained[1:])


def encode(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """Tokenize a text.

    Raises:
        RowError: a segment that is to be learnt has no tokens.
        DataError: the library can't tokenize it.
    """
    return _encode_apart(text, tokenizer) if text.boundary == "exact" else _encode_whole(text, tokenizer)


def _encode_apart(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """A context's tokens, and those of what follows it."""
    *context, last = text.segments
    begin, events = len(tokenizer.begin), text.events
    if context:
        pair = tokenizer.encode_pair(
            context[0].text,
            last.text,
            control=bool(context[0].control),
            control_after=bool(last.control),
        )
        before, after = pair.prompt, pair.completion
        if not pair.exact:
            events += (INEXACT,)
    else:
        # An encoder's text may begin with control tokens of its own.
        doubled = text.special_tokens == "begin and end"
        ids = tokenizer.ids(last.text, control=last.control, before=() if doubled else tokenizer.begin)
        before, after = np.array(tokenizer.begin, np.int32), ids if doubled else ids[begin:]
    if last.is_trained and not len(after):
        raise RowError(f"its {last.name} is empty: there is nothing to learn from", code="answer-empty")
    end: tuple[int, ...] = ()
    if text.special_tokens == "begin and end":
        end = tokenizer.end
    elif text.special_tokens == "begin and eos" and tokenizer.eos_id not in (None, after[-1]):
        end = (tokenizer.eos_id,)
    ids = np.concatenate([before, after, np.array(end, np.int32)])
    is_trained = np.zeros(len(ids), np.bool_)
    is_trained[len(before) :] = last.is_trained
    return EncodedText(ids, is_trained, begin, len(end), events)


def _encode_whole(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """Tokens of all segments together, trained as their characters are."""
    segments, events = text.segments, text.events
    edges = [*accumulate((len(each.text) for each in segments), initial=0)]
    spans = [edges[index : index + 2] for index, each in enumerate(segments) if each.is_trained and each.text]
    first, last = np.array([*spans, (_FAR, _FAR)], np.int64).T
    tokens, mask = array("i"), bytearray()
    joined, control = "".join(each.text for each in segments), _joined_control(segments, edges, tokenizer)
    for part in tokenizer.parts(joined, control=control):
        start, end = part[:, 1], part[:, 2]
        turn = np.searchsorted(first, start, side="right")
        inside = (turn > 0) & (end <= last[turn - 1]) & (end > start)
        straddles = (turn < len(first)) & (end > first[np.minimum(turn, len(first) - 1)])
        if text.boundary == "trained":
            inside |= straddles | ((turn > 0) & (start < last[turn - 1]) & (end > start))
        elif straddles.any() and INEXACT not in events:
            events += (INEXACT,)
        tokens.frombytes(np.ascontiguousarray(part[:, 0]).tobytes())
        mask += inside.tobytes()
    # The template writes the special tokens itself.
    begin = int(tokens[:1].tolist() == [tokenizer.bos_id])
    return EncodedText(np.frombuffer(tokens, np.int32), np.frombuffer(mask, np.bool_), begin, 0, events)


def _joined_control(segments: Sequence[Segment], edges: Sequence[int], tokenizer: Tokenizer) -> Control:
    """The control tokens of all segments, by their places in the joined text."""
    first = segments[0].control
    if isinstance(first, bool) and all(each.control is first for each in segments):
        return first
    found: list[int] = []
    for edge, each in zip(edges, segments, strict=False):
        written = each.control
        if isinstance(written, bool):
            written = tokenizer.control_at(each.text) if written else ()
        found += [edge + at for at in written]
    return found
