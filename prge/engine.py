"""The protocols of an engine: what the loop needs from it, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prge.contract import Contract

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

EngineName = Literal["auto", "native", "torch"]
# From the answers of an exact call to the derivative of a loss by them, in their shape.
Slope = Callable[[FloatArray], Array]


class Answering(Protocol):
    """Computes calls: arrays for `contract.inputs` go in, arrays for `contract.outputs` come out."""

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules."""
        ...

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute a call of copies or tangents.

        Args:
            inputs: an array of the contract's dtype and shape for every input name.

        Returns:
            A fresh array for every output name; later calls don't change it.

        Raises:
            EngineError: an input is missing or of another shape or dtype, or the engine failed.
        """
        ...


class Engine(Answering, Protocol):
    """Computes calls, and takes the slope of a loss back through those of exact contracts."""

    def gradient(self, inputs: Mapping[str, Array], slope: Slope) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Compute an exact call and take the slope of a loss back through it.

        Args:
            inputs: as of `forward`.
            slope: how the loss changes with the answers; it is asked once.

        Returns:
            The answers f32 [rows, positions], or [rows, width] of an encoder; and the loss's derivative by
            the adapter, f32 [rank, width] by names of its matrices' inputs. All of it is NaN where something
            on its way wasn't finite.

        Raises:
            EngineError: as of `forward`, or the slope has another shape than the answers.
        """
        ...
