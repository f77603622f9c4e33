"""The Estimator protocol: what a step learns from its batches, and the gradient that follows from it.

    measure    batches -> engine -> scalars, one per query (and example), or a gradient; and the loss
    gradient   scalars -> mean of scalar * direction, or the gradient as it is

`gradient` needs no engine: directions are made again from (seed, step). So what a journal keeps of a step is
enough to replay a run. differences.py estimates with copies of the adapter, tangents.py with tangents;
exact.py has the gradient from the engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prge.contract import AdaptedModule, Contract
from prge.engine import Array, Engine, Float64Array, FloatArray, Slope
from prge.files.adapter import Adapter
from prge.files.journal import GRADIENT, Record, encode_array
from prge.learning.examples import Batch
from prge.learning.head import Classifier, Head
from prge.learning.objectives import CROSS_ENTROPY, BatchLoss, Objective

# What a journal can have of a step for `Estimator.gradient`.
LEARNT = frozenset({"scalars", GRADIENT})


@dataclass(frozen=True)
class Step:
    """What one step is measured on.

    `adapter`: where the gradient is asked for. `batches`: the step's examples, each batch the rows of one
    copy. `seed` with `number`, that of the step, makes its directions. `classifier` scores an encoder's
    states; `trained_head` is the head whose exact gradient is wanted, where it is trained. `objective` is the
    loss.
    """

    adapter: Adapter
    batches: Sequence[Batch]
    seed: int
    number: int
    classifier: Classifier | None = None
    trained_head: Head | None = None
    objective: Objective = CROSS_ENTROPY

    @property
    def examples(self) -> int:
        """Examples of all batches."""
        return sum(batch.examples for batch in self.batches)

    def loss(self, batch: Batch, answers: Array, copies: int = 1) -> BatchLoss:
        """The loss of a batch at what an engine answered for so many copies."""
        return BatchLoss(batch, answers, self.objective, self.classifier, copies)


@dataclass(frozen=True)
class Measurement:
    """What one step learnt from the engine.

    `loss`: mean over the step's examples. `scalars`: f64 [queries] or [queries, examples]; without directions
    none, but the `gradient` by the adapter's values, f32 [size]. `head_gradient`: exact derivative of the
    mean loss by the head's values, f32 [size]; None without a trained head. `rows`: how many the engine
    computed. `largest_tangent`: largest derivative that it computed, if it computes any.
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
        record: Record = (
            {"scalars": self.scalars.tolist()}
            if self.gradient is None
            else {GRADIENT: encode_array(self.gradient)}
        )
        if self.head_gradient is not None:
            record["head_gradient"] = encode_array(self.head_gradient)
        return record


class Calls:
    """The calls of one step: their time, and the gradient of a trained head that they add up to."""

    def __init__(self, engine: Engine, head: Head | None) -> None:
        self.engine = engine
        self.head = head
        self.seconds = 0.0
        self._head_gradient = np.zeros(0 if head is None else head.size)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute a call."""
        begin = time.perf_counter()
        outputs = self.engine.forward(inputs)
        self.seconds += time.perf_counter() - begin
        return outputs

    def gradient(self, inputs: Mapping[str, Array], slope: Slope) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Compute an exact call; see Engine.gradient."""
        begin = time.perf_counter()
        found = self.engine.gradient(inputs, slope)
        self.seconds += time.perf_counter() - begin
        return found

    def learn_head(self, loss: BatchLoss) -> None:
        """Add the head's gradient of a call."""
        if self.head is not None:
            self._head_gradient += loss.by_head(self.head)

    def head_gradient(self, examples: int) -> FloatArray | None:
        """The gradient of the mean loss of so many examples, f32 [size]; None without a trained head."""
        return None if self.head is None else (self._head_gradient / examples).astype(np.float32)


class Estimator(Protocol):
    """How a step gets its gradient from calls of an engine."""

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Make the calls of one step, on an engine of the kind that the estimator is for."""
        ...

    def rows(self, contract: Contract, batches: int) -> int:
        """Rows that the engine computes for a step of so many batches."""
        ...

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """The gradient by the adapter's values, f32 [size], from what a step learnt, now or by a journal."""
        ...


class InTurn:
    """Implements Estimator by several, each from a step of its own on: those of a run that changed it.

    Args:
        since: first steps and estimators, in the order of the run; the first one is 0.
    """

    def __init__(self, since: Sequence[tuple[int, Estimator]]) -> None:
        self._since = since

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """See Estimator.measure."""
        return self._of(step.number).measure(engine, step)

    def rows(self, contract: Contract, batches: int) -> int:
        """See Estimator.rows; of the steps to come."""
        return self._since[-1][1].rows(contract, batches)

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._of(step).gradient(learnt, seed, step, modules)

    def _of(self, step: int) -> Estimator:
        return next(estimator for first, estimator in reversed(self._since) if first <= step)


def clipped(scalars: Float64Array, limit: float) -> Float64Array:
    """Scalars shrunk together until their root mean square over queries is at most `limit`; 0 leaves them.

    For random signs that root mean square estimates the gradient's norm, so this is clipping by norm: of the
    step's gradient for scalars [queries], of every example's for scalars [queries, examples]. Gradients of
    single examples have heavy tails, and the few largest would drown the rest.
    """
    size = np.sqrt((scalars**2).mean(0))
    return scalars * (limit / np.maximum(size, limit)) if limit else scalars
