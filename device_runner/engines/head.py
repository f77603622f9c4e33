"""A decoder's head: asked at the positions that a call asks, one piece of the vocabulary after the other.

states -> asked positions -> piece 0, piece 1, ... -> log-probabilities
their slopes -> piece 0, piece 1, ... -> slope of the states
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from device_runner.engines.activations import ActivationStore, Residuals, outputs_of, values_of
from device_runner.engines.blocks import Blocks
from device_runner.engines.planning import at_least_two, slices
from prge.engine import Array, FloatArray, IntArray
from prge.formats.chain import FEWEST_TOKENS
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, JVP
from prge.numerics.vocabulary_shards import Reading

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
        self._pieces = range(len(blocks.chain.blocks) - blocks.chain.end)

    def read(
        self,
        states: FloatArray,
        targets: IntArray,
        tangents: FloatArray | None = None,
        store: ActivationStore | None = None,
    ) -> Reading:
        """What the head tells of targets.

        Args:
            states: f32 [targets, width] that each is read from.
            targets: tokens, i64 [targets].
            tangents: f32 [queries, targets, width] of the states.
            store: has room for the residuals of some pieces, if there is a backward pass.
        """
        queries = 0 if tangents is None else len(tangents)
        reading = Reading(targets, self._blocks.chain.piece_words, queries)
        for piece in self._pieces:
            for mine in self._slices(len(targets), 1 + min(queries, self._bounds.queries)):
                moved = [
                    at_least_two(tangents[some, mine], 1)[:, None]
                    for some in slices(queries, self._bounds.queries)
                    if tangents is not None
                ]
                into = outputs_of(self._residuals(piece, store), mine.start)
                within = reading.within(piece, mine)[0]
                ask = partial(self._parts, piece, states[mine], within, moved, into)
                reading.add(piece, mine, *reading.ask(mine, ask))
        return reading

    def backward(
        self, states: FloatArray, reading: Reading, slopes: FloatArray, store: ActivationStore | None = None
    ) -> FloatArray:
        """Slope of the states f32 [targets, width], from that of each target's log-probability."""
        result = np.zeros_like(states)
        for piece in self._pieces:
            residuals = self._residuals(piece, store)
            role = BACKWARD_SAVED if residuals else BACKWARD
            for mine in self._slices(len(states), _ROWS_OF_BACK):
                targets, has = reading.within(piece, mine)
                # With the logarithm of the whole sum as the shift, the sum of exponentials is 1.
                slope = np.stack([slopes[mine] * has, -slopes[mine]], -1)
                shift = reading.log_total[mine].astype(np.float32)
                more = {
                    "grad_parts": slope,
                    **{name: array[0] for name, array in values_of(residuals, mine).items()},
                }
                result[mine] += self._run(piece, role, states[mine], targets, shift, more)[
                    "grad_hidden_states"
                ]
        return result

    def _residuals(self, piece: int, store: ActivationStore | None) -> Residuals:
        return store.residuals(self._blocks.chain.end + piece) if store else {}

    def _parts(
        self,
        piece: int,
        state: FloatArray,
        targets: IntArray,
        moved: Sequence[FloatArray],
        into: Mapping[str, Array],
        shift: FloatArray,
    ) -> tuple[FloatArray, FloatArray | None]:
        """What a piece answers of states, and of their tangents, some queries after the others."""
        if not moved:
            role = FORWARD_SAVE if into else FORWARD
            return self._run(piece, role, state, targets, shift, into=into)["parts"], None
        found = [
            self._run(piece, JVP, state, targets, shift, {"tangent_hidden_states": some}) for some in moved
        ]
        return found[0]["parts"], np.concatenate([answer["tangent_parts"] for answer in found])

    def _run(
        self,
        piece: int,
        role: str,
        state: FloatArray,
        targets: IntArray,
        shift: FloatArray,
        more: Mapping[str, Array] = MappingProxyType({}),
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Answers [..., questions, numbers] of a piece, for questions [questions]; but for those that go
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
        found = self._blocks.run(self._blocks.chain.end + piece, role, given, into)
        answered = {name: array for name, array in found.items() if name not in into}
        answers = {name: array[..., 0, : len(targets), :].copy() for name, array in answered.items()}
        for array in answered.values():
            self._blocks.release(array)
        return answers

    def _slices(self, count: int, rows: int = 1) -> Iterator[slice]:
        """Questions of a call, fewer at once where each takes several rows of logits."""
        return slices(count, max(FEWEST_TOKENS, self._bounds.states // rows))
