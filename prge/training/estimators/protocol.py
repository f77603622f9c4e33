"""The Estimator protocol: what a step learns from its examples, and the gradient that follows from it.

    measure    examples -> engine -> scalars, one per query (and example), or a gradient; and the loss
    gradient   scalars -> mean of scalar * direction, or the gradient as it is

`gradient` needs no engine: directions are made again from (seed, step). So what a journal keeps of a step is
enough to replay a run. differences.py estimates with copies of the adapter, tangents.py with tangents;
exact.py has the gradient from the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prge.engine import Array, Engine, Float64Array, FloatArray
from prge.formats.adapter import Adapter
from prge.formats.journal import GRADIENT, Record, encode_array
from prge.model_spec import AdaptedModule
from prge.objectives.classification_head import Classifier, Head
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Loss, Objective

# Forward passes that an exact gradient counts as wherever costs are compared.
BACKPROPAGATION_PASSES = 3
# What a journal can have of a step for `Estimator.gradient`.
GRADIENT_KEYS = frozenset({"scalars", GRADIENT})


@dataclass(frozen=True)
class Step:
    """What one step is measured on.

    `adapter`: where the gradient is asked for. `examples`: of the step. `seed` with `number`, that of the
    step, makes its directions. `classifier` scores an encoder's states; `trained_head` is the head whose
    exact gradient is wanted, where it is trained. `objective` is the loss.
    """

    adapter: Adapter
    examples: Sequence[Example]
    seed: int
    number: int
    classifier: Classifier | None = None
    trained_head: Head | None = None
    objective: Objective = CROSS_ENTROPY

    def loss(self, outputs: Array, examples: Sequence[Example] | None = None) -> Loss:
        """The loss of the step's examples, or of some, at an engine's outputs [copies, ...]."""
        given = self.examples if examples is None else examples
        return Loss(given, outputs, self.objective, self.classifier)

    def head_gradient(self, losses: Sequence[Loss]) -> FloatArray | None:
        """The gradient of the mean of losses by a trained head's values, f32 [size]; None without one."""
        if self.trained_head is None:
            return None
        total = sum((loss.by_head(self.trained_head) for loss in losses), np.zeros(self.trained_head.size))
        count = sum(len(loss.outputs) * len(loss.examples) for loss in losses)
        return (total / count).astype(np.float32)


@dataclass(frozen=True)
class Measurement:
    """What one step learnt from the engine.

    `loss`: mean over the step's examples. `scalars`: f64 [queries] or [queries, examples]; without directions
    none, but the `gradient` by the adapter's values, f32 [size]. `head_gradient`: exact derivative of the
    mean loss by the head's values, f32 [size]; None without a trained head. `engine_seconds`: time in the
    engine. `largest_tangent`: largest derivative that it computed, if it computes any.
    """

    loss: float
    projected_gradients: Float64Array
    head_gradient: FloatArray | None
    engine_seconds: float
    largest_tangent: float | None = None
    gradient: FloatArray | None = None

    @property
    def derivatives(self) -> Float64Array | FloatArray:
        """All that the gradient follows from."""
        return self.projected_gradients if self.gradient is None else self.gradient

    @property
    def learnt(self) -> Record:
        """What a journal keeps of it, so that `Estimator.gradient` has all it needs."""
        record: Record = (
            {"scalars": self.projected_gradients.tolist()}
            if self.gradient is None
            else {GRADIENT: encode_array(self.gradient)}
        )
        if self.head_gradient is not None:
            record["head_gradient"] = encode_array(self.head_gradient)
        return record


class Estimator(Protocol):
    """How a step gets its gradient from an engine."""

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Compute one step."""
        ...

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """The gradient by the adapter's values, f32 [size], from what a step learnt, now or by a journal."""
        ...


class EstimatorSequence:
    """Implements Estimator by several, each from a step of its own on: those of a run that changed it.

    Args:
        since: first steps and estimators, in the order of the run; the first one is 0.
    """

    def __init__(self, since: Sequence[tuple[int, Estimator]]) -> None:
        self._since = since

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """See Estimator.measure."""
        return self._of(step.number).measure(engine, step)

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._of(step).gradient(learnt, seed, step, modules)

    def _of(self, step: int) -> Estimator:
        return next(estimator for first, estimator in reversed(self._since) if first <= step)


def clip_by_rms(scalars: Float64Array, limit: float) -> Float64Array:
    """Scalars shrunk together until their root mean square over queries is at most `limit`; 0 leaves them.

    For random signs that root mean square estimates the gradient's norm, so this is clipping by norm: of the
    step's gradient for scalars [queries], of every example's for scalars [queries, examples]. Gradients of
    single examples have heavy tails, and the few largest would drown the rest.
    """
    size = np.sqrt((scalars**2).mean(0))
    return scalars * (limit / np.maximum(size, limit)) if limit else scalars
