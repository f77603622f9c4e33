"""The Engine protocol: calls of token sequences, their outputs, and derivatives of these.

`device_runner.engines` implements the protocol with ExecuTorch programs, `server_export.oracle` with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prge.model_spec import ModelSpec

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Maximum number of hidden states between two blocks, counting every copy of the adapter and every direction.
MAX_HIDDEN_STATES = 8192

EngineName = Literal["auto", "native", "torch"]

# The factors of a direction u v^T in every trained matrix, by the names `Matrix.u` and `Matrix.v`:
# f32 [queries, sequences, rank] and f32 [queries, sequences, width].
Directions = Mapping[str, FloatArray]
# Returns the gradient of a loss with respect to the outputs, in their shape.
GradFn = Callable[[FloatArray], Array]


@dataclass(frozen=True, slots=True)
class Target:
    """A token whose log-probability the engine returns.

    Attributes:
        position: position in the sequence whose logits predict the token.
        token: id of the token.
        weight: weight of the log-probability in the candidate's score.
        candidate: index of the candidate that the target belongs to.
    """

    position: int
    token: int
    weight: float
    candidate: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence of token ids with its targets.

    Attributes:
        tokens: the token ids.
        targets: the tokens whose log-probabilities the engine returns.
        branches: index of the first token of each candidate's branch. All branches continue the tokens before
            the first of them, have positions as if they followed these directly, and don't attend to each
            other. Targets are grouped by candidate. Empty for a sequence of consecutive tokens.
    """

    tokens: tuple[int, ...]
    targets: tuple[Target, ...] = ()
    branches: tuple[int, ...] = ()

    def split(self) -> tuple[TokenSequence, ...]:
        """Return a sequence of consecutive tokens for each candidate, with its targets, in their order."""
        if not self.branches:
            return (self,)
        common, ends = self.branches[0], (*self.branches[1:], len(self.tokens))
        candidates = [tuple(group) for _, group in groupby(self.targets, key=lambda each: each.candidate)]
        parts = []
        for start, end, targets in zip(self.branches, ends, candidates, strict=True):
            positions = (each.position for each in targets)
            shifted = (at - (start - common) * (at >= common) for at in positions)
            moved = (replace(each, position=at) for each, at in zip(targets, shifted, strict=True))
            parts.append(TokenSequence(self.tokens[:common] + self.tokens[start:end], tuple(moved)))
        return tuple(parts)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(frozen=True)
class Call:
    """The input of an engine, which computes every sequence with every copy of the adapter.

    Attributes:
        sequences: sequences of any lengths; the engine pads and groups them.
        adapters: values of each copy of the adapter, f32 [copies, adapter size].
    """

    sequences: tuple[TokenSequence, ...]
    adapters: FloatArray

    @cached_property
    def target_count(self) -> int:
        """Number of targets of all sequences."""
        return sum(len(sequence.targets) for sequence in self.sequences)


class ForwardEngine(Protocol):
    """Computes the outputs of calls, without derivatives.

    A decoder's outputs are the log-probabilities of all targets, sequence after sequence, [targets]. An
    encoder's outputs are pooled states, [sequences, width]. Outputs are new arrays and batch-invariant: the
    outputs of a sequence have the same bits whatever else the call contains.

    Raises:
        EngineError: a call doesn't fit the model, or the engine failed. The engine can still be used
            afterwards.
    """

    @property
    def model(self) -> ModelSpec:
        """The model that the engine computes."""
        ...

    def forward(self, call: Call) -> FloatArray:
        """Compute the outputs of every copy, f32 [copies, targets] or [copies, sequences, width]."""
        ...


class Engine(ForwardEngine, Protocol):
    """Computes outputs, their forward-mode derivatives, and gradients of a loss."""

    @property
    def seconds(self) -> float:
        """Seconds spent in calls so far."""
        ...

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """Compute outputs and their exact derivatives along directions (Jacobian-vector products).

        Args:
            call: a call with one copy of the adapter.
            directions: a direction for each query and sequence.

        Returns:
            The outputs, f32 [targets] or [sequences, width], and their tangents, f32 [queries, ...].
        """
        ...

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """Compute outputs and the gradient of a loss with respect to the adapter.

        Args:
            call: a call with one copy of the adapter.
            grad_fn: returns the gradient of the loss with respect to the outputs; it is called once.

        Returns:
            The outputs, f32 [targets] or [sequences, width], and the gradient, f32 [adapter size]. The whole
            gradient is NaN if any value of the backward pass wasn't finite.
        """
        ...
