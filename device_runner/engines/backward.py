"""The backward pass of a call through the blocks of a bundle, the last block first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np

from device_runner.engines.activations import ActivationStore, residual_values
from device_runner.engines.batch import Batch
from device_runner.engines.experts import Experts
from device_runner.engines.forward import Forward
from prge.engine import FloatArray
from prge.formats.adapter import adapter_size, views
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED


class Backward:
    """Computes the gradients of the blocks that a forward pass computed.

    Args:
        forward: forward pass of the call.
        store: activations that the forward pass saved.
    """

    def __init__(self, forward: Forward, store: ActivationStore) -> None:
        self._forward = forward
        self._chain = forward.chain
        self._blocks = forward.blocks
        self._store = store
        self.gradient: FloatArray = np.zeros(adapter_size(self._chain.modules), np.float32)
        self._gradients = views(self._chain.modules, self.gradient)

    def run_blocks(
        self, parts: Sequence[Batch], gradients: Sequence[FloatArray], numbers: range
    ) -> FloatArray:
        """Return the gradient of the adapter's values, f32 [size]; NaN if a gradient in between isn't finite.

        Args:
            parts: parts of the call with one copy of the adapter, as they left the last of the blocks.
            gradients: gradients of the loss with respect to their hidden states, [batch, tokens, width].
            numbers: numbers of the blocks.
        """
        parts = [
            part.of_one_copy({"grad_hidden_states": gradient})
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        is_finite = all(bool(np.isfinite(gradient).all()) for gradient in gradients)
        for group in reversed(self._chain.block_groups(numbers)):
            number = group.start
            if self._chain.is_expert(number):
                is_finite &= self._run_experts(number, parts)
            else:
                is_finite &= self._run_block(number, parts)
        if not is_finite:
            # A layer with int8 activations turns NaN into a number, which would hide the fault.
            self.gradient[:] = np.nan
        return self.gradient

    def _run_block(self, number: int, parts: Sequence[Batch]) -> bool:
        """Compute the gradients of all parts before a block; return whether they are finite.

        Gradients of single rows are added part by part and row by row. So the bits of a sum depend on the
        rows alone: shorter rows come first, rows of one padded length in the order of the call.
        """
        is_finite = True
        for index, part in enumerate(parts):
            residuals = self._store.residuals(number, index)
            role = BACKWARD_SAVED if residuals else BACKWARD
            with self._store.restore(index) as saved:
                part.values |= {**saved, "hidden_states": saved["hidden_states"][0]}
                outputs = self._forward.run(number, role, part, residual_values(residuals))
                part.shared.take(number, outputs)
                checked = (part.values["hidden_states"], outputs["grad_hidden_states"])
                is_finite &= all(bool(np.isfinite(array).all()) for array in checked)
                self._forward.release(part.values)
            part.values = {"grad_hidden_states": outputs["grad_hidden_states"]}
            for matrix, block_matrix in self._forward.matrices(number):
                row_gradients = outputs[block_matrix.gradient]
                for row_gradient in row_gradients:
                    self._gradients[matrix.name][...] += row_gradient
                self._blocks.release(row_gradients)
        return is_finite

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self._blocks)

    def _run_experts(self, number: int, parts: Sequence[Batch]) -> bool:
        """Compute the gradients of all parts before a layer's experts; return whether they are finite."""
        with ExitStack() as stack:
            saved = [stack.enter_context(self._store.restore(index)) for index in range(len(parts))]
            states = [arrays["hidden_states"][0] for arrays in saved]
            gradients = self._experts.backward(
                number, states, [part.values["grad_hidden_states"] for part in parts]
            )
            is_finite = all(bool(np.isfinite(array).all()) for array in (*states, *gradients))
        for part, gradient in zip(parts, gradients, strict=True):
            self._forward.release(part.values)
            part.values = {"grad_hidden_states": gradient}
        return is_finite
