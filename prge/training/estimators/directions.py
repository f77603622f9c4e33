"""Random directions of the adapter space from (seed, step, query) alone.

Counter-based: the Philox 4x64-10 generator (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") keyed by (seed, step) with the query in the counter. Nothing is stored and nothing is sequential:
any direction of a run can be made again from its journal.

    DirectionSampler          one direction a query, a sign for every value of the adapter
    RankOneDirections   one direction a query and example, a product u v^T of signs in every matrix
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


@dataclass(frozen=True)
class DirectionSampler:
    """The directions of one step, made when asked for."""

    seed: int
    step: int
    size: int

    def __call__(self, query: int) -> FloatArray:
        """Direction of one query, f32 [size]."""
        return rademacher(self.seed, self.step, query, self.size)


@dataclass(frozen=True)
class RankOneDirections:
    """The directions of one step that are a product u v^T in every matrix, made when asked for.

    The signs of a query are one stream, example after example, so an example's don't depend on how many
    follow it. `shared`: all examples of a query have the same direction.
    """

    seed: int
    step: int
    queries: int
    examples: int
    modules: tuple[AdaptedModule, ...]
    shared: bool = False

    def __call__(self, query: int, example: int = 0) -> FloatArray:
        """Direction of one query and example, f32 [size of the adapter]."""
        products = [np.outer(u[query, example], v[query, example]) for matrix, u, v in self.factors()]
        return np.concatenate([product.ravel() for product in products]).astype(np.float32)

    def factors(self) -> Iterator[tuple[Matrix, SignArray, SignArray]]:
        """Every matrix with the signs of its u [queries, examples, rank] and v [queries, examples, width]."""
        return self._cut(self._signs)

    def of(self, owner: IntArray) -> dict[str, FloatArray]:
        """The factors of sequences' directions, f32 [queries, sequences, width] by name.

        Args:
            owner: i64 [sequences], the example that each belongs to.
        """
        found = {}
        for matrix, u, v in self.factors():
            found[matrix.u] = u[:, owner].astype(np.float32)
            found[matrix.v] = v[:, owner].astype(np.float32)
        return found

    def gradient(self, scalars: Float64Array) -> FloatArray:
        """Mean of scalar * u v^T over queries and examples, f32 [size of the adapter].

        The same bits on every machine: signs times scalars on one grid have exact sums in any order.

        Args:
            scalars: f64 [queries, examples]; `truncate_to_grid` is applied to them.
        """
        scalars = truncate_to_grid(scalars)
        means = []
        for matrix, u, v in self.factors():
            left = (u * scalars[..., None]).reshape(-1, matrix.rank)
            total = left.T @ v.reshape(-1, v.shape[-1]).astype(np.float64)
            # Adding 0 makes -0 and 0, which depend on the order, one number.
            mean = (total + 0.0) / scalars.size
            means.append(mean.astype(np.float32).ravel())
        return np.concatenate(means)

    def _cut(self, signs: SignArray) -> Iterator[tuple[Matrix, SignArray, SignArray]]:
        """Every matrix with the signs of its u and v in rows of all matrices' signs."""
        start = 0
        for matrix in matrices(self.modules):
            middle = start + matrix.rank
            end = middle + matrix.width
            yield matrix, signs[..., start:middle], signs[..., middle:end]
            start = end

    @cached_property
    def _signs(self) -> SignArray:
        width = sum(matrix.rank + matrix.width for matrix in matrices(self.modules))
        count = 1 if self.shared else self.examples
        signs = np.empty((self.queries, count, width), np.int8)
        for query in range(self.queries):
            signs[query] = rademacher(self.seed, self.step, query, count * width).reshape(count, width)
        return np.broadcast_to(signs, (self.queries, self.examples, width))


def truncate_to_grid(scalars: Float64Array, axis: int | None = None) -> Float64Array:
    """Scalars cut to multiples of one power of two, at most 2^30 of them; what is not finite stays.

    With an `axis`, one power for each place beside it, so that what is said of one depends on no other.

    Sums of up to 2^23 such numbers, with any signs, are exact in float64. They are cut towards zero, which
    leaves the largest one its exponent: doing it twice changes nothing.
    """
    largest = np.abs(scalars).max(axis, initial=0.0, keepdims=True)
    finite = np.isfinite(largest)
    exponent = np.frexp(np.where(finite, largest, 0.0))[1] - GRID_BITS
    with np.errstate(over="ignore"):
        cut: Float64Array = np.ldexp(np.trunc(np.ldexp(scalars, -exponent)), exponent)
    return np.where(finite, cut, scalars)
