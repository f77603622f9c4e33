"""Local differential privacy: noise on what a device sends, and what it amounts to.

Neighbours are two files of which one lacks what one row says: its part is replaced by nothing, wherever it
comes. How many rows there are is public. With `--unit owner` one of them lacks what all rows say.

A step's report is a sum over rows. Each row's part is clipped to a norm, cut toward zero to whole numbers of
a public grid, and added up; so the sum is exact, and one row changes it by at most that norm. Discrete
Gaussian noise of 2^20 grid units makes the step a mechanism; what is told follows from the noisy sum alone.

A device takes its rows in one order over and over, a step never has one twice: of n steps a row takes part
in as many as there are passes over the rows, and no luck of sampling is counted. A text of several windows
is one row: its windows take turns. prge/training/privacy_accounting.py tells what epsilon that is. For scalars of
zeroth-order steps: DP-ZO, Tang et al. 2024, arXiv 2401.04343.

Why epsilon is that of continuous noise: normals of variance s^2 - 16, rounded to whole numbers at random by
a discrete Gaussian of deviation 4, are the discrete Gaussian of deviation s but for a factor within 1e-130
of 1 (Peikert 2010, "An efficient and parallel Gaussian sampler for lattices", theorem 3.1), and move along
with the whole number that is hidden. So the noise tells at most what normals of that smaller variance do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runner.fleet.agreement import Plan
from device_runner.fleet.privacy.discrete_gaussian import discrete_gaussian
from prge.engine import Engine, Float64Array, FloatArray
from prge.model_spec import AdaptedModule
from prge.training.estimators.protocol import Estimator, Measurement, Step

SPENT = "privacy_epsilon would be"
GRID_BITS = 20
# The deviation of the normals above, as a share of the noise.
COUNTED = math.sqrt(1 - 16 / 4.0**GRID_BITS)
# Norms and quotients are rounded by less.
_ROUNDING = 1e-9
Whole = NDArray[np.int64]
Draw = Callable[[int], Whole]
system_noise: Draw = partial(discrete_gaussian, GRID_BITS)


def part_norm(plan: Plan) -> float:
    """Largest norm of an example's part in a step's sum.

    The clipped root mean square of an example's scalars over q queries is at most `clip`, so their norm is
    clip * sqrt(q); an exact gradient's norm is at most `clip`.
    """
    return plan.clip * math.sqrt(plan.queries) if plan.sends_projected_gradients else plan.clip


def sensitivity(plan: Plan) -> float:
    """How far the unit, a row or all that the owner has, can change a step's mean over examples."""
    return part_norm(plan) / (1 if plan.unit == "owner" else plan.examples)


def grid(plan: Plan) -> float:
    """What one whole number stands for in a step's sum: noise has 2^20 of it."""
    return plan.noise * sensitivity(plan) * plan.examples / 2**GRID_BITS


def whole_sum(parts: Float64Array, norm: float, unit: float) -> Whole:
    """Sum of examples' parts on a grid, i64 [n]; each changes it by at most norm / unit, whatever it is.

    Args:
        parts: f64 [examples, n]; one with a value that isn't finite counts as nothing.
        norm: which longer parts are shortened to.
        unit: of the grid.
    """
    parts = np.where(np.isfinite(parts).all(1, keepdims=True), parts, 0.0)
    with np.errstate(over="ignore"):
        sizes = np.sqrt((parts * parts).sum(1, keepdims=True))
    short = parts * (norm * (1 - _ROUNDING) / np.maximum(sizes, norm))
    return np.trunc(short / unit).astype(np.int64).sum(0)


class ReportingEstimator:
    """Implements Estimator: measures what a device reports, and so follows exactly that itself.

    Scalars of one direction for all examples become their mean; noise is added where the plan has it, and the
    loss is left out then, for it would say what the noise hides; scalars are rounded to the float32 of a
    message.
    """

    def __init__(self, inner: Estimator, plan: Plan, draw: Draw = system_noise) -> None:
        self._inner = inner
        self._plan = plan
        self._draw = draw

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """See Estimator.measure."""
        if self._plan.noise:
            return self._with_noise(engine, step)
        measured = self._inner.measure(engine, step)
        if measured.gradient is not None:
            return measured
        scalars = measured.projected_gradients
        if self._plan.share_directions and self._plan.estimator == "tangent":
            scalars = scalars.mean(1, keepdims=True)
        return _told(measured, scalars)

    def _with_noise(self, engine: Engine, step: Step) -> Measurement:
        """Whatever the rows are, nothing but the noisy sum leaves this, not even a refusal."""
        plan, unit = self._plan, grid(self._plan)
        total: Any = 0
        # An exact gradient is an example's where there is no other.
        groups = (
            [step.examples] if plan.sends_projected_gradients else [[example] for example in step.examples]
        )
        for examples in groups:
            with np.errstate(all="ignore"):
                measured = self._inner.measure(engine, replace(step, examples=examples))
            derivatives: Float64Array = np.asarray(measured.derivatives, np.float64)
            # Scalars are [queries, examples], or [queries] of one example as a gradient is [size].
            parts = derivatives.T if derivatives.ndim == 2 else derivatives[None]
            total = total + whole_sum(parts, part_norm(plan), unit)
        noisy: Float64Array = (total + self._draw(parts.shape[1])) * (unit / plan.examples)
        hidden = replace(measured, loss=0.0, largest_tangent=None)
        if measured.gradient is not None:
            return replace(hidden, gradient=noisy.astype(np.float32))
        return _told(hidden, noisy.reshape(plan.shape))

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._inner.gradient(learnt, seed, step, modules)


def _told(measured: Measurement, scalars: Float64Array) -> Measurement:
    with np.errstate(over="ignore"):
        return replace(measured, projected_gradients=scalars.astype(np.float32).astype(np.float64))


def spent(epsilon: float, bound: float) -> str:
    """Why a device takes no part any more; empty while it may spend more. A bound of 0 is none."""
    if not bound or epsilon <= bound:
        return ""
    why = ", for earlier rounds had no noise" if math.isinf(epsilon) else ""
    return f"{SPENT} {epsilon:.3g} after this round{why}, at most {bound:g} is allowed"


def exposure(steps: int, examples: int, rows: int) -> int:
    """In how many of a device's steps one after another a row takes part at most; `examples` <= `rows`."""
    return -(-steps * examples // rows)
