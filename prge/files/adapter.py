"""The trained adapter: the matrices of every module in one vector, and as inputs of calls.

values  [ module 0: rank x in | rank x out | module 1: ... ]    one float32 vector, contract order
inputs  {"lora_b.<module>": view [rank, out], ...}              views into it
stack   {"lora_b.<module>": [copies, rank, out], ...}           what a call of copies takes

LoRA-FA has no `rank x in`: its `lora_a` are constants of the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.contract import AdaptedModule, matrices
from prge.engine import FloatArray


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
        self._inputs = _views(self.modules, values)
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

    def inputs(self) -> dict[str, FloatArray]:
        """Views of all matrices by the names of inputs."""
        return dict(self._inputs)

    def copy(self) -> Adapter:
        """An adapter with its own values."""
        return Adapter(self.modules, self.values.copy())

    def _by_module(self, letter: str) -> dict[str, FloatArray]:
        trained = matrices(self.modules)
        return {each.of: self._inputs[each.name] for each in trained if each.letter == letter}


class AdapterStack:
    """Buffers for the adapter's inputs of a stack, allocated once and filled copy by copy.

    `inputs` maps every input name to its f32 [copies, rank, width] buffer, contiguous. The engine reads
    them in place, so fill all copies before a forward.
    """

    def __init__(self, modules: Sequence[AdaptedModule], copies: int) -> None:
        self.modules = tuple(modules)
        self.copies = copies
        self.inputs: dict[str, FloatArray] = {
            each.name: np.zeros((copies, each.rank, each.width), np.float32) for each in matrices(modules)
        }
        self._size = adapter_size(self.modules)

    def fill(self, copy: int, values: FloatArray) -> None:
        """Write the adapter vector `values` f32 [size] as copy number `copy`; no temporary arrays.

        Raises:
            ValueError: `copy` is out of range, or `values` has another size.
        """
        if not 0 <= copy < self.copies:
            raise ValueError(f"copy is {copy}, the stack has {self.copies}")
        if values.shape != (self._size,):
            raise ValueError(f"values has shape {values.shape}, must be ({self._size},)")
        for name, view in _views(self.modules, values).items():
            self.inputs[name][copy] = view


def adapter_size(modules: Sequence[AdaptedModule]) -> int:
    """How many numbers the adapter of these modules trains."""
    return sum(matrix.size for matrix in matrices(modules))


def stack(adapter: Adapter, copies: int) -> dict[str, FloatArray]:
    """Program inputs with the same adapter in every copy: f32 [copies, rank, width] by input name."""
    buffers = AdapterStack(adapter.modules, copies)
    for copy in range(copies):
        buffers.fill(copy, adapter.values)
    return buffers.inputs


def _views(modules: Sequence[AdaptedModule], values: FloatArray) -> dict[str, FloatArray]:
    views, start = {}, 0
    for matrix in matrices(modules):
        end = start + matrix.size
        views[matrix.name] = values[start:end].reshape(matrix.rank, matrix.width)
        start = end
    return views
