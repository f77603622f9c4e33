"""Log-probabilities of targets from a vocabulary in shards, so that no program holds the whole output head.

    log p(target) = logit - log(sum of the exponentials of all logits)

A shard's program returns the logit of every target and the sum of the exponentials of its own logits. A shift
is subtracted from the logits first, because exponentials of float32 overflow above 88. The shift is the
log-sum-exp over the earlier shards. The first shard has no such value, and is computed again with another
shift if its logits are far from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prge.engine import FloatArray, IntArray

# Most elements of a shard's weight, which are bytes in int8.
_MAX_SHARD_SIZE = 20_000_000
_MAX_SHARDS = 64
# Smaller sums have lost precision. A step of the shift can't turn such a sum into one that overflows.
_MIN_SUM = 1e-30
_SHIFT_STEP = 80.0
_MAX_SHIFTS = 64


def count_shards(vocabulary_size: int, width: int) -> int:
    """Return the number of equal shards of an output head.

    It is the smallest number for which a shard has at most 20 million elements; if no even division into at
    most 64 shards has that few, the largest number that divides the vocabulary.

    Args:
        vocabulary_size: number of tokens in the vocabulary.
        width: width of the hidden states.
    """
    divisors = [shards for shards in range(1, _MAX_SHARDS + 1) if vocabulary_size % shards == 0]
    fitting = (shards for shards in divisors if vocabulary_size // shards * width <= _MAX_SHARD_SIZE)
    return next(fitting, divisors[-1])


class TargetLogProbs:
    """Accumulates the log-probabilities of targets, and their tangents, over the shards of a vocabulary.

        accumulator = TargetLogProbs(targets, words=32_768)
        for shard in range(8):
            accumulator.add(shard, selection, *accumulator.compute_shifted(selection, lambda shift: ...))
        accumulator.logprobs

    Attributes:
        log_total: log-sum-exp of the logits of all shards so far, f64 [targets].

    Args:
        targets: token ids, i64 [targets].
        words: number of tokens in a shard.
        queries: number of tangents of each target.
    """

    def __init__(self, targets: IntArray, words: int, queries: int = 0) -> None:
        self._targets = targets
        self._words = words
        self._logits = np.zeros(len(targets))
        self._logit_tangents = np.zeros((queries, len(targets)))
        self._log_total_tangents = np.zeros((queries, len(targets)))
        self.log_total = np.full(len(targets), -np.inf)

    @property
    def logprobs(self) -> FloatArray:
        """Log-probabilities of the targets, f32 [targets]."""
        return np.asarray(self._logits - self.log_total, np.float32)

    @property
    def tangents(self) -> FloatArray:
        """Tangents of the log-probabilities, f32 [queries, targets]."""
        return np.asarray(self._logit_tangents - self._log_total_tangents, np.float32)

    def local_targets(self, shard: int, selection: slice) -> tuple[IntArray, FloatArray]:
        """Return the targets as indices into a shard, and a mask that is 1 for targets in the shard.

        For targets of other shards, the index is 0 and the mask is 0.
        """
        indices = self._targets[selection] - shard * self._words
        is_in_shard = (indices >= 0) & (indices < self._words)
        return np.where(is_in_shard, indices, 0), is_in_shard.astype(np.float32)

    def compute_shifted(
        self, selection: slice, compute: Callable[[FloatArray], tuple[FloatArray, FloatArray | None]]
    ) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Compute a shard with a shift for which its sums of exponentials neither overflow nor vanish.

        Args:
            selection: slice of the targets.
            compute: computes the shard for a shift, f32 [targets]; returns `parts` and `tangents` as `add`
                takes them. It is called again with another shift while a sum is out of range.

        Returns:
            The shift, `parts` and `tangents`.
        """
        log_total = self.log_total[selection]
        is_first = np.isneginf(log_total)
        shift = np.where(is_first, 0, log_total).astype(np.float32)
        for _ in range(_MAX_SHIFTS):
            parts, tangents = compute(shift)
            sums = parts[:, 1]
            correction = np.isposinf(sums).astype(np.float32) - (is_first & (sums < _MIN_SUM))
            if not correction.any():
                break
            shift = shift + _SHIFT_STEP * correction
        return shift, parts, tangents

    def add(
        self,
        shard: int,
        selection: slice,
        shift: FloatArray,
        parts: FloatArray,
        tangents: FloatArray | None = None,
    ) -> None:
        """Add the outputs of a shard.

        Args:
            shard: number of the shard.
            selection: slice of the targets that the shard was computed for.
            shift: the value that was subtracted from the logits, f32 [targets].
            parts: the shifted logit of each target and the sum of the exponentials of the shard's shifted
                logits, f32 [targets, 2].
            tangents: tangents of `parts`, f32 [queries, targets, 2].
        """
        mask = self.local_targets(shard, selection)[1]
        with np.errstate(divide="ignore"):
            log_sum = shift + np.log(parts[:, 1].astype(np.float64))
        before = self.log_total[selection].copy()
        self.log_total[selection] = after = np.logaddexp(before, log_sum)
        self._logits[selection] += mask * (parts[:, 0].astype(np.float64) + shift)
        if tangents is not None:
            self._logit_tangents[:, selection] += mask * tangents[..., 0]
            self._log_total_tangents[:, selection] *= np.exp(before - after)
            self._log_total_tangents[:, selection] += tangents[..., 1] * np.exp(shift - after)
