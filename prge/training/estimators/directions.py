"""Random directions in the space of adapter values, computed from (seed, step, query) alone.

The generator is counter-based: Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3") with the key (seed, step) and the query in the counter. No direction is stored or depends on an earlier
one, so every direction of a run can be computed again from its journal.

    DirectionSampler    one direction per query: a random sign for every value of the adapter
    RankOneDirections   one direction per query and example: in every matrix an outer product u v^T of signs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prge.engine import Float64Array, FloatArray, IntArray
from prge.model_spec import AdaptedModule, Matrix, matrices

SignArray = NDArray[np.int8]

GRID_BITS = 30


def philox(seed: int, step: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit integers of one stream, u64 [count].

    numpy guarantees that the raw output of a bit generator is the same in all of its versions.
    """
    key = np.array([seed, step], np.uint64)
    counter = np.array([0, 0, 0, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def rademacher(seed: int, step: int, query: int, size: int) -> FloatArray:
    """Return independent random signs, f32 [size] of -1 and 1, the same on every machine."""
    integers = philox(seed, step, query, -(-size // 64)).astype("<u8")
    bits = np.unpackbits(integers.view(np.uint8), count=size, bitorder="little")
    signs = bits.astype(np.float32)
    signs *= 2
    signs -= 1
    return signs


@dataclass(frozen=True)
class DirectionSampler:
    """The directions of one step: a random sign for each of the adapter's `size` values."""

    seed: int
    step: int
    size: int

    def __call__(self, query: int) -> FloatArray:
        """Return the direction of one query as a new array, f32 [size]."""
        return rademacher(self.seed, self.step, query, self.size)


@dataclass(frozen=True)
class RankOneDirections:
    """The rank-one directions of one step: in every matrix an outer product u v^T of random signs.

    The signs of a query are one random stream, example after example, so the signs of an example don't depend
    on the examples after it.

    Attributes:
        seed: the seed of the run.
        step: number of the step.
        queries: number of directions.
        examples: number of examples of the step.
        modules: the adapted layers.
        shared: whether all examples have the same direction in a query.
    """

    seed: int
    step: int
    queries: int
    examples: int
    modules: tuple[AdaptedModule, ...]
    shared: bool = False

    def __call__(self, query: int, example: int = 0) -> FloatArray:
        """Return the direction of one query and example, f32 [size of the adapter]."""
        products = [np.outer(u[query, example], v[query, example]) for matrix, u, v in self.factors()]
        return np.concatenate([product.ravel() for product in products]).astype(np.float32)

    def factors(self) -> Iterator[tuple[Matrix, SignArray, SignArray]]:
        """Yield each trained matrix with u [queries, examples, rank] and v [queries, examples, width]."""
        return self._split_signs(self._signs)

    def for_sequences(self, owner: IntArray) -> dict[str, FloatArray]:
        """Return the factors u and v for the sequences of a call, by the names of `prge.engine.Directions`.

        Args:
            owner: index of the example that each sequence belongs to, i64 [sequences].

        Returns:
            Arrays f32 [queries, sequences, rank] (u) and [queries, sequences, width] (v).
        """
        factors = {}
        for matrix, u, v in self.factors():
            factors[matrix.u] = u[:, owner].astype(np.float32)
            factors[matrix.v] = v[:, owner].astype(np.float32)
        return factors

    def gradient(self, projected_gradients: Float64Array) -> FloatArray:
        """Return the mean of projected_gradient * u v^T over queries and examples, f32 [adapter size].

        The result has the same bits on every machine: multiples of one power of two have exact sums in any
        order.

        Args:
            projected_gradients: f64 [queries, examples]; this method applies `truncate_to_grid` to them.
        """
        projected_gradients = truncate_to_grid(projected_gradients)
        means = []
        for matrix, u, v in self.factors():
            weighted_u = (u * projected_gradients[..., None]).reshape(-1, matrix.rank)
            total = weighted_u.T @ v.reshape(-1, v.shape[-1]).astype(np.float64)
            # Adding 0 turns -0, which depends on the order of the sum, into 0.
            mean = (total + 0.0) / projected_gradients.size
            means.append(mean.astype(np.float32).ravel())
        return np.concatenate(means)

    def _split_signs(self, signs: SignArray) -> Iterator[tuple[Matrix, SignArray, SignArray]]:
        """Yield every matrix with its slices u and v of the last axis of `signs`."""
        u_start = 0
        for matrix in matrices(self.modules):
            v_start = u_start + matrix.rank
            v_end = v_start + matrix.width
            yield matrix, signs[..., u_start:v_start], signs[..., v_start:v_end]
            u_start = v_end

    @cached_property
    def _signs(self) -> SignArray:
        width = sum(matrix.rank + matrix.width for matrix in matrices(self.modules))
        count = 1 if self.shared else self.examples
        signs = np.empty((self.queries, count, width), np.int8)
        for query in range(self.queries):
            signs[query] = rademacher(self.seed, self.step, query, count * width).reshape(count, width)
        return np.broadcast_to(signs, (self.queries, self.examples, width))


def truncate_to_grid(values: Float64Array, axis: int | None = None) -> Float64Array:
    """Return values truncated to multiples of a power of two, of which none is larger than 2^30 multiples.

    Sums of up to 2^23 such values are exact in float64, whatever their signs and order. Values are rounded
    towards zero, which keeps the exponent of the largest one: truncating twice changes nothing.

    Args:
        values: f64 of any shape; values that are not finite stay as they are.
        axis: axis along which values share a power of two; None: all values share one.
    """
    largest = np.abs(values).max(axis, initial=0.0, keepdims=True)
    finite = np.isfinite(largest)
    exponent = np.frexp(np.where(finite, largest, 0.0))[1] - GRID_BITS
    with np.errstate(over="ignore"):
        truncated: Float64Array = np.ldexp(np.trunc(np.ldexp(values, -exponent)), exponent)
    return np.where(finite, truncated, values)
