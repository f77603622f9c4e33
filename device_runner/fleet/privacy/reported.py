"""Local differential privacy: the noise on what a device sends, and the epsilon that follows from it.

Two files are neighbours if one lacks the contribution of one row: it is replaced by zeros wherever the row
takes part. The number of rows is public. With `--unit owner`, one of the files lacks the contributions of all
rows.

A step's report is a sum over rows. Each row's contribution is clipped to a norm, truncated to integers on a
public grid, and summed. The sum is therefore exact, and one row changes it by at most that norm. Discrete
Gaussian noise of 2^20 grid units makes the step a mechanism; the report is a function of the noisy sum only.

A device cycles through its rows in one fixed order, and a step has no row twice. In n steps, a row therefore
takes part as often as there are passes over the rows, and no amplification by sampling is claimed. A text of
several windows is one row, whose windows take turns. prge/training/privacy_accounting.py computes epsilon.
For projected gradients of zeroth-order steps: DP-ZO, Tang et al. 2024, arXiv 2401.04343.

Why the epsilon of continuous noise applies: a normal of variance s^2 - 16, rounded to an integer at random by
a discrete Gaussian of deviation 4, equals the discrete Gaussian of deviation s up to a factor within 1e-130
of 1 (Peikert 2010, "An efficient and parallel Gaussian sampler for lattices", theorem 3.1), and both shift
with the hidden integer. The noise therefore reveals at most what a normal of that smaller variance reveals.
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

BUDGET_EXCEEDED = "privacy_epsilon would be"
GRID_BITS = 20
# Standard deviation of the normal above, relative to that of the noise.
EFFECTIVE_NOISE = math.sqrt(1 - 16 / 4.0**GRID_BITS)
# Bound on the rounding errors of norms and quotients.
_ROUNDING = 1e-9
Whole = NDArray[np.int64]
NoiseSampler = Callable[[int], Whole]
system_noise: NoiseSampler = partial(discrete_gaussian, GRID_BITS)


def part_norm(plan: Plan) -> float:
    """Return the largest norm of an example's contribution to a step's sum.

    The root mean square of an example's projected gradients over q queries is clipped to `max_grad_norm`,
    so their norm is at most max_grad_norm * sqrt(q); an exact gradient's norm is at most `max_grad_norm`.
    """
    return (
        plan.max_grad_norm * math.sqrt(plan.queries) if plan.sends_projected_gradients else plan.max_grad_norm
    )


def sensitivity(plan: Plan) -> float:
    """Return how far the unit (a row, or all rows of the owner) can change a step's mean over examples."""
    return part_norm(plan) / (1 if plan.unit == "owner" else plan.examples)


def grid(plan: Plan) -> float:
    """Return the size of one grid unit in a step's sum: the noise has 2^20 of it."""
    return plan.noise * sensitivity(plan) * plan.examples / 2**GRID_BITS


def whole_sum(parts: Float64Array, norm: float, unit: float) -> Whole:
    """Sum examples' contributions on a grid, i64 [n]; each example changes the sum by at most norm / unit.

    Args:
        parts: f64 [examples, n]; an example with a value that is not finite contributes nothing.
        norm: the norm to which longer contributions are clipped.
        unit: the size of a grid unit.
    """
    parts = np.where(np.isfinite(parts).all(1, keepdims=True), parts, 0.0)
    with np.errstate(over="ignore"):
        sizes = np.sqrt((parts * parts).sum(1, keepdims=True))
    clipped = parts * (norm * (1 - _ROUNDING) / np.maximum(sizes, norm))
    return np.trunc(clipped / unit).astype(np.int64).sum(0)


class ReportingEstimator:
    """Implements Estimator: measures exactly what a device reports, so that the device follows its report.

    Projected gradients that share one direction are averaged over examples. With noise in the plan, noise is
    added and the loss is omitted, because it would reveal what the noise hides. Projected gradients are
    rounded to the float32 of a message.
    """

    def __init__(self, inner: Estimator, plan: Plan, draw: NoiseSampler = system_noise) -> None:
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
        gradients = measured.projected_gradients
        if self._plan.share_directions and self._plan.estimator == "tangent":
            gradients = gradients.mean(1, keepdims=True)
        return _as_reported(measured, gradients)

    def _with_noise(self, engine: Engine, step: Step) -> Measurement:
        """Measure with noise; whatever the rows are, only the noisy sum leaves here, not even a refusal."""
        plan, unit = self._plan, grid(self._plan)
        total: Any = 0
        # The exact gradient of one example needs a call of its own.
        groups = (
            [step.examples] if plan.sends_projected_gradients else [[example] for example in step.examples]
        )
        for examples in groups:
            with np.errstate(all="ignore"):
                measured = self._inner.measure(engine, replace(step, examples=examples))
            derivatives: Float64Array = np.asarray(measured.derivatives, np.float64)
            # [queries, examples]; or of one example: [queries], or a gradient [size].
            parts = derivatives.T if derivatives.ndim == 2 else derivatives[None]
            total = total + whole_sum(parts, part_norm(plan), unit)
        noisy: Float64Array = (total + self._draw(parts.shape[1])) * (unit / plan.examples)
        hidden = replace(measured, loss=0.0, largest_tangent=None)
        if measured.gradient is not None:
            return replace(hidden, gradient=noisy.astype(np.float32))
        return _as_reported(hidden, noisy.reshape(plan.shape))

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self._inner.gradient(learnt, seed, step, modules)


def _as_reported(measured: Measurement, gradients: Float64Array) -> Measurement:
    """Return the measurement with these projected gradients, rounded as in a message."""
    with np.errstate(over="ignore"):
        return replace(measured, projected_gradients=gradients.astype(np.float32).astype(np.float64))


def budget_refusal(epsilon: float, bound: float) -> str:
    """Return why the privacy budget forbids a round; empty if it does not. A bound of 0 means no bound."""
    if not bound or epsilon <= bound:
        return ""
    why = ", because earlier rounds had no noise" if math.isinf(epsilon) else ""
    return f"{BUDGET_EXCEEDED} {epsilon:.3g} after this round{why}, but at most {bound:g} is allowed"


def max_participations(steps: int, examples: int, rows: int) -> int:
    """Return in how many consecutive steps of a device a row takes part at most; `examples` <= `rows`."""
    return -(-steps * examples // rows)
