"""How much of what differences measure is signal: against a reference, or against a neighbouring epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from device_runner.session.settings import RunSettings
from prge.engine import Engine, Float64Array
from prge.files.adapter import Adapter
from prge.learning.estimators.differences import Antithetic, Differences, OneSided, Rule
from prge.learning.estimators.protocol import Estimator, Step
from prge.learning.estimators.table import DEFAULT_QUERIES
from prge.learning.examples import Batch
from prge.learning.head import Classifier
from prge.learning.sampling import Sampler

# To a smooth loss two epsilons this near are one; rounding falls out differently.
NEIGHBOUR = math.sqrt(2)
POOR = 0.9
STEPS_OF_A_NOTE = 4
LEAST_NOISE = 1e-6
WITHOUT_NOISE = "exact tangents have no such noise: --estimator tangent"


@dataclass(frozen=True)
class Agreement:
    """How far scalars follow a reference: found = slope * reference + what is left.

    `r` is their correlation about zero. Directions have no sign of their own, so the mean of true scalars is
    zero, and a mean that differs from it is an error as any other. It is 0 where there is nothing to compare.
    """

    r: float
    slope: float

    @property
    def signal_to_noise(self) -> float:
        """Power of what follows the reference over power of what is left; at most 1e6."""
        signal = max(self.r, 0.0) ** 2
        return signal / max(1 - signal, LEAST_NOISE)


@dataclass(frozen=True)
class Neighbours:
    """How scalars at an epsilon agree with their neighbour's, and what a scalar costs in rows.

    `agreement` is of the two. `between` is of the slopes from the one step to the other with the first ones:
    these have no part of the way in common. Where rounding makes the loss a staircase, or the steps are so
    large that the loss has levelled off, neighbours agree all the same, and these don't.
    """

    agreement: Agreement
    between: Agreement
    rows_per_scalar: float


def compare(scalars: Float64Array, reference: Float64Array) -> Agreement:
    """How far scalars follow a reference of the same shape; scalars that are not finite don't at all."""
    y, x = scalars.ravel(), reference.ravel()
    lengths = float(np.linalg.norm(y)), float(np.linalg.norm(x))
    if not all(0 < length < math.inf for length in lengths):
        return Agreement(0.0, 0.0)
    r = float((y / lengths[0]) @ (x / lengths[1]))
    return Agreement(min(max(r, -1.0), 1.0), r * lengths[0] / lengths[1])


def slopes(queries: int, epsilon: float) -> dict[str, Rule]:
    """Differences by their estimator, as slopes, which can be compared whatever their epsilon."""
    return {"antithetic": Antithetic(queries, epsilon), "fzoo": OneSided(queries, epsilon, normalize=False)}


def neighbours_agree(
    estimators: tuple[Estimator, Estimator],
    engine: Engine,
    adapter: Adapter,
    steps: Sequence[Sequence[Batch]],
    seed: int,
    classifier: Classifier | None = None,
) -> Neighbours:
    """Compare the scalars of an estimator with those of its neighbour.

    Args:
        estimators: the same one at an epsilon and at NEIGHBOUR times that.
        engine: runs stacks of copies.
        adapter: where the gradient is asked for.
        steps: the batches of each step to measure.
        seed: of the directions.
        classifier: scores an encoder's states.
    """
    here, beyond = (
        [
            estimator.measure(engine, Step(adapter, batches, seed, step, classifier))
            for step, batches in enumerate(steps)
        ]
        for estimator in estimators
    )
    near, far = (np.stack([measurement.scalars for measurement in side]) for side in (here, beyond))
    between = (NEIGHBOUR * far - near) / (NEIGHBOUR - 1)
    rows = sum(measurement.rows for measurement in here)
    return Neighbours(compare(far, near), compare(between, near), rows / near.size)


def noise_note(
    settings: RunSettings, engine: Engine, adapter: Adapter, sampler: Sampler, head: Classifier | None
) -> str:
    """One line on the noise that a run's differences have in int8 activations, from its first steps.

    Args:
        settings: of the run, settled.
        engine: runs the steps.
        adapter: where the run starts.
        sampler: answers the run's batches.
        head: the classifier of the training rows, or None.
    """
    epsilons = (settings.epsilon, settings.epsilon * NEIGHBOUR)
    queries, name = settings.queries or DEFAULT_QUERIES, settings.estimator
    first, second = (Differences(slopes(queries, epsilon)[name or "antithetic"]) for epsilon in epsilons)
    steps = [sampler.batches(step) for step in range(STEPS_OF_A_NOTE)]
    agreement = neighbours_agree((first, second), engine, adapter, steps, settings.seed, head).agreement
    sizes = " and ".join(f"{epsilon:.3g}" for epsilon in epsilons)
    note = f"int8 activations: differences at epsilon {sizes} agree with r = {agreement.r:.2f}"
    return f"{note}; {WITHOUT_NOISE}" if agreement.r < POOR else note
