"""Teacher forcing: the engine computes as usual, but the next token is predetermined.

    engine = TeacherForcedEngine(open_generation_engine(bundle))
    engine.text = [*prompt, *answer]

A model with random weights doesn't repeat its prompt, and the gain of drafts depends only on repetition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.engine import FloatArray
from prge.generation.generator import GenerationEngine

# Tokens in a repeated part of the prompt, and tokens between such parts.
PART, BETWEEN = 16, 4
_FEW_WORDS = 16


class TeacherForcedEngine:
    """Implements prge.generation.generator.GenerationEngine; the next token of `text` is the most likely."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self.text: list[int] = []
        self.vocabulary_size, self.context, self.slots = (
            engine.vocabulary_size,
            engine.context,
            engine.slots,
        )
        self.max_checked = engine.max_checked
        self.open, self.close = engine.open, engine.close
        self.length, self.rewind, self.copy = engine.length, engine.rewind, engine.copy

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        return self._force(self.length(sequence) + len(tokens), self._engine.feed(sequence, tokens))

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        first = self.length(sequence) + 1
        outputs = self._engine.check(sequence, tokens)
        return np.stack([self._force(first + position, logits) for position, logits in enumerate(outputs)])

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """See GenerationEngine."""
        outputs = self._engine.step(tokens)
        return {each: self._force(self.length(each), logits) for each, logits in outputs.items()}

    def _force(self, position: int, logits: FloatArray) -> FloatArray:
        logits[self.text[position]] = np.finfo(np.float32).max
        return logits


def repeating(words: int, prompt: int, new: int, random: np.random.Generator) -> list[int]:
    """Return a prompt of random tokens, and an answer of parts of it with other tokens in between."""
    text: list[int] = random.integers(0, words, prompt).tolist()
    while len(text) < prompt + new:
        start = int(random.integers(0, prompt - PART))
        text += text[start : start + PART] + random.integers(0, words, BETWEEN).tolist()
    return text[: prompt + new]


def of_few_words(words: int, prompt: int, new: int, random: np.random.Generator) -> list[int]:
    """Return a text of few words in random order, in which two tokens don't predict the next one."""
    text: list[int] = random.integers(0, min(_FEW_WORDS, words), prompt + new).tolist()
    return text
