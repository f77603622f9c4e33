"""Makes the token sequences of texts and candidates fit a bundle, by cutting or splitting them.

texts        depending on `overflow`: divided between turns, then between any two tokens; a prompt is cut at
             its beginning, as in MeZO (arXiv 2305.17333)
choices      the prompt is cut at its beginning; a choice is never cut
answers      the prompt is cut at its beginning, down to half of the bundle, then the answers at their ends
classes      the text is cut at its end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prge.data.columns import RowError
from prge.data.encoding import EncodedText, encode
from prge.data.options import Overflow
from prge.data.row_report import (
    CONTEXT_CUT,
    ENCODER_CUT,
    END_CUT,
    NO_ROOM_FOR_END,
    PROMPT_CUT,
    SPLIT,
    TURNS_CUT,
    TURNS_SPLIT,
)
from prge.data.segments import Candidates, SegmentedText, Texts
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError


@dataclass(frozen=True)
class FittedSequences:
    """Sequences that fit a bundle, up to the last token that is trained on.

    `events` are for the report. `dropped` is the number of target tokens that were left out.
    """

    sequences: tuple[EncodedText, ...]
    events: tuple[str, ...] = ()
    dropped: int = 0

    def __add__(self, other: FittedSequences) -> FittedSequences:
        return FittedSequences(
            self.sequences + other.sequences, self.events + other.events, self.dropped + other.dropped
        )


@dataclass(frozen=True)
class SequenceFitter:
    """Makes the sequences of rows fit `length` tokens; `overflow` is never `auto`."""

    tokenizer: Tokenizer
    length: int
    overflow: Overflow

    def fit(self, row: Texts | Candidates) -> FittedSequences:
        """Return the token sequences of a row: one or several for each text or candidate.

        Raises:
            RowError: the row doesn't fit, or has nothing to train on.
            DataError: A text can't be tokenized.
        """
        if isinstance(row, Texts):
            return sum(map(self._fit_text, row.texts), FittedSequences(()))
        if row.comparison == "classes":
            return self._fit_classified(encode(row.texts[0], self.tokenizer))
        return self._fit_candidates(row)

    def _fits(self, text: EncodedText) -> bool:
        """Return whether a text fits up to its last token that is trained on."""
        return int(np.flatnonzero(text.is_trained).max(initial=-1)) < self.length

    def _fit_text(self, text: SegmentedText) -> FittedSequences:
        encoded = encode(text, self.tokenizer)
        _check_trained(encoded)
        if len(text.segments) == 1 and encoded.end and not self._fits(encoded):
            bare = _without(encoded, slice(-encoded.end, None))
            if self._fits(bare) and len(bare.targets):
                return self._windows(replace(bare, events=(NO_ROOM_FOR_END,)))
        if text.divide is None or self.overflow == "error" or self._fits(encoded):
            return self._windows(encoded)
        try:
            parts = text.divide(lambda part: self._fits(encode(part, self.tokenizer)))
        except DataError:  # for example, the chat template refuses partial conversations
            parts = []
        divided = [part for each in parts if len((part := encode(each, self.tokenizer)).targets)]
        if not divided:
            return self._windows(encoded)
        dropped, events = 0, encoded.events
        if len(divided) > 1:
            events += (TURNS_CUT if self.overflow == "truncate" else TURNS_SPLIT,)
        elif len(divided[0].ids) < len(encoded.ids):
            events += (CONTEXT_CUT,)
        if self.overflow == "truncate":
            divided = divided[-1:]
            dropped = len(encoded.targets) - len(divided[0].targets)
        windows = (self._windows(replace(each, events=())) for each in divided)
        return sum(windows, FittedSequences((), events, dropped))

    def _windows(self, text: EncodedText) -> FittedSequences:
        """Cut or split a text between any two of its tokens.

        Every target is in at most one window, with at least the token before it. If a completion is cut, its
        prompt keeps up to half of the bundle's length; a split text is trained on completely.
        """
        length, begin, mask, targets = self.length, text.begin, text.is_trained, text.targets
        if self._fits(text):
            return FittedSequences((_window(text, begin, targets),), text.events)
        if self.overflow == "error":
            raise RowError(
                f"it has {targets[-1] + 1} tokens, the bundle takes {length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate or split",
                code="row-too-long",
            )
        windows: list[EncodedText] = []
        events = [*text.events]
        done, first = 0, 1
        while done < len(targets) and not (windows and self.overflow == "truncate"):
            first += int(mask[first:].argmax())
            context = min(first, max(begin + 1, length // 2 if self.overflow == "truncate" else 0))
            chosen = first + np.flatnonzero(mask[first : first + length - context])
            if not len(chosen):
                raise RowError(
                    f"the bundle takes {length} tokens, too few to train on: export with a larger "
                    "--sequence-length",
                    code="bundle-too-short",
                )
            start = max(begin, int(chosen[-1]) + 1 - (length - begin))
            if not windows and start > begin:
                events.append(PROMPT_CUT)
            windows.append(_window(text, start, chosen))
            done, first = done + len(chosen), int(chosen[-1]) + 1
        if len(windows) > 1:
            events.append(SPLIT)
        if done < len(targets):
            events.append(END_CUT)
        return FittedSequences(tuple(windows), tuple(events), len(targets) - done)

    def _fit_candidates(self, row: Candidates) -> FittedSequences:
        """Cut the prompt of all candidates equally, then answers that are still too long."""
        texts = [encode(each, self.tokenizer) for each in row.texts]
        for each in texts:
            if row.comparison == "choices" and each.is_trained[0]:
                raise RowError("it has an empty prompt: nothing predicts its candidates", code="prompt-empty")
            _check_trained(each)
        context = min(int(each.is_trained.argmax()) for each in texts)
        after = 0 if shares_sequence(row, texts) else max(len(each.ids) for each in texts) - context
        excess = max(context + after - self.length, 0)
        if excess and self.overflow == "error" and row.comparison == "choices":
            raise RowError(
                f"it has a prompt of {context} tokens and {after} after it, the bundle takes {self.length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate",
                code="row-too-long",
            )
        max_cut = max(context - texts[0].begin - 1, 0)
        if row.comparison == "answers":
            max_cut = min(max_cut, max(context - self.length // 2, 0))
        elif excess > max_cut:
            raise RowError(
                f"it has a candidate of {after} tokens, the bundle takes {self.length}: "
                "export with a larger --sequence-length",
                code="candidate-too-long",
            )
        cut = 0 if self.overflow == "error" else min(excess, max_cut)
        texts = [_without(each, slice(each.begin, each.begin + cut)) for each in texts]
        if row.comparison == "answers":
            fitted = sum(map(self._windows, texts), FittedSequences(()))
        else:
            fitted = FittedSequences(tuple(texts), tuple(event for each in texts for event in each.events))
        events = (PROMPT_CUT, *fitted.events) if cut else fitted.events
        return replace(fitted, events=tuple(dict.fromkeys(events)))

    def _fit_classified(self, text: EncodedText) -> FittedSequences:
        """Cut the end of an encoder's text, before its final special tokens."""
        excess = len(text.ids) - self.length
        if excess <= 0:
            return FittedSequences((text,), text.events)
        if self.length <= text.begin + text.end:
            raise RowError(
                f"the bundle takes {self.length} tokens, too few for any text: export with a larger "
                "--sequence-length",
                code="bundle-too-short",
            )
        if self.overflow != "truncate":
            raise RowError(
                f"it has {len(text.ids)} tokens, the bundle takes {self.length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate",
                code="row-too-long",
            )
        end = len(text.ids) - text.end
        return FittedSequences((_without(text, slice(end - excess, end)),), (*text.events, ENCODER_CUT))


def shares_sequence(row: Candidates, texts: Sequence[EncodedText]) -> bool:
    """Return whether all candidates have one token and can share the sequence of their prompt."""
    return row.comparison == "choices" and all(len(each.targets) == 1 for each in texts)


def _check_trained(text: EncodedText) -> None:
    """Raise RowError if no token of a text is trained on, for example if a chat template renders nothing."""
    if not len(text.targets):
        raise RowError(f"it has {len(text.ids)} tokens and none to train on", code="nothing-to-learn")


def _window(text: EncodedText, start: int, targets: NDArray[np.intp]) -> EncodedText:
    """Return the tokens from `start` to the last target, after the special tokens at the beginning."""
    begin = text.begin
    ids = np.concatenate([text.ids[:begin], text.ids[start : targets[-1] + 1]])
    is_trained = np.zeros(len(ids), np.bool_)
    is_trained[targets - (start - begin)] = True
    return EncodedText(ids, is_trained, begin)


def _without(text: EncodedText, removed: slice) -> EncodedText:
    """Return a text without a slice of its tokens."""
    return replace(text, ids=np.delete(text.ids, removed), is_trained=np.delete(text.is_trained, removed))
