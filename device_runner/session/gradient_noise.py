"""How much of what differences measure is signal: against derivatives, or against a neighbouring epsilon."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from device_runner.session.settings import RunSettings
from prge.engine import Engine, Float64Array
from prge.formats.adapter import Adapter
from prge.objectives.classification_head import Classifier
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.training.estimators.differences import Antithetic, Differences, FiniteDifference, OneSided
from prge.training.estimators.protocol import Step
from prge.training.estimators.table import DEFAULT_QUERIES
from prge.training.sampler import Sampler

# To a smooth loss two epsilons this near are one; rounding falls out differently.
NEIGHBOUR = math.sqrt(2)
POOR = 0.9
STEPS_OF_A_NOTE = 4


@dataclass(frozen=True)
class GradientAgreement:
    """How far scalars follow a reference: found = slope * reference + what is left.

    `r` is their correlation about zero. Directions have no sign of their own, so the mean of true scalars is
    zero, and a mean that differs from it is an error as any other. It is 0 where there is nothing to compare.
    """

    r: float
    slope: float


def compare(scalars: Float64Array, reference: Float64Array) -> GradientAgreement:
    """How far scalars follow a reference of the same shape; scalars that are not finite don't at all."""
    y, x = scalars.ravel(), reference.ravel()
    lengths = float(np.linalg.norm(y)), float(np.linalg.norm(x))
    if not all(0 < length < math.inf for length in lengths):
        return GradientAgreement(0.0, 0.0)
    r = float((y / lengths[0]) @ (x / lengths[1]))
    return GradientAgreement(min(max(r, -1.0), 1.0), r * lengths[0] / lengths[1])


def slopes(queries: int, epsilon: float) -> dict[str, FiniteDifference]:
    """Differences by their estimator, as slopes, which can be compared whatever their epsilon."""
    return {"antithetic": Antithetic(queries, epsilon), "fzoo": OneSided(queries, epsilon, normalize=False)}


def noise_note(
    settings: RunSettings,
    engine: Engine,
    adapter: Adapter,
    sampler: Sampler,
    head: Classifier | None,
    objective: Objective = CROSS_ENTROPY,
) -> str:
    """One line on the noise that a run's differences have in int8 activations, from its first steps.

    Args:
        settings: of the run, settled.
        engine: runs the steps.
        adapter: where the run starts.
        sampler: answers the run's batches.
        head: the classifier of the training rows, or None.
        objective: of the run.
    """
    queries, name = settings.queries or DEFAULT_QUERIES, settings.estimator or "antithetic"
    epsilons = (settings.epsilon, settings.epsilon * NEIGHBOUR)
    near, far = (
        np.stack(
            [
                Differences(slopes(queries, epsilon)[name])
                .measure(
                    engine, Step(adapter, sampler.batch(step), settings.seed, step, head, None, objective)
                )
                .projected_gradients
                for step in range(STEPS_OF_A_NOTE)
            ]
        )
        for epsilon in epsilons
    )
    r = compare(far, near).r
    sizes = " and ".join(f"{epsilon:.3g}" for epsilon in epsilons)
    note = f"int8 activations: differences at epsilon {sizes} agree with r = {r:.2f}"
    return f"{note}; exact tangents have no such noise: --estimator tangent" if r < POOR else note
