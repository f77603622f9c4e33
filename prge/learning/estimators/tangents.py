"""Exact derivatives along directions: one scalar per query and example.

    u v^T per (query, example) -> tangents of the answers -> chain rule -> scalar[query, example]
    gradient = mean over queries and examples of scalar * u v^T

A scalar is the derivative of its example's loss along its direction, without an epsilon. The engine returns
how log-probabilities or states change; from there to the loss the chain rule needs a few sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prge.contract import AdaptedModule, Contract, matrices
from prge.engine import Engine, Float64Array, FloatArray
from prge.learning.estimators.directions import RankOneDirections, on_grid
from prge.learning.estimators.protocol import Calls, Measurement, Step, clipped


class Tangents:
    """Implements protocol.Estimator on tangents; the contract has the number of queries.

    `shared`: one direction a query for all examples, instead of one for each. `clip` bounds the norm of every
    example's gradient.
    """

    def __init__(self, shared: bool = False, clip: float = 0.0) -> None:
        self.shared = shared
        self.clip = clip
        self._factors: dict[str, FloatArray] = {}
        self._contract: Contract | None = None
        self._directions = RankOneDirections(0, 0, 0, 0, ())

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Loss of every example and its derivatives: one call per batch."""
        contract = engine.contract
        directions = self._directions_of(
            step.seed, step.number, (contract.queries, step.examples), contract.modules
        )
        factors = self._factors_of(contract)
        adapter = step.adapter.inputs()
        scalars = np.zeros((contract.queries, step.examples))
        calls, loss, largest, first = Calls(engine, step.trained_head), 0.0, 0.0, 0
        for batch in step.batches:
            directions.fill(factors, np.where(batch.owner < 0, -1, first + batch.owner))
            outputs = calls.forward({**batch.inputs(1, contract.is_encoder), **adapter, **factors})
            found, tangents = step.loss(batch, outputs[contract.answer]), outputs["d" + contract.answer]
            loss += float(found.losses.sum())
            scalars[:, first : first + batch.examples] = found.along(tangents)
            largest = float(np.maximum(largest, found.largest(tangents)))
            calls.learn_head(found)
            first += batch.examples
        return Measurement(
            loss / step.examples,
            on_grid(clipped(scalars, self.clip), axis=0),
            calls.head_gradient(step.examples),
            calls.seconds,
            self.rows(contract, len(step.batches)),
            largest,
        )

    def rows(self, contract: Contract, batches: int) -> int:
        """See protocol.Estimator.rows."""
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
        """Buffers of the inputs of directions, allocated once."""
        if contract is self._contract:
            return self._factors
        self._contract = contract
        names = {name for matrix in matrices(contract.modules) for name in (matrix.u, matrix.v)}
        specs = [spec for spec in contract.inputs if spec.name in names]
        if {name: array.shape for name, array in self._factors.items()} != {s.name: s.shape for s in specs}:
            self._factors = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}
        return self._factors
