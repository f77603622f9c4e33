"""Tokenizes segments, with a mask of the tokens that are trained on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prge.data.columns import RowError
from prge.data.row_report import INEXACT
from prge.data.segments import Segment, SegmentedText
from prge.data.tokenization.tokenizer import Control, Ids, Tokenizer

Mask = NDArray[np.bool_]
# A position after the end of every text.
_AFTER_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class EncodedText:
    """A tokenized text.

    Attributes:
        ids: token ids, int32 [n].
        is_trained: which tokens are trained on, bool [n].
        begin: number of special tokens that were added at the beginning.
        end: number of special tokens that were added at the end.
        events: events for the report.
    """

    ids: Ids
    is_trained: Mask
    begin: int
    end: int = 0
    events: tuple[str, ...] = ()

    @property
    def targets(self) -> NDArray[np.intp]:
        """Indices [m] of the tokens that are trained on; never the first token, which nothing predicts."""
        return 1 + np.flatnonzero(self.is_trained[1:])


def encode(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """Tokenize a text.

    Raises:
        RowError: A segment to train on has no tokens.
        DataError: the text can't be tokenized.
    """
    return (
        _encode_separately(text, tokenizer) if text.boundary == "exact" else _encode_joined(text, tokenizer)
    )


def _encode_separately(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """Tokenize a context and the text after it separately, with an exact boundary."""
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
        # A text for an encoder may itself begin with control tokens.
        keeps_control_tokens = text.special_tokens == "begin and end"
        ids = tokenizer.ids(
            last.text, control=last.control, before=() if keeps_control_tokens else tokenizer.begin
        )
        before, after = np.array(tokenizer.begin, np.int32), ids if keeps_control_tokens else ids[begin:]
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


def _encode_joined(text: SegmentedText, tokenizer: Tokenizer) -> EncodedText:
    """Tokenize all segments joined; a token is trained on if its characters are."""
    segments, events = text.segments, text.events
    bounds = [*accumulate((len(each.text) for each in segments), initial=0)]
    spans = [
        bounds[index : index + 2] for index, each in enumerate(segments) if each.is_trained and each.text
    ]
    first, last = np.array([*spans, (_AFTER_END, _AFTER_END)], np.int64).T
    tokens, mask = array("i"), bytearray()
    joined, control = "".join(each.text for each in segments), _joined_control(segments, bounds, tokenizer)
    for chunk in tokenizer.parts(joined, control=control):
        start, end = chunk[:, 1], chunk[:, 2]
        segment = np.searchsorted(first, start, side="right")
        inside = (segment > 0) & (end <= last[segment - 1]) & (end > start)
        straddles = (segment < len(first)) & (end > first[np.minimum(segment, len(first) - 1)])
        if text.boundary == "trained":
            inside |= straddles | ((segment > 0) & (start < last[segment - 1]) & (end > start))
        elif straddles.any() and INEXACT not in events:
            events += (INEXACT,)
        tokens.frombytes(np.ascontiguousarray(chunk[:, 0]).tobytes())
        mask += inside.tobytes()
    # The chat template writes the special tokens itself.
    begin = int(tokens[:1].tolist() == [tokenizer.bos_id])
    return EncodedText(np.frombuffer(tokens, np.int32), np.frombuffer(mask, np.bool_), begin, 0, events)


def _joined_control(segments: Sequence[Segment], edges: Sequence[int], tokenizer: Tokenizer) -> Control:
    """Return which control tokens of the joined text are read as such, by their positions."""
    first = segments[0].control
    if isinstance(first, bool) and all(each.control is first for each in segments):
        return first
    positions: list[int] = []
    for edge, each in zip(edges, segments, strict=False):
        positions_in_segment = each.control
        if isinstance(positions_in_segment, bool):
            positions_in_segment = tokenizer.control_at(each.text) if positions_in_segment else ()
        positions += [edge + at for at in positions_in_segment]
    return positions
