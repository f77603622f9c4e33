"""A layer's experts on the engine: each gets its own tokens, and only those that are asked for are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_runner.engines.blocks import Blocks
from device_runner.engines.planning import at_least_two, slices
from prge.engine import Array, FloatArray
from prge.formats.signatures import BACKWARD, FORWARD, JVP


class Experts:
    """Runs the experts of the layers of an opened bundle.

    Args:
        blocks: of the bundle.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._most = blocks.chain.bounds.chunk

    def forward(
        self, first: int, states: Sequence[FloatArray], tangents: Sequence[FloatArray] = ()
    ) -> list[FloatArray]:
        """States behind the experts of a layer, of several calls, and their tangents.

        Args:
            first: number of the layer's first expert.
            states: f32 [..., tokens, width] before them.
            tangents: f32 [queries, ..., tokens, width] of each, if any.

        Raises:
            RuntimeError: the engine failed, or a state asks for an expert that isn't there.
        """

        def run(expert: int, state: FloatArray, *d_state: FloatArray) -> list[FloatArray]:
            if not d_state:
                return self._run(
                    first + expert, FORWARD, {"hidden_states": state[None, None]}, "hidden_states"
                )
            given = {"hidden_states": state[None], "tangent_hidden_states": d_state[0][:, None]}
            return self._run(first + expert, JVP, given, "hidden_states", "tangent_hidden_states")

        flat = [_joined(states), *([_joined(tangents, 1)] if tangents else [])]
        found = self._blocks.routing(first).forward(flat[0], run, *flat[1:])
        return _parted(found[0], states) + (_parted(found[1], tangents, 1) if tangents else [])

    def backward(
        self, first: int, states: Sequence[FloatArray], slopes: Sequence[FloatArray]
    ) -> list[FloatArray]:
        """Slopes of the states before the experts of a layer, from those behind.

        Args:
            first: number of the layer's first expert.
            states: f32 [..., tokens, width] before them; what passes by may be left out.
            slopes: f32 [..., tokens, width] by the states behind.

        Raises:
            RuntimeError: as of `forward`.
        """

        def run(expert: int, state: FloatArray, slope: FloatArray) -> list[FloatArray]:
            return self._run(
                first + expert,
                BACKWARD,
                {"hidden_states": state[None], "grad_hidden_states": slope[None]},
                "grad_hidden_states",
            )

        found = self._blocks.routing(first).backward(_joined(states), _joined(slopes), run)
        return _parted(found, states)

    def _run(self, number: int, role: str, given: dict[str, Array], *names: str) -> list[FloatArray]:
        """What an expert answers of some tokens, [..., tokens, numbers] each without axes of 1."""
        count = given["hidden_states"].shape[-2]
        found: list[list[FloatArray]] = [[] for _ in names]
        for some in slices(count, self._most):
            inputs = {name: at_least_two(array[..., some, :], -2) for name, array in given.items()}
            ones = np.ones((1, inputs["hidden_states"].shape[-2], 1), np.float32)
            answers = self._blocks.run(number, role, {**inputs, "ones": ones})
            for parts, name in zip(found, names, strict=True):
                told = answers[name][..., 0, : some.stop - some.start, :]
                parts.append(told.copy())
                self._blocks.release(answers[name])
        return [np.concatenate(parts, -2) for parts in found]


def _joined(arrays: Sequence[FloatArray], lead: int = 0) -> FloatArray:
    """Tokens of several calls one after the other, behind so many axes."""
    flat = [array.reshape(*array.shape[:lead], -1, array.shape[-1]) for array in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, -2)


def _parted(joined: FloatArray, like: Sequence[FloatArray], lead: int = 0) -> list[FloatArray]:
    """Tokens of several calls as these have them."""
    found, start = [], 0
    for array in like:
        shape = array.shape[:-1]
        end = start + int(np.prod(shape[lead:]))
        part = joined[..., start:end, :].reshape(*shape, joined.shape[-1])
        found.append(np.ascontiguousarray(part))
        start = end
    return found
