"""A decoder's head: asked at the positions that a call asks, one shard of the vocabulary after the other.

states -> asked positions -> shard 0, shard 1, ... -> log-probabilities
their slopes -> shard 0, shard 1, ... -> slope of the states
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from device_runner.engines.activations import ActivationStore, Residuals, residual_outputs, residual_values
from device_runner.engines.blocks import Blocks
from device_runner.engines.planning import at_least_two, slices
from prge.engine import Array, FloatArray, IntArray
from prge.formats.chain import FEWEST_TOKENS
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, JVP
from prge.numerics.vocabulary_shards import TargetLogProbs

# Rows of logits that the way back holds at once for each question: the slopes, large and small ones, twice.
_ROWS_OF_BACK = 8


class VocabularyHead:
    """Reads the vocabulary of an opened bundle.

    Args:
        blocks: of the bundle.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._bounds = blocks.chain.bounds
        self._shards = range(len(blocks.chain.blocks) - blocks.chain.head_start)

    def read(
        self,
        states: FloatArray,
        targets: IntArray,
        tangents: FloatArray | None = None,
        store: ActivationStore | None = None,
    ) -> TargetLogProbs:
        """What the head tells of targets.

        Args:
            states: f32 [targets, width] that each is read from.
            targets: tokens, i64 [targets].
            tangents: f32 [queries, targets, width] of the states.
            store: has room for the residuals of some shards, if there is a backward pass.
        """
        queries = 0 if tangents is None else len(tangents)
        reading = TargetLogProbs(targets, self._blocks.chain.shard_size, queries)
        for shard in self._shards:
            for mine in self._slices(len(targets), 1 + min(queries, self._bounds.queries)):
                moved = [
                    at_least_two(tangents[some, mine], 1)[:, None]
                    for some in slices(queries, self._bounds.queries)
                    if tangents is not None
                ]
                into = residual_outputs(self._residuals(shard, store), mine.start)
                within = reading.local_targets(shard, mine)[0]
                ask = partial(self._parts, shard, states[mine], within, moved, into)
                reading.add(shard, mine, *reading.compute_shifted(mine, ask))
        return reading

    def backward(
        self,
        states: FloatArray,
        reading: TargetLogProbs,
        slopes: FloatArray,
        store: ActivationStore | None = None,
    ) -> FloatArray:
        """Slope of the states f32 [targets, width], from that of each target's log-probability."""
        result = np.zeros_like(states)
        for shard in self._shards:
            residuals = self._residuals(shard, store)
            role = BACKWARD_SAVED if residuals else BACKWARD
            for mine in self._slices(len(states), _ROWS_OF_BACK):
                targets, has = reading.local_targets(shard, mine)
                # With the logarithm of the whole sum as the shift, the sum of exponentials is 1.
                slope = np.stack([slopes[mine] * has, -slopes[mine]], -1)
                shift = reading.log_total[mine].astype(np.float32)
                more = {
                    "grad_parts": slope,
                    **{name: array[0] for name, array in residual_values(residuals, mine).items()},
                }
                result[mine] += self._run(shard, role, states[mine], targets, shift, more)[
                    "grad_hidden_states"
                ]
        return result

    def _residuals(self, shard: int, store: ActivationStore | None) -> Residuals:
        return store.residuals(self._blocks.chain.head_start + shard) if store else {}

    def _parts(
        self,
        shard: int,
        state: FloatArray,
        targets: IntArray,
        moved: Sequence[FloatArray],
        into: Mapping[str, Array],
        shift: FloatArray,
    ) -> tuple[FloatArray, FloatArray | None]:
        """What a shard answers of states, and of their tangents, some queries after the others."""
        if not moved:
            role = FORWARD_SAVE if into else FORWARD
            return self._run(shard, role, state, targets, shift, into=into)["parts"], None
        found = [
            self._run(shard, JVP, state, targets, shift, {"tangent_hidden_states": some}) for some in moved
        ]
        return found[0]["parts"], np.concatenate([answer["tangent_parts"] for answer in found])

    def _run(
        self,
        shard: int,
        role: str,
        state: FloatArray,
        targets: IntArray,
        shift: FloatArray,
        more: Mapping[str, Array] = MappingProxyType({}),
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Answers [..., questions, numbers] of a shard, for questions [questions]; but for those that go
        `into` memory."""
        given = {
            "hidden_states": at_least_two(state)[None],
            "targets": at_least_two(targets)[None],
            "shift": at_least_two(shift)[None, :, None],
        }
        given |= {
            name: array if name == "tangent_hidden_states" else at_least_two(array)[None]
            for name, array in more.items()
        }
        found = self._blocks.run(self._blocks.chain.head_start + shard, role, given, into)
        answered = {name: array for name, array in found.items() if name not in into}
        answers = {name: array[..., 0, : len(targets), :].copy() for name, array in answered.items()}
        for array in answered.values():
            self._blocks.release(array)
        return answers

    def _slices(self, count: int, rows: int = 1) -> Iterator[slice]:
        """Questions of a call, fewer at once where each takes several rows of logits."""
        return slices(count, max(FEWEST_TOKENS, self._bounds.states // rows))
