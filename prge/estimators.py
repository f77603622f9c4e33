"""The Estimator protocol: what a step learns from its batches, and the gradient that follows from it.

    measure    batches -> engine -> scalars, one per query (and example), or a gradient; and the loss
    gradient   scalars -> mean of scalar * direction, or the gradient as it is

`gradient` needs no engine: directions are made again from (seed, step). So what a journal keeps of a step is
enough to replay a run. prge/differences.py estimates on stack programs, prge/tangents.py on tangent programs;
prge/exact.py has the gradient from the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prge.adapter import Adapter
from prge.contract import AdaptedModule, Contract
from prge.engine import Engine, FloatArray
from prge.examples import Batch
from prge.head import Classifier, Head
from prge.journal import Record, encode_array

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """What one step learnt from the engine.

    `loss`: mean over the step's examples. `scalars`: f64 [queries] or [queries, examples]; without directions
    none, but the `gradient` by the adapter's values, f32 [size]. `head_gradient`:
    exact derivative of the mean loss by the head's values, f32 [size]; None without a trained head. `rows`:
    how many the engine computed. `largest_tangent`: largest derivative that it answered, if it answers any.
    """

    loss: float
    scalars: Float64Array
    head_gradient: FloatArray | None
    engine_seconds: float
    rows: int
    largest_tangent: float | None = None
    gradient: FloatArray | None = None

    @property
    def derivatives(self) -> Float64Array | FloatArray:
        """All that the gradient follows from."""
        return self.scalars if self.gradient is None else self.gradient

    @property
    def learnt(self) -> Record:
        """What a journal keeps of it, so that `Estimator.gradient` has all it needs."""
        known: Record = (
            {"scalars": self.scalars.tolist()}
            if self.gradient is None
            else {"gradient": encode_array(self.gradient)}
        )
        if self.head_gradient is not None:
            known["head_gradient"] = encode_array(self.head_gradient)
        return known


class Estimator(Protocol):
    """How a step gets its gradient from calls of a program."""

    def measure(
        self,
        engine: Engine,
        adapter: Adapter,
        batches: Sequence[Batch],
        seed: int,
        step: int,
        classifier: Classifier | None = None,
        trained_head: Head | None = None,
    ) -> Measurement:
        """Run the programs of one step.

        Args:
            engine: runs a program of the kind that the estimator is for.
            adapter: where the gradient is asked for.
            batches: the step's examples, each batch the rows of one copy.
            seed: of the directions, with `step`.
            step: number of the step.
            classifier: scores an encoder's states.
            trained_head: the head whose exact gradient is wanted, where it is trained.
        """
        ...

    def rows(self, contract: Contract, batches: int) -> int:
        """Rows that the engine computes for a step of so many batches."""
        ...

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """The gradient by the adapter's values, f32 [size], from what a step learnt, now or by a journal."""
        ...


def clipped(scalars: Float64Array, limit: float) -> Float64Array:
    """Scalars shrunk together until their root mean square over queries is at most `limit`; 0 leaves them.

    For random signs that root mean square estimates the gradient's norm, so this is clipping by norm: of the
    step's gradient for scalars [queries], of every example's for scalars [queries, examples]. Gradients of
    single examples have heavy tails, and the few largest would drown the rest.
    """
    size = np.sqrt((scalars**2).mean(0))
    return scalars * (limit / np.maximum(size, limit)) if limit else scalars
