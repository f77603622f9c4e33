"""The Estimator protocol: how a step measures its examples, and how a gradient follows from the measurement.

    measure    examples -> engine -> loss, and projected gradients (one per query, or per query and example)
                                     or the exact gradient
    gradient   projected gradients -> mean of projected_gradient * direction; an exact gradient stays as it is

`gradient` needs no engine, because directions are computed again from (seed, step): a run can be replayed
from the records of its journal. `differences.py` estimates with perturbed copies of the adapter,
`tangents.py` with forward-mode derivatives; `exact.py` computes the gradient by backpropagation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from prge.engine import Array, Engine, Float64Array, FloatArray
from prge.formats.adapter import Adapter
from prge.formats.journal import GRADIENT, Record, encode_array
from prge.model_spec import AdaptedModule
from prge.objectives.classification_head import Classifier, Head
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Loss, Objective
from prge.training.estimators.rollouts import RolloutSource

# Cost of an exact gradient, forward and backward, in forward passes.
BACKPROPAGATION_PASSES = 3
# Keys of a step's record from which `Estimator.gradient` computes: a record has at most one of them.
GRADIENT_KEYS = frozenset({"projected_gradients", GRADIENT})


@dataclass(frozen=True)
class Step:
    """The inputs of one step.

    Attributes:
        adapter: the adapter whose gradient the step estimates.
        examples: the examples of the step.
        seed: the seed of the run; together with `number` it determines the step's directions.
        number: number of the step, counted from 0.
        classifier: computes class scores from an encoder's pooled states; None for a decoder.
        trained_head: the encoder's head if it is trained, too; its gradient is exact.
        objective: the loss as a function of scores.
        rollouts: generates the completions of estimators that learn from a reward.
    """

    adapter: Adapter
    examples: Sequence[Example]
    seed: int
    number: int
    classifier: Classifier | None = None
    trained_head: Head | None = None
    objective: Objective = CROSS_ENTROPY
    rollouts: RolloutSource | None = None

    @property
    def rollout_source(self) -> RolloutSource:
        """The source of completions; raises ValueError without one."""
        if self.rollouts is None:
            raise ValueError("the step has no source of completions")
        return self.rollouts

    def loss(self, outputs: Array, examples: Sequence[Example] | None = None) -> Loss:
        """Return the loss of the step's examples, or of `examples`, for outputs [copies, ...]."""
        examples = self.examples if examples is None else examples
        return Loss(examples, outputs, self.objective, self.classifier)

    def head_gradient(self, losses: Sequence[Loss]) -> FloatArray | None:
        """Return the gradient of the mean loss with respect to the trained head, f32 [size].

        Returns None if no head is trained.
        """
        if self.trained_head is None:
            return None
        total = sum(
            (loss.head_gradient(self.trained_head) for loss in losses), np.zeros(self.trained_head.size)
        )
        count = sum(len(loss.outputs) * len(loss.examples) for loss in losses)
        return (total / count).astype(np.float32)


@dataclass(frozen=True)
class Measurement:
    """What an estimator measured in one step.

    Attributes:
        loss: mean over the step's examples.
        projected_gradients: derivatives of the loss along the directions, f64 [queries] or [queries,
            examples]; empty if the gradient is exact.
        head_gradient: exact gradient of a trained head, f32 [size]; None if no head is trained.
        engine_seconds: seconds spent in the engine.
        largest_tangent: largest absolute value among the tangents of the outputs; None without tangents.
        gradient: the exact gradient of the adapter, f32 [size]; None if it is estimated.
        facts: further fields of the step's journal record, such as the mean reward.
    """

    loss: float
    projected_gradients: Float64Array
    head_gradient: FloatArray | None
    engine_seconds: float
    largest_tangent: float | None = None
    gradient: FloatArray | None = None
    facts: Record = field(default_factory=dict)

    @property
    def derivatives(self) -> Float64Array | FloatArray:
        """The values that determine the gradient: projected gradients, or the exact gradient."""
        return self.projected_gradients if self.gradient is None else self.gradient

    @property
    def journal_fields(self) -> Record:
        """The fields of a step's journal record from which `Estimator.gradient` computes; and the facts."""
        record: Record = dict(self.facts)
        record |= (
            {"projected_gradients": self.projected_gradients.tolist()}
            if self.gradient is None
            else {GRADIENT: encode_array(self.gradient)}
        )
        if self.head_gradient is not None:
            record["head_gradient"] = encode_array(self.head_gradient)
        return record


class Estimator(Protocol):
    """Estimates or computes the gradient of a step's loss with an engine."""

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Measure the step's examples on the engine."""
        ...

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """Return the gradient with respect to the adapter's values, f32 [size].

        Args:
            record: a step's record, with the fields of `Measurement.journal_fields`; new or from a journal.
            seed: the seed of the run.
            step: number of the step.
            modules: the adapted layers.
        """
        ...


class EstimatorSequence:
    """Implements Estimator for a run that changed its estimator: a step uses the estimator of its interval.

    Args:
        since: pairs of the first step of an estimator and the estimator, in ascending order from step 0.
    """

    def __init__(self, since: Sequence[tuple[int, Estimator]]) -> None:
        self._since = since

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """See Estimator.measure."""
        return self._estimator_of(step.number).measure(engine, step)

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._estimator_of(step).gradient(record, seed, step, modules)

    def _estimator_of(self, step: int) -> Estimator:
        return next(estimator for first, estimator in reversed(self._since) if first <= step)


def clip_by_rms(projected_gradients: Float64Array, limit: float) -> Float64Array:
    """Return projected gradients, scaled so that their RMS over queries is at most `limit`.

    For directions of random signs, the root mean square estimates the norm of the gradient. So this is
    clipping by norm: of the step's gradient for an array [queries], of each example's gradient for [queries,
    examples]. Norms of single examples have heavy tails: without clipping, a few examples would dominate a
    step.

    Args:
        projected_gradients: the projected gradients, f64 [queries] or [queries, examples].
        limit: the upper bound; 0: no clipping.
    """
    rms = np.sqrt((projected_gradients**2).mean(0))
    return projected_gradients * (limit / np.maximum(rms, limit)) if limit else projected_gradients
