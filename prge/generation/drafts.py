"""Drafts of what comes next: what came behind the same tokens before, in the prompt or in the answer.

    ... a b c d e ... a b c        the last tokens stood before: draft d e

A draft is checked in one call of the engine, which reads its weights once for all its tokens. Prompt lookup
is Saxena's (2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that must have stood before, the more the better; two are enough where the last draft was right.
_ALIKE = (5, 4, 3, 2)
_FEWEST, _MOST = 2, 15
# After each draft that is wrong the pause is so many times as long: a check takes as long as two tokens.
_LONGER = 3
_LONGEST_PAUSE = 64


class Lookup:
    """Drafts of one answer. After drafts that were wrong it pauses, longer each time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # What stands behind some tokens, the last time that they were there.
        self._behind: dict[tuple[int, ...], int] = {}
        self._size = _FEWEST
        self._pause = self._left = 0
        self._trusted = False
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Go on with a token."""
        known = len(self._tokens)
        for count in _ALIKE:
            if count <= known:
                self._behind[tuple(self._tokens[known - count :])] = known
        self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """Tokens that may follow, `most` at most; often none."""
        if self._left:
            self._left -= 1
            return []
        for count in _ALIKE if self._trusted else _ALIKE[:-1]:
            start = self._behind.get(tuple(self._tokens[-count:]))
            if start is not None:
                text, size = list(self._tokens), min(self._size, most)
                for place in range(start, start + size):
                    text.append(text[place])
                return text[len(self._tokens) :]
        return []

    def note(self, drafted: int, right: int) -> None:
        """How many tokens of the last draft were those that followed."""
        if right < drafted:
            self._size = max(_FEWEST, right)
        else:
            self._size = min(2 * self._size, _MOST)
        self._trusted = right >= _FEWEST
        self._pause = 0 if self._trusted else min(_LONGER * self._pause + _LONGER - 1, _LONGEST_PAUSE)
        self._left = self._pause
