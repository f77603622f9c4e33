"""The GenerationEngine protocol: what generation needs from an engine, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from prge.engine import FloatArray
from prge.formats.adapter import Adapter


class GenerationEngine(Protocol):
    """Continues sequences of tokens, several at once, each with an adapter of its own.

    A sequence keeps what the model made of its tokens, so that each is computed once.
    """

    @property
    def vocabulary_size(self) -> int:
        """Tokens that logits are for."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        ...

    @property
    def slots(self) -> int:
        """Most sequences that are open at once."""
        ...

    def open(self, adapter: Adapter) -> int:
        """Begin an empty sequence; its number. There must be a free slot. The adapter must not change."""
        ...

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        ...

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """Append at least one token; logits f32 [vocabulary_size] of the token that follows the last one.

        Raises:
            EngineError: the sequence would be longer than `context`, or the engine failed.
        """
        ...

    @property
    def most_checked(self) -> int:
        """Most tokens of a `check`; 0 if a sequence can't go back to where a check found a wrong one."""
        ...

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """Append at least two tokens; logits f32 [tokens, vocabulary_size] of the one that follows each.

        Raises:
            EngineError: see `feed`.
        """
        ...

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """Append one token to each of several sequences; logits as `feed` answers them, by sequence.

        Raises:
            EngineError: see `feed`.
        """
        ...

    def rewind(self, sequence: int, length: int) -> None:
        """Forget all tokens of a sequence behind its first `length`; more where it can't go back to there."""
        ...

    def close(self, sequence: int) -> None:
        """Forget a sequence and free its slot."""
        ...
