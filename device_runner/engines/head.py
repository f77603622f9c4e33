"""A decoder's head: asked at the positions that a call asks, one piece of the vocabulary after the other.

states -> asked positions -> piece 0, piece 1, ... -> log-probabilities
their slopes -> piece 0, piece 1, ... -> slope of the states
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from device_runner.engines.blocks import Blocks
from prge.engine import Array, FloatArray, IntArray
from prge.files.chain import FEWEST_TOKENS
from prge.files.signatures import BACK, STACK, TANGENT
from prge.learning.vocabulary import Reading


class Asked:
    """The different questions of a call: row, position, target. Padding asks the same one again and again.

    Args:
        positions, targets: i64 [rows, positions].
        length: tokens of a row of states.
    """

    def __init__(self, positions: IntArray, targets: IntArray, length: int) -> None:
        places = (np.arange(len(positions)) * length)[:, None] + positions
        self._shape = positions.shape
        most = int(targets.max()) + 1
        keys, self._inverse = np.unique(places * most + targets, return_inverse=True)
        self._inverse = self._inverse.reshape(-1)
        self._places, self.targets = keys // most, keys % most
        self.count = len(keys)

    def states(self, states: FloatArray, mine: slice) -> FloatArray:
        """Picked states [1, n, width] of states [rows, tokens, width]."""
        return states.reshape(-1, states.shape[-1])[_enough(self._places[mine])][None]

    def told(self, answers: FloatArray) -> FloatArray:
        """Answers [..., questions] as the call asked, [..., rows, positions]."""
        return answers[..., self._inverse].reshape(*answers.shape[:-1], *self._shape)

    def gathered(self, slopes: FloatArray) -> FloatArray:
        """Slopes [rows, positions] of each question, [questions]."""
        return np.bincount(self._inverse, slopes.ravel(), self.count).astype(np.float32)

    def add(self, states: FloatArray, picked: FloatArray, mine: slice) -> None:
        """Add what is meant for picked states at their places."""
        np.add.at(states.reshape(-1, states.shape[-1]), self._places[mine], picked)


class VocabularyHead:
    """Reads the vocabulary of an opened bundle.

    Args:
        blocks: of the bundle.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._bounds = blocks.chain.bounds
        self._pieces = range(len(blocks.chain.blocks) - blocks.chain.end)

    def read(self, asked: Asked, states: FloatArray, tangents: FloatArray | None = None) -> Reading:
        """What the head tells of the questions.

        Args:
            asked: the questions.
            states: f32 [rows, tokens, width].
            tangents: f32 [queries, rows, tokens, width] of these.
        """
        queries = 0 if tangents is None else len(tangents)
        reading = Reading(asked.targets, self._blocks.chain.piece_words, queries)
        for piece in self._pieces:
            for mine in self._slices(asked.count, 1 + min(queries, self._bounds.queries)):
                state = asked.states(states, mine)
                targets = reading.within(piece, mine)[0]
                moved = [
                    np.stack([asked.states(tangent, mine) for tangent in tangents[some]])
                    for some in slices(queries, self._bounds.queries)
                    if tangents is not None
                ]
                ask = partial(self._parts, piece, state, targets, moved)
                reading.add(piece, mine, *reading.ask(mine, ask))
        return reading

    def back(self, asked: Asked, states: FloatArray, reading: Reading, slopes: FloatArray) -> FloatArray:
        """Slope of the states f32 [rows, tokens, width], from that of each question's log-probability."""
        result = np.zeros_like(states)
        for piece in self._pieces:
            for mine in self._slices(asked.count, 2):
                targets, has = reading.within(piece, mine)
                # With the logarithm of the whole sum as the shift, the sum of exponentials is 1.
                slope = np.stack([slopes[mine] * has, -slopes[mine]], -1)
                shift = reading.log_total[mine].astype(np.float32)
                found = self._run(piece, BACK, asked.states(states, mine), targets, shift, slope=slope)
                asked.add(result, found["slope"], mine)
        return result

    def _parts(
        self, piece: int, state: FloatArray, targets: IntArray, moved: Sequence[FloatArray], shift: FloatArray
    ) -> tuple[FloatArray, FloatArray | None]:
        """What a piece answers of states, and of their tangents, some queries after the others."""
        if not moved:
            return self._run(piece, STACK, state, targets, shift)["parts"], None
        found = [self._run(piece, TANGENT, state, targets, shift, d_state=some) for some in moved]
        return found[0]["parts"], np.concatenate([answer["d_parts"] for answer in found])

    def _run(
        self, piece: int, role: str, state: FloatArray, targets: IntArray, shift: FloatArray, **more: Array
    ) -> dict[str, Array]:
        """Answers [..., questions, numbers] of a piece, for questions [questions]."""
        given = {"state": state, "targets": _enough(targets)[None], "shift": _enough(shift)[None, :, None]}
        if "slope" in more:
            more["slope"] = _enough(more["slope"])[None]
        found = self._blocks.run(self._blocks.chain.end + piece, role, {**given, **more})
        answers = {name: array[..., 0, : len(targets), :].copy() for name, array in found.items()}
        for array in found.values():
            self._blocks.release(array)
        return answers

    def _slices(self, count: int, rows: int = 1) -> Iterator[slice]:
        """Questions of a call, fewer at once where each takes several rows of logits."""
        return slices(count, max(FEWEST_TOKENS, self._bounds.states // rows))


def slices(count: int, most: int) -> Iterator[slice]:
    """0 to `count` in as few pieces of at most `most` as there can be, of about one size."""
    pieces = -(-count // most)
    for piece in range(pieces):
        yield slice(piece * count // pieces, (piece + 1) * count // pieces)


def _enough(numbers: Array) -> Array:
    """At least as many as a program takes; what is added repeats the last."""
    return np.concatenate([numbers, numbers[-1:]]) if len(numbers) < FEWEST_TOKENS else numbers
