"""The protocol of an engine: what the training loop needs from it, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prge.model_spec import ModelSpec

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

# States of tokens that an engine holds between two blocks, with every copy of the adapter or direction.
STATES_AT_ONCE = 8192

EngineName = Literal["auto", "native", "torch"]

# The factors of a direction u v^T in every trained matrix, by the names `Matrix.u` and `Matrix.v`:
# f32 [queries, sequences, rank] and [queries, sequences, width].
Directions = Mapping[str, FloatArray]
# From outputs to the derivative of a loss by them, in their shape.
GradFn = Callable[[FloatArray], Array]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a log-probability is read (`position`) and of what (`token`); its weight in the score of the
    candidate that it belongs to."""

    position: int
    token: int
    weight: float
    candidate: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenized sequence with its targets."""

    tokens: tuple[int, ...]
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Call:
    """What an engine computes: every sequence with every copy of the adapter.

    `sequences` may have any lengths; `adapters` are the values of each copy, f32 [copies, adapter size].
    """

    sequences: tuple[TokenSequence, ...]
    adapters: FloatArray

    @cached_property
    def target_count(self) -> int:
        """Targets of all sequences."""
        return sum(len(sequence.targets) for sequence in self.sequences)


class ForwardEngine(Protocol):
    """Computes the outputs of calls, in fresh arrays.

    Outputs of a decoder are log-probabilities of all targets, one sequence after the other, [targets]; of an
    encoder pooled states [sequences, width]. They are the same bits whatever else is in the call.

    Raises:
        EngineError: a call is not of the model, or the engine failed. The engine stays usable.
    """

    @property
    def model(self) -> ModelSpec:
        """What the engine computes."""
        ...

    def forward(self, call: Call) -> FloatArray:
        """Compute the outputs of every copy, f32 [copies, targets] or [copies, sequences, width]."""
        ...


class Engine(ForwardEngine, Protocol):
    """Computes outputs, and derivatives of them or of a loss."""

    @property
    def seconds(self) -> float:
        """Time in calls so far."""
        ...

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """Compute outputs, and their exact derivatives along directions.

        Args:
            call: with one copy.
            directions: a direction for each query and sequence.

        Returns:
            Outputs f32 [targets] or [sequences, width], and their derivatives [queries, ...].
        """
        ...

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """Compute outputs, and the gradient of a loss of them by the adapter.

        Args:
            call: with one copy.
            grad_fn: the derivative of the loss by the outputs; called once.

        Returns:
            Outputs f32 [targets] or [sequences, width], and the gradient f32 [adapter size]. All of the
            gradient is NaN where something on its way wasn't finite.
        """
        ...
