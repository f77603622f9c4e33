"""A decoder's head: log-probabilities at the targets of a call, one shard of the vocabulary after the other.

hidden states at the targets -> shard 0, shard 1, ... -> log-probabilities
gradients of log-probabilities -> shard 0, shard 1, ... -> gradients of hidden states
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
from prge.formats.chain import MIN_TOKENS
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, JVP
from prge.numerics.vocabulary_shards import TargetLogProbs

# Rows of logits that the backward pass holds per target: their gradients, split by magnitude, twice.
_BACKWARD_ROWS = 8


class VocabularyHead:
    """Computes the head of an opened bundle.

    Args:
        blocks: blocks of the bundle.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._bounds = blocks.chain.bounds
        self._shards = range(len(blocks.chain.blocks) - blocks.chain.head_start)

    def forward(
        self,
        states: FloatArray,
        targets: IntArray,
        tangents: FloatArray | None = None,
        store: ActivationStore | None = None,
    ) -> TargetLogProbs:
        """Compute the log-probabilities of targets, and their tangents.

        Args:
            states: hidden states f32 [targets, width] before each target.
            targets: target tokens, i64 [targets].
            tangents: f32 [queries, targets, width] of the hidden states.
            store: memory for the residuals of some shards, if there is a backward pass.
        """
        queries = 0 if tangents is None else len(tangents)
        log_probs = TargetLogProbs(targets, self._blocks.chain.shard_size, queries)
        for shard in self._shards:
            for target_slice in self._slices(len(targets), 1 + min(queries, self._bounds.queries)):
                tangent_groups = [
                    at_least_two(tangents[query_slice, target_slice], 1)[:, None]
                    for query_slice in slices(queries, self._bounds.queries)
                    if tangents is not None
                ]
                into = residual_outputs(self._residuals(shard, store), target_slice.start)
                local_targets = log_probs.local_targets(shard, target_slice)[0]
                compute_parts = partial(
                    self._parts, shard, states[target_slice], local_targets, tangent_groups, into
                )
                log_probs.add(shard, target_slice, *log_probs.compute_shifted(target_slice, compute_parts))
        return log_probs

    def backward(
        self,
        states: FloatArray,
        log_probs: TargetLogProbs,
        gradients: FloatArray,
        store: ActivationStore | None = None,
    ) -> FloatArray:
        """Compute the gradients of the hidden states f32 [targets, width] from those of log-probabilities."""
        result = np.zeros_like(states)
        for shard in self._shards:
            residuals = self._residuals(shard, store)
            role = BACKWARD_SAVED if residuals else BACKWARD
            for target_slice in self._slices(len(states), _BACKWARD_ROWS):
                targets, is_in_shard = log_probs.local_targets(shard, target_slice)
                # With the logarithm of the total as the shift, the exponentials sum to 1.
                grad_parts = np.stack([gradients[target_slice] * is_in_shard, -gradients[target_slice]], -1)
                shift = log_probs.log_total[target_slice].astype(np.float32)
                extra = {
                    "grad_parts": grad_parts,
                    **{name: array[0] for name, array in residual_values(residuals, target_slice).items()},
                }
                result[target_slice] += self._run(shard, role, states[target_slice], targets, shift, extra)[
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
        tangent_groups: Sequence[FloatArray],
        into: Mapping[str, Array],
        shift: FloatArray,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Compute a shard's part of log-probabilities, and of their tangents for some queries at a time."""
        if not tangent_groups:
            role = FORWARD_SAVE if into else FORWARD
            return self._run(shard, role, state, targets, shift, into=into)["parts"], None
        outputs = [
            self._run(shard, JVP, state, targets, shift, {"tangent_hidden_states": tangents})
            for tangents in tangent_groups
        ]
        return outputs[0]["parts"], np.concatenate([output["tangent_parts"] for output in outputs])

    def _run(
        self,
        shard: int,
        role: str,
        state: FloatArray,
        targets: IntArray,
        shift: FloatArray,
        extra: Mapping[str, Array] = MappingProxyType({}),
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Run a shard on targets; return the outputs [..., targets, elements] that aren't in `into`."""
        inputs = {
            "hidden_states": at_least_two(state)[None],
            "targets": at_least_two(targets)[None],
            "shift": at_least_two(shift)[None, :, None],
        }
        inputs |= {
            name: array if name == "tangent_hidden_states" else at_least_two(array)[None]
            for name, array in extra.items()
        }
        outputs = self._blocks.run(self._blocks.chain.head_start + shard, role, inputs, into)
        kept = {name: array for name, array in outputs.items() if name not in into}
        results = {name: array[..., 0, : len(targets), :].copy() for name, array in kept.items()}
        for array in kept.values():
            self._blocks.release(array)
        return results

    def _slices(self, count: int, rows: int = 1) -> Iterator[slice]:
        """Yield slices of targets for one call; fewer targets if each needs several rows of logits."""
        return slices(count, max(MIN_TOKENS, self._bounds.states // rows))
