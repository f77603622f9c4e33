"""Random directions of the adapter space from (seed, step, query) alone.

Counter-based: the Philox 4x64-10 generator (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") keyed by (seed, step) with the query in the counter. Nothing is stored and nothing is sequential:
any direction of a run can be made again from its journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prge.engine import FloatArray

Distribution = Literal["rademacher", "gaussian"]


def philox(seed: int, step: int, stream: int, count: int) -> NDArray[np.uint64]:
    """`count` random words of one stream, u64 [count]; numpy fixes raw generator output across versions."""
    key = np.array([seed, step], np.uint64)
    counter = np.array([0, 0, 0, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def rademacher(seed: int, step: int, query: int, size: int) -> FloatArray:
    """Independent signs, f32 [size] of -1 and 1: one random bit each, bit-identical on every machine."""
    words = philox(seed, step, query, -(-size // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=size, bitorder="little")
    signs = bits.astype(np.float32)
    signs *= 2
    signs -= 1
    return signs


def gaussian(seed: int, step: int, query: int, size: int) -> FloatArray:
    """Independent standard normals, f32 [size], by Box and Muller's transformation.

    The same on every numpy version; logarithm and cosine come from the machine's mathematics library,
    so machines may differ in the last bit.
    """
    half = -(-size // 2)
    words = philox(seed, step, query, 2 * half)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:half]))
    angle = 2.0 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size].astype(np.float32)


@dataclass(frozen=True)
class Directions:
    """The directions of one step, made when asked for."""

    distribution: Distribution
    seed: int
    step: int
    size: int

    def __call__(self, query: int) -> FloatArray:
        """Direction of one query, f32 [size]."""
        make = {"rademacher": rademacher, "gaussian": gaussian}[self.distribution]
        return make(self.seed, self.step, query, self.size)
