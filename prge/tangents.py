"""Exact derivatives on a tangent program: one scalar per query and example.

    u v^T per (query, example) -> tangents of the answers -> chain rule -> scalar[query, example]
    gradient = mean over queries and examples of scalar * u v^T

A scalar is the derivative of its example's loss along its direction, without a step size. The program answers
how log-probabilities or states change; from there to the loss the chain rule needs a few sums.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prge.adapter import Adapter
from prge.contract import LORA_B_PREFIX, U_PREFIX, V_PREFIX, AdaptedModule, Contract
from prge.directions import RankOneDirections, on_grid
from prge.engine import Engine, FloatArray
from prge.estimators import Float64Array, Measurement, clipped
from prge.examples import Batch
from prge.head import Classifier, Head
from prge.objectives import largest_tangent, losses, score_gradient, score_slopes, scores


class Tangents:
    """Implements prge.estimators.Estimator on tangent programs; the program fixes the number of queries.

    `shared`: one direction a query for all examples, instead of one for each. `clip` bounds the norm of every
    example's gradient.
    """

    def __init__(self, shared: bool = False, clip: float = 0.0) -> None:
        self.shared = shared
        self.clip = clip
        self._factors: dict[str, FloatArray] = {}
        self._contract: Contract | None = None
        self._directions = RankOneDirections(0, 0, 0, 0, ())

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
        """Loss of every example and its derivatives: one call per batch."""
        contract = engine.contract
        examples = sum(batch.examples for batch in batches)
        directions = self._directions_of(seed, step, (contract.queries, examples), contract.modules)
        factors = self._factors_of(contract)
        lora_b = {LORA_B_PREFIX + name: view for name, view in adapter.named().items()}
        scalars = np.zeros((contract.queries, examples))
        head_gradient = np.zeros(trained_head.size) if trained_head is not None else None
        total, largest, engine_seconds, first = 0.0, 0.0, 0.0, 0
        for batch in batches:
            directions.fill(factors, np.where(batch.owner < 0, -1, first + batch.owner))
            inputs = {**batch.inputs(1, contract.is_encoder), **lora_b, **factors}
            begin = time.perf_counter()
            outputs = engine.forward(inputs)
            engine_seconds += time.perf_counter() - begin
            batch_scores = scores(batch, outputs, 1, classifier)
            by_score = score_gradient(batch_scores, batch.labels)
            total += float(losses(batch_scores, batch.labels).sum())
            slopes = score_slopes(batch, outputs, classifier)
            scalars[:, first : first + batch.examples] = (by_score * slopes).sum(-1)
            largest = float(np.maximum(largest, largest_tangent(batch, outputs)))
            if trained_head is not None and head_gradient is not None:
                head_gradient += trained_head.gradient(outputs["pooled"][None, batch.owner >= 0], by_score)
            first += batch.examples
        return Measurement(
            total / examples,
            on_grid(clipped(scalars, self.clip)),
            None if head_gradient is None else (head_gradient / examples).astype(np.float32),
            engine_seconds,
            self.rows(contract, len(batches)),
            largest,
        )

    def rows(self, contract: Contract, batches: int) -> int:
        """See prge.estimators.Estimator.rows."""
        return contract.computed_rows * batches

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

    def _factors_of(self, contract: Contract) -> dict[str, FloatArray]:
        """Buffers of the program inputs `u.<module>` and `v.<module>`, allocated once."""
        if contract is self._contract:
            return self._factors
        self._contract = contract
        specs = [spec for spec in contract.inputs if spec.name.startswith((U_PREFIX, V_PREFIX))]
        if {name: array.shape for name, array in self._factors.items()} != {s.name: s.shape for s in specs}:
            self._factors = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}
        return self._factors
