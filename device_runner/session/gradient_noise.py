"""Noise of finite-difference gradients: their agreement with derivatives, or with another epsilon."""

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

# A smooth loss doesn't change between epsilons this close, but rounding errors do.
EPSILON_RATIO = math.sqrt(2)
POOR_AGREEMENT = 0.9
NOTE_STEPS = 4


@dataclass(frozen=True)
class GradientAgreement:
    """How well projected gradients follow a reference, by a linear regression through zero.

    `r` is their correlation about zero. Directions have no sign of their own, so the true mean is zero, and
    another mean is an error like any other. `r` is 0 without values that differ from zero.
    """

    r: float
    scale: float


def measure_agreement(values: Float64Array, reference: Float64Array) -> GradientAgreement:
    """Compare projected gradients with a reference of the same shape; values that aren't finite give 0."""
    y, x = values.ravel(), reference.ravel()
    lengths = float(np.linalg.norm(y)), float(np.linalg.norm(x))
    if not all(0 < length < math.inf for length in lengths):
        return GradientAgreement(0.0, 0.0)
    r = float((y / lengths[0]) @ (x / lengths[1]))
    return GradientAgreement(min(max(r, -1.0), 1.0), r * lengths[0] / lengths[1])


def difference_rules(queries: int, epsilon: float) -> dict[str, FiniteDifference]:
    """Return finite differences by estimator, as derivatives that don't depend on the size of epsilon."""
    return {"antithetic": Antithetic(queries, epsilon), "fzoo": OneSided(queries, epsilon, normalize=False)}


def noise_note(
    settings: RunSettings,
    engine: Engine,
    adapter: Adapter,
    sampler: Sampler,
    head: Classifier | None,
    objective: Objective = CROSS_ENTROPY,
) -> str:
    """Return a line on how noisy the finite differences of a run's first steps are in int8.

    Args:
        settings: resolved settings of the run.
        engine: engine that runs the steps.
        adapter: adapter that the run starts from.
        sampler: sampler of the run's batches.
        head: classifier of the training rows, or None.
        objective: objective of the run.
    """
    queries, name = settings.queries or DEFAULT_QUERIES, settings.estimator or "antithetic"
    epsilons = (settings.epsilon, settings.epsilon * EPSILON_RATIO)
    reference, values = (
        np.stack(
            [
                Differences(difference_rules(queries, epsilon)[name])
                .measure(
                    engine, Step(adapter, sampler.batch(step), settings.seed, step, head, None, objective)
                )
                .projected_gradients
                for step in range(NOTE_STEPS)
            ]
        )
        for epsilon in epsilons
    )
    r = measure_agreement(values, reference).r
    sizes = " and ".join(f"{epsilon:.3g}" for epsilon in epsilons)
    note = f"int8 activations: finite differences at epsilon {sizes} agree with r = {r:.2f}"
    remedies = "a larger --epsilon has less of this noise, --estimator tangent has none"
    return f"{note}; {remedies}" if r < POOR_AGREEMENT else note
