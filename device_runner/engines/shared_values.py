"""Values that one block makes and several others read, of rows that pass the blocks together.

forward    the block that makes a value gives it, those that read it take it
back       each of these says what it takes has for a slope; the block that made it gets their sum
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
    """The values by their numbers in the chain, in the shape of the state; tangents have queries in front."""

    chain: Chain
    values: dict[int, FloatArray] = field(default_factory=dict)
    tangents: dict[int, FloatArray] = field(default_factory=dict)
    gradients: dict[int, FloatArray] = field(default_factory=dict)

    def inputs(self, number: int) -> Arrays:
        """What a block may be given of them, by its programs' names."""
        found: Arrays = {}
        for place, value in enumerate(self.chain.blocks[number].shared_in):
            found[f"{SHARED_IN}{place}"] = self.values[value]
            if value in self.tangents:
                found[f"{_TANGENT}{SHARED_IN}{place}"] = self.tangents[value]
        for place, value in enumerate(self.chain.shared_out(number)):
            if value in self.gradients:
                found[f"{_GRAD}{SHARED_OUT}{place}"] = self.gradients[value]
        return found

    def take(self, number: int, found: Arrays) -> None:
        """Take what a block answered of them out of its answers."""
        for place, value in enumerate(self.chain.shared_out(number)):
            for name, kept in (
                (f"{SHARED_OUT}{place}", self.values),
                (f"{_TANGENT}{SHARED_OUT}{place}", self.tangents),
            ):
                if name in found:
                    kept[value] = found.pop(name)
        for place, value in enumerate(self.chain.blocks[number].shared_in):
            slope = found.pop(f"{_GRAD}{SHARED_IN}{place}", None)
            if slope is not None:
                self.gradients[value] = (
                    self.gradients[value] + slope if value in self.gradients else slope.copy()
                )

    def release_unused(self, number: int, release: Callable[[Array], object]) -> None:
        """Let go of what no block behind this one reads, on a way that isn't gone back."""
        if self.values:
            needed = {*self.chain.shared_inputs_from(number + 1)}
            for kept in (self.values, self.tangents):
                for value in kept.keys() - needed:
                    release(kept.pop(value))

    def of_one_copy(self) -> SharedValues:
        """The same without the axis of copies."""
        return SharedValues(self.chain, {value: array[0] for value, array in self.values.items()})


def concatenated(state: FloatArray, more: Sequence[FloatArray]) -> FloatArray:
    """A state and shared values in one array, [..., width]."""
    return np.concatenate([state, *more], -1) if more else state


def split(whole: FloatArray, widths: Sequence[int]) -> list[FloatArray]:
    """What `beside` was given, by the widths of the values; each in memory of its own."""
    if not widths:
        return [whole]
    ends = np.cumsum([whole.shape[-1] - sum(widths), *widths])[:-1]
    return [np.ascontiguousarray(part) for part in np.split(whole, ends, -1)]
