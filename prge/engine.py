"""The Engine protocol: what the loop needs from an engine, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prge.contract import Contract

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

EngineName = Literal["auto", "native", "torch"]


class Engine(Protocol):
    """Computes calls: arrays for `contract.inputs` go in, arrays for `contract.outputs` come out."""

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules."""
        ...

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute a call.

        Args:
            inputs: an array of the contract's dtype and shape for every input name.

        Returns:
            A fresh array for every output name; later calls don't change it.

        Raises:
            EngineError: an input is missing or of another shape or dtype, or the engine failed.
        """
        ...
