"""Differences of losses between copies of the adapter: from losses of perturb_adapter copies to a gradient.

    variants (query, +-eps) -> losses -> scalar per query -> gradient = mean_i scalar_i * z_i

All variants of a step are the copies of one call: the paper's outer and inner loop at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prge.engine import Call, Engine, Float64Array, FloatArray
from prge.formats.adapter import Adapter, adapter_size
from prge.model_spec import AdaptedModule
from prge.objectives.examples import sequences_of
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.protocol import Measurement, Step, clip_by_rms


@dataclass(frozen=True)
class Perturbation:
    """One copy's perturbation: `scale` times the direction of `query`; scale 0 is the clean adapter."""

    query: int
    scale: float


class FiniteDifference(Protocol):
    """Which copies are compared, and how their losses become one scalar per query."""

    def perturbations(self) -> Sequence[Perturbation]:
        """The perturb_adapter copies that a step needs, in order."""
        ...

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """One scalar per query, f64 [queries], from the variants' losses, f64 [variants]."""
        ...


@dataclass(frozen=True)
class Antithetic:
    """Two-sided differences, the paper's (arXiv 2409.15520).

    scalar_i = (L(B + eps z_i) - L(B - eps z_i)) / (2 eps)
    """

    queries: int
    epsilon: float

    def perturbations(self) -> Sequence[Perturbation]:
        """All positive copies, then all negative ones."""
        return [Perturbation(query, sign * self.epsilon) for sign in (1, -1) for query in range(self.queries)]

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """Central differences, f64 [queries]."""
        above, below = losses[: self.queries], losses[self.queries :]
        slopes: Float64Array = (above - below) / (2 * self.epsilon)
        return slopes


@dataclass(frozen=True)
class OneSided:
    """One-sided differences to a clean copy: 1 + q copies.

    scalar_i = (L(B + eps z_i) - L(B)) / deviation of the perturb_adapter losses

    That is FZOO's step (arXiv 2506.09034), which shrinks where the loss is steep. Without `normalize` the
    unit is eps: a derivative, as it is to be compared with others.
    """

    queries: int
    epsilon: float
    normalize: bool = True

    def perturbations(self) -> Sequence[Perturbation]:
        """The clean copy, then one copy per query."""
        return [Perturbation(0, 0.0), *(Perturbation(query, self.epsilon) for query in range(self.queries))]

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """Differences to the clean copy, f64 [queries]."""
        perturb_adapter = losses[1:]
        difference: Float64Array = perturb_adapter - losses[0]
        unit = float(perturb_adapter.std()) if self.normalize else self.epsilon
        return difference / unit if unit > 0 else np.zeros_like(difference)


class Differences:
    """Implements protocol.Estimator on stacks of copies: one scalar per query.

    The gradient of a trained head is the mean over the variants.
    """

    def __init__(self, rule: FiniteDifference, clip: float = 0.0) -> None:
        self.rule = rule
        self.clip = clip

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """The loss of every variant over all examples, in one call."""
        variants = self.rule.perturbations()
        directions = DirectionSampler(step.seed, step.number, step.adapter.size)
        adapters = np.empty((len(variants), step.adapter.size), np.float32)
        for copy, variant in enumerate(variants):
            adapters[copy] = perturb_adapter(step.adapter, variant, directions)
        begin = engine.seconds
        loss = step.loss(engine.forward(Call(sequences_of(step.examples), adapters)))
        mean = loss.losses.sum(-1) / len(step.examples)
        return Measurement(
            float(mean.mean()),
            clip_by_rms(self.rule.projected_gradients(mean), self.clip),
            step.head_gradient([loss]),
            engine.seconds - begin,
        )

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """mean_i scalar_i * z_i, f32 [size]; summed in query order so that a replay has the same bits."""
        scalars = np.asarray(learnt["scalars"], np.float64)
        directions = DirectionSampler(seed, step, adapter_size(modules))
        total = np.zeros(directions.size, np.float32)
        for query, scalar in enumerate(scalars):
            term = directions(query)
            term *= np.float32(scalar / len(scalars))
            total += term
        return total


def perturb_adapter(
    adapter: Adapter, variant: Perturbation, directions: Callable[[int], FloatArray]
) -> FloatArray:
    """The adapter's values moved along one direction, f32 [size]; `directions` makes that of a query."""
    if variant.scale == 0:
        return adapter.values
    moved = directions(variant.query)
    moved *= np.float32(variant.scale)
    moved += adapter.values
    return moved
