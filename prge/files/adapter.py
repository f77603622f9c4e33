"""The trained adapter: every module's `lora_b` in one vector, and as inputs of calls.

values  [ module 0: rank x out | module 1: rank x out | ... ]       one float32 vector, contract order
named   {module name: view [rank, out]}                             views into it
stack   {"lora_b.<module>": [copies, rank, out]}                    what a call takes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.contract import LORA_B_PREFIX, AdaptedModule
from prge.engine import FloatArray


class Adapter:
    """`lora_b` of all modules in one float32 vector, `values`; `modules` gives its layout.

    `lora_a`, f32 [rank, in] by module name with alpha / rank in it, is there only if it isn't the bundle's;
    such an adapter writes text, and is neither trained nor scored.

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
        self.lora_a = lora_a
        size = adapter_size(modules)
        if values.shape != (size,) or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise ValueError(f"values is {values.dtype} {values.shape}, must be contiguous float32 ({size},)")
        self.values = values
        names = [module.name for module in self.modules]
        self._named = dict(zip(names, _views(self.modules, values), strict=True))

    @classmethod
    def zeros(cls, modules: Sequence[AdaptedModule]) -> Adapter:
        """The adapter that changes nothing."""
        return cls(modules, np.zeros(adapter_size(modules), np.float32))

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return len(self.values)

    def named(self) -> dict[str, FloatArray]:
        """Views [rank, out] into `values` by module name, always the same; writing to one writes to it."""
        return dict(self._named)

    def inputs(self) -> dict[str, FloatArray]:
        """The same views by the names of inputs, `lora_b.<module>`."""
        return {LORA_B_PREFIX + name: view for name, view in self._named.items()}

    def copy(self) -> Adapter:
        """An adapter with its own values."""
        return Adapter(self.modules, self.values.copy())


class LoraBStack:
    """Buffers for the `lora_b` inputs of a stack, allocated once and filled copy by copy.

    `inputs` maps every input name to its f32 [copies, rank, out] buffer, contiguous. The engine reads
    them in place, so fill all copies before a forward.
    """

    def __init__(self, modules: Sequence[AdaptedModule], copies: int) -> None:
        self.modules = tuple(modules)
        self.copies = copies
        self.inputs: dict[str, FloatArray] = {
            module.input_name: np.zeros((copies, module.rank, module.out_features), np.float32)
            for module in self.modules
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
        for buffer, view in zip(self.inputs.values(), _views(self.modules, values), strict=True):
            buffer[copy] = view


def adapter_size(modules: Sequence[AdaptedModule]) -> int:
    """How many numbers the adapter of these modules trains."""
    return sum(module.rank * module.out_features for module in modules)


def stack(adapter: Adapter, copies: int) -> dict[str, FloatArray]:
    """Program inputs with the same adapter in every copy: f32 [copies, rank, out] by input name."""
    buffers = LoraBStack(adapter.modules, copies)
    for copy in range(copies):
        buffers.fill(copy, adapter.values)
    return buffers.inputs


def _views(modules: Sequence[AdaptedModule], values: FloatArray) -> list[FloatArray]:
    views, start = [], 0
    for module in modules:
        end = start + module.rank * module.out_features
        views.append(values[start:end].reshape(module.rank, module.out_features))
        start = end
    return views
