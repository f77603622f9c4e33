"""The trained adapter: the matrices of every module in one vector, and views of them.

values  [ module 0: rank x in | rank x out | module 1: ... ]    one float32 vector, in the model's order
views   {"lora_b.<module>": [rank, out], ...}                   of it

LoRA-FA has no `rank x in`: its `lora_a` are constants of the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.engine import FloatArray
from prge.model_spec import AdaptedModule, matrices


class Adapter:
    """The trained matrices of all modules in one float32 vector, `values`; `modules` gives its layout.

    `lora_a`, f32 [rank, in] by module name as the bundle's programs take it, is there if it is trained, or
    isn't the bundle's; an adapter of LoRA-FA with another writes text, and is neither trained nor scored.

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

    @classmethod
    def zeros(cls, modules: Sequence[AdaptedModule]) -> Adapter:
        """The adapter that changes nothing."""
        return cls(modules, np.zeros(adapter_size(modules), np.float32))

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return len(self.values)

    @property
    def lora_b(self) -> dict[str, FloatArray]:
        """Views [rank, out] into `values` by module name, always the same; writing to one writes to it."""
        return self._by_module("b")

    def copy(self) -> Adapter:
        """An adapter with its own values."""
        return Adapter(self.modules, self.values.copy())

    def _by_module(self, letter: str) -> dict[str, FloatArray]:
        trained = matrices(self.modules)
        return {each.module: self._matrices[each.name] for each in trained if each.letter == letter}


def adapter_size(modules: Sequence[AdaptedModule]) -> int:
    """How many numbers the adapter of these modules trains."""
    return sum(matrix.size for matrix in matrices(modules))


def views(modules: Sequence[AdaptedModule], values: FloatArray) -> dict[str, FloatArray]:
    """Views [..., rank, width] of every trained matrix by name, into values [..., size]."""
    found, start = {}, 0
    for matrix in matrices(modules):
        end = start + matrix.size
        found[matrix.name] = values[..., start:end].reshape(*values.shape[:-1], matrix.rank, matrix.width)
        start = end
    return found
