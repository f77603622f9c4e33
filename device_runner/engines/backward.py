"""The backward pass of a call's parts through the blocks of a bundle, the last block first."""

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
    """Goes back through the blocks that a forward pass went through.

    Args:
        forward: of the call.
        store: has what the forward pass kept.
    """

    def __init__(self, forward: Forward, store: ActivationStore) -> None:
        self._forward = forward
        self._chain = forward.chain
        self._blocks = forward.blocks
        self._store = store
        self.gradient: FloatArray = np.zeros(adapter_size(self._chain.modules), np.float32)
        self._gradients = views(self._chain.modules, self.gradient)

    def through(self, parts: Sequence[Batch], slopes: Sequence[FloatArray], numbers: range) -> FloatArray:
        """The gradient by the adapter's values, f32 [size]; NaN where something on the way isn't finite.

        Args:
            parts: of one copy, as they left the last of the blocks.
            slopes: of the loss by their states, [batch, tokens, width].
            numbers: of the blocks.
        """
        parts = [
            part.of_one_copy({"grad_hidden_states": slope}) for part, slope in zip(parts, slopes, strict=True)
        ]
        is_finite = all(bool(np.isfinite(slope).all()) for slope in slopes)
        for experts in reversed(self._chain.block_groups(numbers)):
            number = experts.start
            if self._chain.is_expert(number):
                is_finite &= self._through_experts(number, parts)
            else:
                is_finite &= self._through_block(number, parts)
        if not is_finite:
            # A layer that rounds to int8 makes a number of what is none: nobody would see it in the gradient.
            self.gradient[:] = np.nan
        return self.gradient

    def _through_block(self, number: int, parts: Sequence[Batch]) -> bool:
        """The slopes of all parts before a block; whether they are finite.

        Gradients of single rows are added up part by part and row by row. So a sum's bits depend on nothing
        but the rows: shorter ones come first, those of one padded length in the order of the call.
        """
        is_finite = True
        for index, part in enumerate(parts):
            residuals = self._store.residuals(number, index)
            role = BACKWARD_SAVED if residuals else BACKWARD
            with self._store.restore(index) as kept:
                part.values |= {**kept, "hidden_states": kept["hidden_states"][0]}
                found = self._forward.run(number, role, part, residual_values(residuals))
                part.shared.take(number, found)
                passed = (part.values["hidden_states"], found["grad_hidden_states"])
                is_finite &= all(bool(np.isfinite(array).all()) for array in passed)
                self._forward.release(part.values)
            part.values = {"grad_hidden_states": found["grad_hidden_states"]}
            for ours, its in self._forward.matrices(number):
                of_rows = found[its.gradient]
                for of_row in of_rows:
                    self._gradients[ours.name][...] += of_row
                self._blocks.release(of_rows)
        return is_finite

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self._blocks)

    def _through_experts(self, number: int, parts: Sequence[Batch]) -> bool:
        """The slopes of all parts before the experts of a layer; whether what it read is finite."""
        with ExitStack() as stack:
            kept = [stack.enter_context(self._store.restore(index)) for index in range(len(parts))]
            states = [arrays["hidden_states"][0] for arrays in kept]
            slopes = self._experts.backward(
                number, states, [part.values["grad_hidden_states"] for part in parts]
            )
            is_finite = all(bool(np.isfinite(array).all()) for array in (*states, *slopes))
        for part, slope in zip(parts, slopes, strict=True):
            self._forward.release(part.values)
            part.values = {"grad_hidden_states": slope}
        return is_finite
