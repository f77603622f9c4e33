"""The Estimator protocol: how a step's batches become scalars, and scalars a gradient.

    measure    batches -> engine -> scalars, one per query (and example), and the loss
    gradient   scalars -> mean of scalar * direction

`gradient` needs no engine: directions are made again from (seed, step). So the scalars in a journal are
enough to replay a run. prge/differences.py estimates on stack programs, prge/tangents.py on tangent programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prge.adapter import Adapter
from prge.contract import AdaptedModule
from prge.engine import Engine, FloatArray
from prge.examples import Batch
from prge.head import Classifier, Head

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """What one step learnt from the engine.

    `loss`: mean over the step's examples. `scalars`: f64 [queries] or [queries, examples]. `head_gradient`:
    exact derivative of the mean loss by the head's values, f32 [size]; None without a trained head. `rows`:
    how many the engine computed. `largest_tangent`: largest derivative that it answered, if it answers any.
    """

    loss: float
    scalars: Float64Array
    head_gradient: FloatArray | None
    engine_seconds: float
    rows: int
    largest_tangent: float | None = None


class Estimator(Protocol):
    """How a gradient is estimated from forward passes."""

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

    def gradient(
        self, scalars: ArrayLike, seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """The gradient by the adapter's values, f32 [size], from a measurement's scalars or a journal's."""
        ...


def clipped(scalars: Float64Array, limit: float) -> Float64Array:
    """Scalars shrunk together until their root mean square over queries is at most `limit`; 0 leaves them.

    For random signs that root mean square estimates the gradient's norm, so this is clipping by norm: of the
    step's gradient for scalars [queries], of every example's for scalars [queries, examples]. Gradients of
    single examples have heavy tails, and the few largest would drown the rest.
    """
    size = np.sqrt((scalars**2).mean(0))
    return scalars * (limit / np.maximum(size, limit)) if limit else scalars
