"""A small numpy model for generation: its next token depends on all previous tokens and on the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prge.engine import FloatArray
from prge.errors import EngineError
from prge.formats.adapter import Adapter
from prge.model_spec import AdaptedModule
from tests.templates import random_adapter

MODULES = (AdaptedModule("layer", 2, 8, 6),)
WIDTH = 12


def make_adapter(seed: int = 0) -> Adapter:
    """Return an adapter of the model; with seed 0 it changes nothing."""
    return random_adapter(MODULES, seed) if seed else Adapter.zeros(MODULES)


class NumpyGenerationEngine:
    """Implements prge.generation.generator.GenerationEngine: a recurrent network, whose states it keeps.

    `calls` are the tokens of every feed, and the sequences of every step. A misuse is an AssertionError;
    `failing` tokens are an EngineError of the code `token-refused`. `embedding` [vocabulary_size, width] and
    `head` [width, vocabulary_size] are its weights.
    """

    def __init__(self, vocabulary_size: int = 420, context: int = 64, slots: int = 3) -> None:
        random = np.random.default_rng(0)
        self.vocabulary_size = vocabulary_size
        self.context = context
        self.slots = slots
        self.max_checked = 8
        self.calls: list[list[int]] = []
        self.failing: set[int] = set()
        self._recurrent = random.normal(0, 1.5 / np.sqrt(WIDTH), (WIDTH, WIDTH))
        self.embedding = random.normal(size=(vocabulary_size, WIDTH))
        self.head = random.normal(size=(WIDTH, vocabulary_size))
        self._adapters: dict[int, NDArray[np.float64]] = {}
        self._states: dict[int, list[NDArray[np.float64]]] = {}
        self._opened = 0

    @property
    def open_count(self) -> int:
        """Number of open sequences."""
        return len(self._states)

    def open(self, adapter: Adapter) -> int:
        """See prge.generation.generator.GenerationEngine.open."""
        assert len(self._states) < self.slots, "no free slot"
        self._opened += 1
        self._states[self._opened] = [np.zeros(WIDTH)]
        adapted = np.random.default_rng(1).normal(size=(adapter.size, WIDTH))
        self._adapters[self._opened] = adapter.values.astype(np.float64) @ adapted
        return self._opened

    def length(self, sequence: int) -> int:
        """See prge.generation.generator.GenerationEngine.length."""
        return len(self._states[sequence]) - 1

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See prge.generation.generator.GenerationEngine.feed."""
        self.calls.append(list(tokens))
        return self._fed(sequence, tokens)

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See prge.generation.generator.GenerationEngine.check."""
        self.calls.append(list(tokens))
        return np.stack([self._fed(sequence, [token]) for token in tokens])

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """See prge.generation.generator.GenerationEngine.step."""
        self.calls.append(list(tokens))
        return {sequence: self._fed(sequence, [token]) for sequence, token in tokens.items()}

    def rewind(self, sequence: int, length: int) -> None:
        """See prge.generation.generator.GenerationEngine.rewind."""
        assert 0 <= length <= self.length(sequence)
        del self._states[sequence][length + 1 :]

    def copy(self, source: int, target: int, length: int) -> None:
        """See prge.generation.generator.GenerationEngine.copy."""
        assert self.length(target) == 0 and 0 <= length <= self.length(source)
        assert np.array_equal(self._adapters[source], self._adapters[target])
        self._states[target] = self._states[source][: length + 1]

    def close(self, sequence: int) -> None:
        """See prge.generation.generator.GenerationEngine.close."""
        del self._states[sequence], self._adapters[sequence]

    def _fed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        assert tokens, "nothing to feed"
        states = self._states[sequence]
        assert self.length(sequence) + len(tokens) <= self.context, "longer than the context"
        for token in tokens:
            if token in self.failing:
                raise EngineError(f"the engine refuses token {token}", code="token-refused")
            entering = self.embedding[token] + self._adapters[sequence]
            states.append(np.tanh(self._recurrent @ states[-1] + entering))
        logits: FloatArray = (2 * states[-1] @ self.head).astype(np.float32)
        return logits
