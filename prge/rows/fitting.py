"""Texts and candidates to token sequences that a bundle takes: whole, cut, or split.

texts        whole; or, as `overflow` says, divided as they say themselves, then between any two tokens; a
             prompt loses its beginning, as in MeZO (arXiv 2305.17333)
choices      the prompt loses its beginning, a choice is never cut
answers      the prompt loses up to half of the bundle, then the answers their ends
classes      the text loses its end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prge.errors import DataError
from prge.rows.build_options import Overflow
from prge.rows.columns import RowError
from prge.rows.encoding import EncodedText, encode
from prge.rows.report import (
    CONTEXT_CUT,
    ENCODER_CUT,
    END_CUT,
    NO_ROOM_FOR_END,
    PROMPT_CUT,
    SPLIT,
    TURNS_CUT,
    TURNS_SPLIT,
)
from prge.rows.segments import Candidates, SegmentedText, Texts
from prge.rows.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Fitted:
    """Sequences that fit a bundle, up to the last token that is learnt.

    `events` are what a report has of it, `dropped` target tokens were left out.
    """

    sequences: tuple[EncodedText, ...]
    events: tuple[str, ...] = ()
    dropped: int = 0

    def __add__(self, other: Fitted) -> Fitted:
        return Fitted(
            self.sequences + other.sequences, self.events + other.events, self.dropped + other.dropped
        )


@dataclass(frozen=True)
class Fitter:
    """Makes the sequences of rows fit into `length` tokens; `overflow` is never `auto`."""

    tokenizer: Tokenizer
    length: int
    overflow: Overflow

    def fit(self, row: Texts | Candidates) -> Fitted:
        """The token sequences of a row: of texts each a new example, of candidates all of one example.

        Raises:
            RowError: there is nothing to learn, or it doesn't fit.
            DataError: a text can't be tokenized.
        """
        if isinstance(row, Texts):
            return sum(map(self._fit_text, row.texts), Fitted(()))
        if row.comparison == "classes":
            return self._fit_classified(encode(row.texts[0], self.tokenizer))
        return self._fit_candidates(row)

    def _takes(self, text: EncodedText) -> bool:
        """Whether a text fits up to its last token that is learnt."""
        return int(np.flatnonzero(text.is_trained).max(initial=-1)) < self.length

    def _fit_text(self, text: SegmentedText) -> Fitted:
        encoded = encode(text, self.tokenizer)
        _check_trained(encoded)
        if len(text.segments) == 1 and encoded.end and not self._takes(encoded):
            bare = _without(encoded, slice(-encoded.end, None))
            if self._takes(bare) and len(bare.targets):
                return self._windows(replace(bare, events=(NO_ROOM_FOR_END,)))
        if text.divide is None or self.overflow == "error" or self._takes(encoded):
            return self._windows(encoded)
        try:
            parts = text.divide(lambda part: self._takes(encode(part, self.tokenizer)))
        except DataError:  # such as of a chat template that wants conversations whole
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
        return sum(windows, Fitted((), events, dropped))

    def _windows(self, text: EncodedText) -> Fitted:
        """Cut or split a text between any two of its tokens.

        Every target is in at most one window and keeps at least the token before it. A cut completion leaves
        its prompt up to half of the bundle; a split text is learnt entirely.
        """
        room, begin, mask, targets = self.length, text.begin, text.is_trained, text.targets
        if self._takes(text):
            return Fitted((_window(text, begin, targets),), text.events)
        if self.overflow == "error":
            raise RowError(
                f"has {targets[-1] + 1} tokens, the bundle takes {room}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate or split",
                code="row-too-long",
            )
        windows: list[EncodedText] = []
        events = [*text.events]
        done, first = 0, 1
        while done < len(targets) and not (windows and self.overflow == "truncate"):
            first += int(mask[first:].argmax())
            context = min(first, max(begin + 1, room // 2 if self.overflow == "truncate" else 0))
            chosen = first + np.flatnonzero(mask[first : first + room - context])
            if not len(chosen):
                raise RowError(
                    f"the bundle takes {room} tokens, too few to learn anything: export a longer one",
                    code="bundle-too-short",
                )
            start = max(begin, int(chosen[-1]) + 1 - (room - begin))
            if not windows and start > begin:
                events.append(PROMPT_CUT)
            windows.append(_window(text, start, chosen))
            done, first = done + len(chosen), int(chosen[-1]) + 1
        if len(windows) > 1:
            events.append(SPLIT)
        if done < len(targets):
            events.append(END_CUT)
        return Fitted(tuple(windows), tuple(events), len(targets) - done)

    def _fit_candidates(self, row: Candidates) -> Fitted:
        """Cut the prompt of candidates alike for all of them, then answers that are still too long."""
        texts = [encode(each, self.tokenizer) for each in row.texts]
        for each in texts:
            if row.comparison == "choices" and each.is_trained[0]:
                raise RowError("has an empty prompt: nothing predicts its candidates", code="prompt-empty")
            _check_trained(each)
        context = min(int(each.is_trained.argmax()) for each in texts)
        after = 0 if shares_sequence(row, texts) else max(len(each.ids) for each in texts) - context
        excess = max(context + after - self.length, 0)
        if excess and self.overflow == "error" and row.comparison == "choices":
            raise RowError(
                f"has a prompt of {context} tokens and {after} after it, the bundle takes {self.length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate",
                code="row-too-long",
            )
        most = max(context - texts[0].begin - 1, 0)
        if row.comparison == "answers":
            most = min(most, max(context - self.length // 2, 0))
        elif excess > most:
            raise RowError(
                f"has a candidate of {after} tokens, the bundle takes {self.length}: "
                "export with a larger --sequence-length",
                code="candidate-too-long",
            )
        cut = 0 if self.overflow == "error" else min(excess, most)
        texts = [_without(each, slice(each.begin, each.begin + cut)) for each in texts]
        if row.comparison == "answers":
            fitted = sum(map(self._windows, texts), Fitted(()))
        else:
            fitted = Fitted(tuple(texts), tuple(event for each in texts for event in each.events))
        events = (PROMPT_CUT, *fitted.events) if cut else fitted.events
        return replace(fitted, events=tuple(dict.fromkeys(events)))

    def _fit_classified(self, text: EncodedText) -> Fitted:
        """Cut the end of an encoder's text, before the special tokens after it."""
        excess = len(text.ids) - self.length
        if excess <= 0:
            return Fitted((text,), text.events)
        if self.length <= text.begin + text.end:
            raise RowError(
                f"the bundle takes {self.length} tokens, too few for any text: export a longer one",
                code="bundle-too-short",
            )
        if self.overflow != "truncate":
            raise RowError(
                f"has {len(text.ids)} tokens, the bundle takes {self.length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate",
                code="row-too-long",
            )
        end = len(text.ids) - text.end
        return Fitted((_without(text, slice(end - excess, end)),), (*text.events, ENCODER_CUT))


def shares_sequence(row: Candidates, texts: Sequence[EncodedText]) -> bool:
    """Whether candidates are one token each, which all follow one sequence: that of their prompt."""
    return row.comparison == "choices" and all(len(each.targets) == 1 for each in texts)


def _check_trained(text: EncodedText) -> None:
    """Raise RowError where no token of a text is learnt, as where a chat template renders nothing."""
    if not len(text.targets):
        raise RowError(f"has {len(text.ids)} tokens and none to learn from", code="nothing-to-learn")


def _window(text: EncodedText, start: int, targets: NDArray[np.intp]) -> EncodedText:
    """The tokens from `start` to the last of the targets, after those that begin every sequence."""
    begin = text.begin
    ids = np.concatenate([text.ids[:begin], text.ids[start : targets[-1] + 1]])
    is_trained = np.zeros(len(ids), np.bool_)
    is_trained[targets - (start - begin)] = True
    return EncodedText(ids, is_trained, begin)


def _without(text: EncodedText, gone: slice) -> EncodedText:
    """A text without some of its tokens."""
    return replace(text, ids=np.delete(text.ids, gone), is_trained=np.delete(text.is_trained, gone))
