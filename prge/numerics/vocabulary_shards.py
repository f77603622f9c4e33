"""Log-probabilities of a vocabulary that is read in shards, so that no program holds all of its head.

    log p(target) = logit - log(sum of the exponentials of all logits)

A shard tells its logit of every target, and the sum of its own exponentials. Both come with a shift taken
from the logits, because exponentials of float32 overflow above 88: the logarithm of the sum over the shards
before, which a first shard has to be asked for again where its logits are far from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prge.engine import FloatArray, IntArray

# Numbers of a shard's weight: bytes in int8.
_LARGEST_SHARD = 20_000_000
_MOST_PIECES = 64
# Sums below this have lost digits. No step leads from too small a sum to too large a one.
_LEAST_SUM = 1e-30
_STEP = 80.0
_MOST_SHIFTS = 64


def count_shards(words: int, width: int) -> int:
    """How many equal shards a vocabulary of so many words is read in, by a head of a width.

    The fewest of at most 20 million numbers; else, where it can't be cut evenly, as many as there can be.
    """
    even = [shards for shards in range(1, _MOST_PIECES + 1) if words % shards == 0]
    return next((shards for shards in even if words // shards * width <= _LARGEST_SHARD), even[-1])


class TargetLogProbs:
    """What the shards that were read so far tell of some targets, and of their tangents.

        reading = TargetLogProbs(targets, words=32_768)
        for shard in range(8):
            reading.add(shard, which, *reading.compute_shifted(which, lambda shift: ...))
        reading.logprobs

    `log_total` f64 [questions] is the logarithm of the sum of exponentials so far.

    Args:
        targets: i64 [questions], numbers of words in the vocabulary.
        words: of one shard.
        queries: tangents of every question.
    """

    def __init__(self, targets: IntArray, words: int, queries: int = 0) -> None:
        self._targets = targets
        self._words = words
        self._logits = np.zeros(len(targets))
        self._changes = np.zeros((queries, len(targets)))
        self._mean_changes = np.zeros((queries, len(targets)))
        self.log_total = np.full(len(targets), -np.inf)

    @property
    def logprobs(self) -> FloatArray:
        """Of the targets, f32 [questions]."""
        return np.asarray(self._logits - self.log_total, np.float32)

    @property
    def tangents(self) -> FloatArray:
        """Tangents of these, f32 [queries, questions]."""
        return np.asarray(self._changes - self._mean_changes, np.float32)

    def local_targets(self, shard: int, which: slice) -> tuple[IntArray, FloatArray]:
        """Targets as a shard counts them, and 1 where it has them; where it has not, 0 and any number."""
        numbers = self._targets[which] - shard * self._words
        has = (numbers >= 0) & (numbers < self._words)
        return np.where(has, numbers, 0), has.astype(np.float32)

    def compute_shifted(
        self, which: slice, compute: Callable[[FloatArray], tuple[FloatArray, FloatArray | None]]
    ) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """The shift, and what a shard answers to it: asked again as long as sums overflow, or vanish.

        Args:
            which: questions.
            compute: what `add` takes in, by the shift.
        """
        known = self.log_total[which]
        is_first = np.isneginf(known)
        shift = np.where(is_first, 0, known).astype(np.float32)
        for _ in range(_MOST_SHIFTS):
            parts, tangents = compute(shift)
            totals = parts[:, 1]
            correction = np.isposinf(totals).astype(np.float32) - (is_first & (totals < _LEAST_SUM))
            if not correction.any():
                break
            shift = shift + _STEP * correction
        return shift, parts, tangents

    def add(
        self,
        shard: int,
        which: slice,
        shift: FloatArray,
        parts: FloatArray,
        tangents: FloatArray | None = None,
    ) -> None:
        """Take in what a shard tells.

        Args:
            shard: its number.
            which: questions that it was asked.
            shift: f32 [questions] that it was given.
            parts: f32 [questions, 2], the logit of the target and the sum of exponentials, after the shift.
            tangents: f32 [queries, questions, 2] of these.
        """
        has = self.local_targets(shard, which)[1]
        with np.errstate(divide="ignore"):
            log_total = shift + np.log(parts[:, 1].astype(np.float64))
        before = self.log_total[which].copy()
        self.log_total[which] = after = np.logaddexp(before, log_total)
        self._logits[which] += has * (parts[:, 0].astype(np.float64) + shift)
        if tangents is not None:
            self._changes[:, which] += has * tangents[..., 0]
            self._mean_changes[:, which] *= np.exp(before - after)
            self._mean_changes[:, which] += tangents[..., 1] * np.exp(shift - after)
