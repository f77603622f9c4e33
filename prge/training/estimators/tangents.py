"""Exact derivatives along directions: one scalar per query and example.

    u v^T per (query, example) -> derivatives of the outputs -> chain rule -> scalar[query, example]
    gradient = mean over queries and examples of scalar * u v^T

A scalar is the derivative of its example's loss along its direction, without an epsilon. The engine returns
how log-probabilities or states change; from there to the loss the chain rule needs a few sums.
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
    """Implements protocol.Estimator on derivatives along `queries` directions of a step.

    `shared`: one direction a query for all examples, instead of one for each. `clip` bounds the norm of every
    example's gradient.
    """

    def __init__(self, queries: int, shared: bool = False, clip: float = 0.0) -> None:
        self.queries = queries
        self.shared = shared
        self.clip = clip
        self._directions = RankOneDirections(0, 0, 0, 0, ())

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Loss of every example and its derivatives, in one call."""
        shape, modules = (self.queries, len(step.examples)), step.adapter.modules
        directions = self._directions_of(step.seed, step.number, shape, modules)
        owner = np.repeat(np.arange(shape[1]), [len(example.sequences) for example in step.examples])
        call = Call(sequences_of(step.examples), step.adapter.values[None])
        begin = engine.seconds
        outputs, derivatives = engine.jvp(call, directions.of(owner))
        loss = step.loss(outputs[None])
        return Measurement(
            float(loss.losses.sum()) / len(step.examples),
            truncate_to_grid(clip_by_rms(loss.along(derivatives), self.clip), axis=0),
            step.head_gradient([loss]),
            engine.seconds - begin,
            float(np.abs(derivatives).max(initial=0.0)),
        )

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """Mean of scalar * u v^T, f32 [size], from scalars [queries, examples]; the same bits everywhere."""
        table: Float64Array = np.asarray(learnt["scalars"], np.float64)
        return self._directions_of(seed, step, table.shape, modules).gradient(table)

    def _directions_of(
        self, seed: int, step: int, shape: Sequence[int], modules: Sequence[AdaptedModule]
    ) -> RankOneDirections:
        """The step's directions, which measuring and the gradient share."""
        queries, examples = shape
        wanted = RankOneDirections(seed, step, queries, examples, tuple(modules), self.shared)
        if wanted != self._directions:
            self._directions = wanted
        return self._directions
