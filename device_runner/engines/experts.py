"""Experts of a layer on the engine: each computes its own tokens, and only experts with tokens are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_runner.engines.blocks import Blocks
from device_runner.engines.planning import at_least_two, slices
from prge.engine import Array, FloatArray
from prge.formats.signatures import BACKWARD, FORWARD, JVP


class Experts:
    """Runs the experts of an opened bundle's layers.

    Args:
        blocks: blocks of the bundle.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._most = blocks.chain.bounds.chunk

    def forward(
        self, first: int, states: Sequence[FloatArray], tangents: Sequence[FloatArray] = ()
    ) -> list[FloatArray]:
        """Compute the output hidden states of a layer's experts for several parts, and their tangents.

        Args:
            first: number of the layer's first expert.
            states: input hidden states f32 [..., tokens, width] of each part.
            tangents: tangents of the states, f32 [queries, ..., tokens, width]; may be empty.

        Raises:
            RuntimeError: the engine failed, or a token is routed to an expert that doesn't exist.
        """

        def run(expert: int, state: FloatArray, *tangent: FloatArray) -> list[FloatArray]:
            if not tangent:
                return self._run(
                    first + expert, FORWARD, {"hidden_states": state[None, None]}, "hidden_states"
                )
            inputs = {"hidden_states": state[None], "tangent_hidden_states": tangent[0][:, None]}
            return self._run(first + expert, JVP, inputs, "hidden_states", "tangent_hidden_states")

        flat = [_concatenated(states), *([_concatenated(tangents, 1)] if tangents else [])]
        outputs = self._blocks.routing(first).forward(flat[0], run, *flat[1:])
        return _split(outputs[0], states) + (_split(outputs[1], tangents, 1) if tangents else [])

    def backward(
        self, first: int, states: Sequence[FloatArray], gradients: Sequence[FloatArray]
    ) -> list[FloatArray]:
        """Compute the gradients of the input hidden states of a layer's experts from those of the outputs.

        Args:
            first: number of the layer's first expert.
            states: input hidden states f32 [..., tokens, width]; columns that bypass the experts may be left
                out.
            gradients: gradients f32 [..., tokens, width] of the output hidden states.

        Raises:
            RuntimeError: as in `forward`.
        """

        def run(expert: int, state: FloatArray, gradient: FloatArray) -> list[FloatArray]:
            return self._run(
                first + expert,
                BACKWARD,
                {"hidden_states": state[None], "grad_hidden_states": gradient[None]},
                "grad_hidden_states",
            )

        outputs = self._blocks.routing(first).backward(_concatenated(states), _concatenated(gradients), run)
        return _split(outputs, states)

    def _run(self, number: int, role: str, inputs: dict[str, Array], *names: str) -> list[FloatArray]:
        """Run an expert on tokens; return the named outputs [..., tokens, elements] without axes of 1."""
        count = inputs["hidden_states"].shape[-2]
        outputs: list[list[FloatArray]] = [[] for _ in names]
        for chunk in slices(count, self._most):
            padded = {name: at_least_two(array[..., chunk, :], -2) for name, array in inputs.items()}
            ones = np.ones((1, padded["hidden_states"].shape[-2], 1), np.float32)
            chunk_outputs = self._blocks.run(number, role, {**padded, "ones": ones})
            for parts, name in zip(outputs, names, strict=True):
                output = chunk_outputs[name][..., 0, : chunk.stop - chunk.start, :]
                parts.append(output.copy())
                self._blocks.release(chunk_outputs[name])
        return [np.concatenate(parts, -2) for parts in outputs]


def _concatenated(arrays: Sequence[FloatArray], lead: int = 0) -> FloatArray:
    """Concatenate the tokens of several parts after `lead` axes."""
    flat = [array.reshape(*array.shape[:lead], -1, array.shape[-1]) for array in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, -2)


def _split(whole: FloatArray, like: Sequence[FloatArray], lead: int = 0) -> list[FloatArray]:
    """Split concatenated tokens into arrays of the shapes of `like`."""
    parts, start = [], 0
    for array in like:
        shape = array.shape[:-1]
        end = start + int(np.prod(shape[lead:]))
        part = whole[..., start:end, :].reshape(*shape, whole.shape[-1])
        parts.append(np.ascontiguousarray(part))
        start = end
    return parts
