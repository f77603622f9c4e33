"""Tokens become text while they come: whole characters only, and nothing of a stop word.

Which spaces and bytes a token stands for depends on those before it, so each is decoded behind the last ones
that made whole characters:

    ... context | held        decode(context + held) without decode(context) is what is new

So a token costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from prge.data.tokenization.tokenizer import Tokenizer

# What the decoders write for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"
# Tokens without a whole character after which they are shown as they are: a character has four bytes at most.
MOST_HELD = 16
_MOST_CONTEXT = 8


class TextStream:
    """The text of one answer, in pieces; joined they are what its tokens decode to, up to a stop word.

    Special tokens aren't shown. `text` is all that was shown so far, `stopped` whether a stop word came.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] | None = ()
    ) -> None:
        """Begin a text.

        Args:
            tokenizer: decodes the tokens.
            stop: words, not empty, that the text ends before.
            before: tokens that the text goes on from. Without them it is decoded by itself: a tokenizer like
                SentencePiece leaves out the space before its first word. None: whatever the tokenizer, it
                begins with no white space.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._context = self._last_whole(before or ())
        self._shown = self._decoded(self._context)
        self._held: list[int] = []
        self._pending = ""
        self._pieces: list[str] = []
        self._begun = before is not None
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was shown so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add a token; the text that can be shown now, which may be empty."""
        if self.stopped or token in self._tokenizer.special_ids:
            return ""
        self._held.append(token)
        text = self._new_text()
        whole = not text.endswith(REPLACEMENT)
        if not whole and len(self._held) < MOST_HELD:
            return ""
        if whole:
            self._context = self._held
            self._shown = self._decoded(self._context)
        self._held = []
        return self._released(text)

    def finish(self) -> str:
        """End the text; what was held back of it. Bytes that became no character are one U+FFFD."""
        shown = ""
        if self._held and not self.stopped:
            shown = self._released(self._new_text().rstrip(REPLACEMENT) + REPLACEMENT)
        self._held = []
        rest, self._pending = self._pending, ""
        return shown + self._told(rest)

    def _new_text(self) -> str:
        return self._decoded([*self._context, *self._held])[len(self._shown) :]

    def _released(self, text: str) -> str:
        """What of pending and new text can't be part of a stop word; notes a stop word that came."""
        text = self._pending + text
        found = [(at + len(word), at) for word in self._stop if (at := text.find(word)) >= 0]
        if found:
            # The word that was whole first, however the text came in pieces.
            self.stopped, end = True, min(found)[1]
        else:
            end = len(text) - max((_overlap(text, word) for word in self._stop), default=0)
        self._pending = "" if self.stopped else text[end:]
        return self._told(text[:end])

    def _told(self, text: str) -> str:
        """Text that is shown: noted, and without white space at the beginning of a text of its own."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._pieces.append(text)
        return text

    def _last_whole(self, tokens: Sequence[int]) -> list[int]:
        """The fewest last tokens that decode to whole characters; none if that takes many."""
        special = self._tokenizer.special_ids
        last = [token for token in tokens[-4 * _MOST_CONTEXT :] if token not in special]
        for count in range(1, min(len(last), _MOST_CONTEXT) + 1):
            if REPLACEMENT not in self._decoded(last[-count:]):
                return last[-count:]
        return []

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, special=False)


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of a text a word may begin with."""
    longest = min(len(word) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
