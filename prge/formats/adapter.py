"""The trained adapter: the matrices of all modules in one vector, and views of them.

values  [ module 0: rank x in | rank x out | module 1: ... ]    one float32 vector, in the model's order
views   {"lora_b.<module>": [rank, out], ...}                   views of this vector

LoRA-FA has no part `rank x in`: its `lora_a` are constants of the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.engine import FloatArray
from prge.model_spec import AdaptedModule, matrices


class Adapter:
    """The trained matrices of all modules in one float32 vector.

    Attributes:
        modules: the adapted layers, which determine the layout of the vector.
        values: the vector, f32 [size].
        lora_a: f32 [rank, in] by module name, as the bundle's programs take it; None if it is the bundle's
            own and frozen. A LoRA-FA adapter with another `lora_a` can generate text, but can't be trained or
            scored.
        lora_b: views of `values`, f32 [rank, out], by module name; writing to a view changes `values`.

    Raises:
        ValueError: `values` is not a contiguous float32 vector of the modules' total size.
    """

    def __init__(
        self,
        modules: Sequence[AdaptedModule],
        values: FloatArray,
        lora_a: Mapping[str, FloatArray] | None = None,
    ) -> None:
        self.modules = tuple(modules)
        size = adapter_size(modules)
        if values.shape != (size,) or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise ValueError(f"values is {values.dtype} {values.shape}, must be contiguous float32 ({size},)")
        self.values = values
        self._matrices = views(self.modules, values)
        self.lora_a = self._by_module("a") or lora_a
        self.lora_b = self._by_module("b")

    @classmethod
    def zeros(cls, modules: Sequence[AdaptedModule]) -> Adapter:
        """Return an adapter of zeros, which doesn't change the model's outputs."""
        return cls(modules, np.zeros(adapter_size(modules), np.float32))

    @property
    def size(self) -> int:
        """Number of trained values."""
        return len(self.values)

    def copy(self) -> Adapter:
        """Return an adapter with a copy of the values."""
        return Adapter(self.modules, self.values.copy())

    def _by_module(self, letter: str) -> dict[str, FloatArray]:
        trained = matrices(self.modules)
        return {matrix.module: self._matrices[matrix.name] for matrix in trained if matrix.letter == letter}


def adapter_size(modules: Sequence[AdaptedModule]) -> int:
    """Return the number of trained values of an adapter for these modules."""
    return sum(matrix.size for matrix in matrices(modules))


def views(modules: Sequence[AdaptedModule], values: FloatArray) -> dict[str, FloatArray]:
    """Return views [..., rank, width] of values [..., size] for every trained matrix, by its name."""
    matrix_views, start = {}, 0
    for matrix in matrices(modules):
        end = start + matrix.size
        matrix_views[matrix.name] = values[..., start:end].reshape(
            *values.shape[:-1], matrix.rank, matrix.width
        )
        start = end
    return matrix_views
