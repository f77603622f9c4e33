"""Speculative decoding by prompt lookup: drafts the tokens that followed the same n-gram before.

    ... a b c d e ... a b c        the last tokens occurred before: draft d e

The engine verifies all tokens of a draft in one call, which reads its weights once. Prompt lookup decoding is
due to Saxena (2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

# Lengths of the n-grams that are looked up, longest first; 2 only after a draft that was right.
_NGRAM_SIZES = (5, 4, 3, 2)
_MIN_DRAFT, _MAX_DRAFT = 2, 15
# Factor of the pause after each wrong draft: verifying a draft takes as long as generating two tokens.
_PAUSE_FACTOR = 3
_MAX_PAUSE = 64


class PromptLookup:
    """Drafts tokens of one completion by n-gram lookup; pauses after wrong drafts, longer each time.

    Args:
        tokens: tokens of the prompt.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # For each n-gram the position after its latest occurrence.
        self._next_position: dict[tuple[int, ...], int] = {}
        self._size = _MIN_DRAFT
        self._pause = self._pause_left = 0
        self._last_was_right = False
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append a token of the completion."""
        length = len(self._tokens)
        for size in _NGRAM_SIZES:
            if size <= length:
                self._next_position[tuple(self._tokens[length - size :])] = length
        self._tokens.append(token)

    def draft(self, max_tokens: int) -> list[int]:
        """Return a draft of the next tokens, at most `max_tokens`; often an empty list."""
        if self._pause_left:
            self._pause_left -= 1
            return []
        for size in _NGRAM_SIZES if self._last_was_right else _NGRAM_SIZES[:-1]:
            start = self._next_position.get(tuple(self._tokens[-size:]))
            if start is not None:
                extended, count = list(self._tokens), min(self._size, max_tokens)
                for position in range(start, start + count):
                    extended.append(extended[position])
                return extended[len(self._tokens) :]
        return []

    def note(self, drafted: int, right: int) -> None:
        """Record the outcome of the last draft.

        Args:
            drafted: number of its tokens.
            right: number of its tokens that were accepted.
        """
        if right < drafted:
            self._size = max(_MIN_DRAFT, right)
        else:
            self._size = min(2 * self._size, _MAX_DRAFT)
        self._last_was_right = right >= _MIN_DRAFT
        longer_pause = min(_PAUSE_FACTOR * self._pause + _PAUSE_FACTOR - 1, _MAX_PAUSE)
        self._pause = 0 if self._last_was_right else longer_pause
        self._pause_left = self._pause
