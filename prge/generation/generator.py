"""The GenerationEngine protocol: what text generation needs from an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from prge.engine import FloatArray
from prge.formats.adapter import Adapter


class GenerationEngine(Protocol):
    """Computes logits of several token sequences at once, each with its own adapter and KV cache.

    The cache of a sequence holds its keys, values and recurrent states, so that every token is computed once.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of logits of a token."""
        ...

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sequence: prompt and completion together."""
        ...

    @property
    def slots(self) -> int:
        """Maximum number of sequences that can be open at once."""
        ...

    def open(self, adapter: Adapter) -> int:
        """Open an empty sequence in a free slot; return its number. The adapter must not change."""
        ...

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        ...

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """Append one or more tokens; return the logits of the next token, f32 [vocabulary_size].

        Raises:
            EngineError: the sequence would be longer than `context`, or the engine failed.
        """
        ...

    @property
    def max_checked(self) -> int:
        """Maximum number of tokens of a draft that is worth a `check`; 0 if sequences can't be rewound after
        a failed check."""
        ...

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """Append one or more tokens; return the logits after each of them, f32 [tokens, vocabulary_size].

        Raises:
            EngineError: see `feed`.
        """
        ...

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """Append one token to each of several sequences; return the next logits of each.

        Raises:
            EngineError: see `feed`.
        """
        ...

    def rewind(self, sequence: int, length: int) -> None:
        """Remove all tokens of a sequence after the first `length`, or more if the cache requires it."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Begin an empty sequence with the first `length` tokens of another one that has the same adapter.

        Fewer tokens are copied, or none, if the cache requires it.
        """
        ...

    def close(self, sequence: int) -> None:
        """Close a sequence and free its slot."""
        ...
