"""Texts that are given word by word: the engine computes what it would for its own.

    speaker = DictatedSpeaker(open_speaker(bundle))
    speaker.text = [*prompt, *answer]

A model with random weights repeats nothing that it was told; what drafts gain depends on that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.engine import FloatArray
from prge.generation.generator import GenerationEngine

# Tokens of the text that stand in the prompt together, and that stand between such parts.
PART, BETWEEN = 16, 4
_FEW_WORDS = 16


class DictatedSpeaker:
    """Implements prge.generation.generator.GenerationEngine; the next token of `text` is the most likely."""

    def __init__(self, speaker: GenerationEngine) -> None:
        self._speaker = speaker
        self.text: list[int] = []
        self.vocabulary_size, self.context, self.slots = (
            speaker.vocabulary_size,
            speaker.context,
            speaker.slots,
        )
        self.most_checked = speaker.most_checked
        self.open, self.close = speaker.open, speaker.close
        self.length, self.rewind = speaker.length, speaker.rewind

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        return self._dictated(self.length(sequence) + len(tokens), self._speaker.feed(sequence, tokens))

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        first = self.length(sequence) + 1
        found = self._speaker.check(sequence, tokens)
        return np.stack([self._dictated(first + place, logits) for place, logits in enumerate(found)])

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """See GenerationEngine."""
        found = self._speaker.step(tokens)
        return {each: self._dictated(self.length(each), logits) for each, logits in found.items()}

    def _dictated(self, place: int, logits: FloatArray) -> FloatArray:
        logits[self.text[place]] = np.finfo(np.float32).max
        return logits


def repeating(words: int, prompt: int, new: int, random: np.random.Generator) -> list[int]:
    """A prompt of random tokens, and an answer of parts of it with other tokens between them."""
    text: list[int] = random.integers(0, words, prompt).tolist()
    while len(text) < prompt + new:
        start = int(random.integers(0, prompt - PART))
        text += text[start : start + PART] + random.integers(0, words, BETWEEN).tolist()
    return text[: prompt + new]


def of_few_words(words: int, prompt: int, new: int, random: np.random.Generator) -> list[int]:
    """A text of few words in no order: what stood behind two of them says nothing of what follows."""
    text: list[int] = random.integers(0, min(_FEW_WORDS, words), prompt + new).tolist()
    return text
