"""Values that one block computes and several other blocks read, for rows that pass the blocks together.

forward    the block that computes a value outputs it; its consumers take it as an input
backward   consumers return gradients of their inputs; the producer receives their sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prge.engine import Array, FloatArray
from prge.formats.chain import SHARED_IN, SHARED_OUT, Chain

Arrays = dict[str, Array]
_TANGENT, _GRAD = "tangent_", "grad_"


@dataclass
class SharedValues:
    """Shared values by their numbers in the chain, in the shape of the hidden states.

    Attributes:
        chain: the chain.
        values: the values.
        tangents: tangents of the values, with a leading axis of queries.
        gradients: sums of the consumers' gradients.
    """

    chain: Chain
    values: dict[int, FloatArray] = field(default_factory=dict)
    tangents: dict[int, FloatArray] = field(default_factory=dict)
    gradients: dict[int, FloatArray] = field(default_factory=dict)

    def inputs(self, number: int) -> Arrays:
        """Return a block's shared inputs and the gradients of its shared outputs, by its programs' names."""
        inputs: Arrays = {}
        for index, value in enumerate(self.chain.blocks[number].shared_in):
            inputs[f"{SHARED_IN}{index}"] = self.values[value]
            if value in self.tangents:
                inputs[f"{_TANGENT}{SHARED_IN}{index}"] = self.tangents[value]
        for index, value in enumerate(self.chain.shared_out(number)):
            if value in self.gradients:
                inputs[f"{_GRAD}{SHARED_OUT}{index}"] = self.gradients[value]
        return inputs

    def take(self, number: int, outputs: Arrays) -> None:
        """Take a block's shared values, tangents and gradients out of its outputs."""
        for index, value in enumerate(self.chain.shared_out(number)):
            for name, store in (
                (f"{SHARED_OUT}{index}", self.values),
                (f"{_TANGENT}{SHARED_OUT}{index}", self.tangents),
            ):
                if name in outputs:
                    store[value] = outputs.pop(name)
        for index, value in enumerate(self.chain.blocks[number].shared_in):
            gradient = outputs.pop(f"{_GRAD}{SHARED_IN}{index}", None)
            if gradient is not None:
                self.gradients[value] = (
                    self.gradients[value] + gradient if value in self.gradients else gradient.copy()
                )

    def release_unused(self, number: int, release: Callable[[Array], object]) -> None:
        """Release values that no later block reads, in a call without a backward pass."""
        if self.values:
            needed = {*self.chain.shared_inputs_from(number + 1)}
            for store in (self.values, self.tangents):
                for value in store.keys() - needed:
                    release(store.pop(value))

    def of_one_copy(self) -> SharedValues:
        """Return these shared values without the axis of copies."""
        return SharedValues(self.chain, {value: array[0] for value, array in self.values.items()})


def concatenated(state: FloatArray, shared_values: Sequence[FloatArray]) -> FloatArray:
    """Concatenate hidden states and shared values to one array, [..., width]."""
    return np.concatenate([state, *shared_values], -1) if shared_values else state


def split(combined: FloatArray, widths: Sequence[int]) -> list[FloatArray]:
    """Split the result of `concatenated` by the widths of the shared values, into contiguous arrays."""
    if not widths:
        return [combined]
    ends = np.cumsum([combined.shape[-1] - sum(widths), *widths])[:-1]
    return [np.ascontiguousarray(part) for part in np.split(combined, ends, -1)]
