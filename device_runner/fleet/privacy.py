"""Local differential privacy: noise on what a device sends, and what it amounts to.

A step's report is a mean over examples, each of which clipping bounds; so one example changes it by at most
`reach`, in the Euclidean norm, if it is left out. Gaussian noise of deviation noise * reach on every number
makes the step a Gaussian mechanism. A device takes its rows in permutations, so in n passes over them an
example takes part in n steps: the mechanism is composed n times, and no luck of sampling is counted.

prge/accounting.py tells what epsilon that is. For scalars of zeroth-order steps: DP-ZO, Tang et al. 2024,
arXiv 2401.04343.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from device_runner.fleet.agreement import Plan
from prge.contract import AdaptedModule, Contract
from prge.directions import normals
from prge.engine import Engine, FloatArray
from prge.estimators import Estimator, Measurement, Step
from prge.sampling import row_order

SPENT = "epsilon would be"
Draw = Callable[[int], FloatArray]


def system_normals(count: int) -> FloatArray:
    """Standard normals from the system's entropy, f32 [count]: nobody has a seed of them."""
    return normals(np.frombuffer(os.urandom(8 * (count + count % 2)), np.uint64))[:count]


def reach(plan: Plan) -> float:
    """How far one example can change a step's report.

    The clipped root mean square of an example's scalars over q queries is at most `clip`, so their norm is
    clip * sqrt(q); an exact gradient's norm is at most `clip`. A mean over examples divides either.
    """
    norm = plan.clip * math.sqrt(plan.queries) if plan.by_scalars else plan.clip
    return norm / plan.examples


class Reported:
    """Implements Estimator: measures what a device reports, and so follows exactly that itself.

    Scalars of one direction for all examples become their mean; noise is added where the plan has it, and the
    loss is left out then, for it would say what the noise hides; scalars are rounded to the float32 of a
    message.
    """

    def __init__(self, inner: Estimator, plan: Plan, draw: Draw = system_normals) -> None:
        self._inner = inner
        self._plan = plan
        self._draw = draw

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """See Estimator.measure."""
        measured = self._inner.measure(engine, step)
        if measured.gradient is not None:
            return self._hidden(replace(measured, gradient=self._noisy(measured.gradient)))
        scalars = measured.scalars
        if self._plan.share_directions and self._plan.estimator == "tangent":
            scalars = scalars.mean(1, keepdims=True)
        with np.errstate(over="ignore"):
            told = self._noisy(scalars.astype(np.float32))
        return self._hidden(replace(measured, scalars=told.astype(np.float64)))

    def _noisy(self, values: FloatArray) -> FloatArray:
        if not self._plan.noise:
            return values
        deviation = np.float32(self._plan.noise * reach(self._plan))
        return values + deviation * self._draw(values.size).reshape(values.shape)

    def _hidden(self, measured: Measurement) -> Measurement:
        return replace(measured, loss=0.0) if self._plan.noise else measured

    def rows(self, contract: Contract, batches: int) -> int:
        """See Estimator.rows."""
        return self._inner.rows(contract, batches)

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._inner.gradient(learnt, seed, step, modules)


def spent(epsilon: float, bound: float) -> str:
    """Why a device takes no part any more; empty while it may spend more. A bound of 0 is none."""
    if not bound or epsilon <= bound:
        return ""
    return f"{SPENT} {epsilon:.3g} after this round, at most {bound:g} is allowed"


def exposure(seed: int, steps: int, examples: int, rows: int) -> int:
    """How many Gaussian mechanisms a row's part in a device's first steps amounts to, for the worst row.

    A row that comes twice in a step, where one permutation ends and the next begins or because rows are fewer
    than examples, changes the step by twice the reach: as much as four steps tell of it.
    """
    count = steps * examples
    orders = [row_order(seed, epoch, rows) for epoch in range(-(-count // rows))]
    if not orders:
        return 0
    cells = np.concatenate(orders)[:count] * steps + np.arange(count) // examples
    places, times = np.unique(cells, return_counts=True)
    return int(np.bincount(places // steps, weights=times**2).max())
