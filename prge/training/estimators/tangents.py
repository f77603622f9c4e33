"""The tangent estimator: exact derivatives along random directions, by forward-mode differentiation.

    direction u v^T of (query, example) -> tangents of the outputs -> chain rule -> projected gradient
    gradient = mean over queries and examples of projected_gradient * u v^T

A projected gradient is the exact derivative of an example's loss along its direction; there is no epsilon.
The engine returns the tangents of log-probabilities or pooled states, and the chain rule takes them to the
loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prge.engine import Call, Engine, Float64Array, FloatArray
from prge.model_spec import AdaptedModule
from prge.objectives.examples import sequences_of
from prge.training.estimators.directions import RankOneDirections, truncate_to_grid
from prge.training.estimators.protocol import Measurement, Step, clip_by_rms


class TangentEstimator:
    """Implements protocol.Estimator with forward-mode derivatives along random directions.

    Args:
        queries: directions per step.
        shared: whether all examples of a step share the direction of a query.
        max_grad_norm: upper bound for the estimated norm of each example's gradient; 0: no clipping.
    """

    def __init__(self, queries: int, shared: bool = False, max_grad_norm: float = 0.0) -> None:
        self.queries = queries
        self.shared = shared
        self.max_grad_norm = max_grad_norm
        self._directions = RankOneDirections(0, 0, 0, 0, ())

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Measure the mean loss and its derivatives along the directions, with one call of the engine."""
        shape, modules = (self.queries, len(step.examples)), step.adapter.modules
        directions = self._directions_of(step.seed, step.number, shape, modules)
        owner = np.repeat(np.arange(shape[1]), [len(example.sequences) for example in step.examples])
        call = Call(sequences_of(step.examples), step.adapter.values[None])
        begin = engine.seconds
        outputs, tangents = engine.jvp(call, directions.for_sequences(owner))
        loss = step.loss(outputs[None])
        return Measurement(
            float(loss.losses.sum()) / len(step.examples),
            truncate_to_grid(clip_by_rms(loss.jvp(tangents), self.max_grad_norm), axis=0),
            step.head_gradient([loss]),
            engine.seconds - begin,
            float(np.abs(tangents).max(initial=0.0)),
        )

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """Return the mean of projected_gradient * u v^T, f32 [size]; the same bits on every machine."""
        projected_gradients: Float64Array = np.asarray(record["projected_gradients"], np.float64)
        directions = self._directions_of(seed, step, projected_gradients.shape, modules)
        return directions.gradient(projected_gradients)

    def _directions_of(
        self, seed: int, step: int, shape: Sequence[int], modules: Sequence[AdaptedModule]
    ) -> RankOneDirections:
        """Return the directions of a step; those of the latest step are cached with their signs."""
        queries, examples = shape
        directions = RankOneDirections(seed, step, queries, examples, tuple(modules), self.shared)
        if directions != self._directions:
            self._directions = directions
        return self._directions
