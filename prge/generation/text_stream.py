"""Incremental decoding of tokens into text: whole characters only, and no part of a stop word.

The spaces and bytes that a token stands for depend on the tokens before it. Each token is therefore decoded
together with the last tokens that form whole characters:

    ... context | held        the new text is decode(context + held) without decode(context)

The cost of a token doesn't grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prge.data.tokenization.tokenizer import Tokenizer

# The character that decoders write for bytes that aren't a whole character.
REPLACEMENT = "\ufffd"
# Most tokens that are held back while they don't form a whole character, which has at most four bytes.
MAX_HELD = 16
_MAX_CONTEXT = 8


class TextStream:
    """Decodes the tokens of one completion as they are generated, up to a stop word.

    The concatenated texts equal the decoded tokens. Special tokens aren't shown, except those in `shown`.

    Attributes:
        stopped: whether a stop word was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        before: Sequence[int] | None = (),
        shown: Collection[int] = (),
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: decodes the tokens.
            stop: non-empty words that end the text.
            before: tokens that the text continues. If there are none, the text is decoded on its own: a
                tokenizer such as SentencePiece's omits the space before the first word. None: with any
                tokenizer, white space at the beginning of the text is removed.
            shown: special tokens whose names are part of the text.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.difference(shown)
        self._stop = tuple(stop)
        self._context = self._last_whole(before or ())
        self._shown = self._decoded(self._context)
        self._held: list[int] = []
        self._pending = ""
        self._parts: list[str] = []
        self._begun = before is not None
        self.stopped = False

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """Add a token; return the new text that can be shown, which may be empty."""
        if self.stopped or token in self._hidden:
            return ""
        self._held.append(token)
        text = self._new_text()
        whole = not text.endswith(REPLACEMENT)
        if not whole and len(self._held) < MAX_HELD:
            return ""
        if whole:
            self._context = self._held
            self._shown = self._decoded(self._context)
        self._held = []
        return self._released(text)

    def finish(self) -> str:
        """End the text; return the part that was held back, with one U+FFFD for an incomplete character."""
        text = ""
        if self._held and not self.stopped:
            text = self._released(self._new_text().rstrip(REPLACEMENT) + REPLACEMENT)
        self._held = []
        rest, self._pending = self._pending, ""
        return text + self._emitted(rest)

    def _new_text(self) -> str:
        return self._decoded([*self._context, *self._held])[len(self._shown) :]

    def _released(self, text: str) -> str:
        """Return the part of pending and new text that can't belong to a stop word; sets `stopped`."""
        text = self._pending + text
        matches = [(start + len(word), start) for word in self._stop if (start := text.find(word)) >= 0]
        if matches:
            # The stop word that is complete first, however the text is divided into tokens.
            self.stopped, end = True, min(matches)[1]
        else:
            end = len(text) - max((overlap(text, word) for word in self._stop), default=0)
        self._pending = "" if self.stopped else text[end:]
        return self._emitted(text[:end])

    def _emitted(self, text: str) -> str:
        """Record and return text that is shown; strip leading white space if `before` was None."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._parts.append(text)
        return text

    def _last_whole(self, tokens: Sequence[int]) -> list[int]:
        """Return the shortest suffix of tokens that decodes to whole characters; empty if it is too long."""
        last = [token for token in tokens[-4 * _MAX_CONTEXT :] if token not in self._hidden]
        for count in range(1, min(len(last), _MAX_CONTEXT) + 1):
            if REPLACEMENT not in self._decoded(last[-count:]):
                return last[-count:]
        return []

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


def overlap(text: str, word: str) -> int:
    """Return the length of the longest beginning of a word that the text ends with."""
    longest = min(len(word) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
