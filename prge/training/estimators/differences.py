"""Zeroth-order estimators: gradients from finite differences of losses of perturbed adapters.

    perturbations +-eps z_i -> losses -> projected gradient g_i per query -> gradient = mean_i g_i * z_i

All perturbed adapters of a step are the copies of one call, so that P-RGE's outer loop (over queries) and
inner loop (over signs) are one forward pass.
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
    """The perturbation of one copy: `scale` times the direction of `query`; 0: none."""

    query: int
    scale: float


class FiniteDifference(Protocol):
    """A finite-difference formula: perturbations of the adapter, and what their losses give."""

    def perturbations(self) -> Sequence[Perturbation]:
        """Return the perturbation of each copy that a step needs, in order."""
        ...

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """Return the projected gradient of each query, f64 [queries].

        Args:
            losses: losses of the perturbed copies, f64 [copies].
        """
        ...


@dataclass(frozen=True)
class Antithetic:
    """Central differences, as in the P-RGE paper (arXiv 2409.15520); two copies per query.

    projected_gradient_i = (L(B + eps z_i) - L(B - eps z_i)) / (2 eps)
    """

    queries: int
    epsilon: float

    def perturbations(self) -> Sequence[Perturbation]:
        """Return all positive perturbations, then all negative ones."""
        return [Perturbation(query, sign * self.epsilon) for sign in (1, -1) for query in range(self.queries)]

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """Return central differences, f64 [queries]."""
        positive, negative = losses[: self.queries], losses[self.queries :]
        projected_gradients: Float64Array = (positive - negative) / (2 * self.epsilon)
        return projected_gradients


@dataclass(frozen=True)
class OneSided:
    """One-sided differences from the unperturbed adapter, as in FZOO (arXiv 2506.09034); 1 + queries copies.

    projected_gradient_i = (L(B + eps z_i) - L(B)) / standard deviation of the perturbed losses

    Dividing by the standard deviation makes steps smaller where the loss is steep. Without `normalize` the
    difference is divided by eps, which gives a derivative that can be compared with other estimators'.
    """

    queries: int
    epsilon: float
    normalize: bool = True

    def perturbations(self) -> Sequence[Perturbation]:
        """Return the empty perturbation, then one perturbation per query."""
        return [Perturbation(0, 0.0), *(Perturbation(query, self.epsilon) for query in range(self.queries))]

    def projected_gradients(self, losses: Float64Array) -> Float64Array:
        """Return the differences from the unperturbed loss, f64 [queries]."""
        perturbed = losses[1:]
        difference: Float64Array = perturbed - losses[0]
        unit = float(perturbed.std()) if self.normalize else self.epsilon
        return difference / unit if unit > 0 else np.zeros_like(difference)


class Differences:
    """Implements protocol.Estimator with finite differences: one projected gradient per query.

    The gradient of a trained head is its exact gradient, averaged over the perturbed copies.

    Args:
        rule: the finite-difference formula.
        max_grad_norm: upper bound for the root mean square of the projected gradients; 0: no clipping.
    """

    def __init__(self, rule: FiniteDifference, max_grad_norm: float = 0.0) -> None:
        self.rule = rule
        self.max_grad_norm = max_grad_norm

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Measure the mean loss of every perturbed copy, with one call of the engine."""
        perturbations = self.rule.perturbations()
        directions = DirectionSampler(step.seed, step.number, step.adapter.size)
        adapters = np.empty((len(perturbations), step.adapter.size), np.float32)
        for copy, perturbation in enumerate(perturbations):
            adapters[copy] = perturb_adapter(step.adapter, perturbation, directions)
        begin = engine.seconds
        loss = step.loss(engine.forward(Call(sequences_of(step.examples), adapters)))
        mean = loss.losses.sum(-1) / len(step.examples)
        return Measurement(
            float(mean.mean()),
            clip_by_rms(self.rule.projected_gradients(mean), self.max_grad_norm),
            step.head_gradient([loss]),
            engine.seconds - begin,
        )

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """Return mean_i projected_gradient_i * z_i, f32 [size].

        The terms are added in the order of the queries, so that a replay has the same bits.
        """
        projected_gradients = np.asarray(record["projected_gradients"], np.float64)
        directions = DirectionSampler(seed, step, adapter_size(modules))
        total = np.zeros(directions.size, np.float32)
        for query, projected_gradient in enumerate(projected_gradients):
            term = directions(query)
            term *= np.float32(projected_gradient / len(projected_gradients))
            total += term
        return total


def perturb_adapter(
    adapter: Adapter, perturbation: Perturbation, directions: Callable[[int], FloatArray]
) -> FloatArray:
    """Return the adapter's values plus a perturbation, f32 [size].

    Args:
        adapter: the adapter; it isn't changed.
        perturbation: which direction to add, and its scale.
        directions: returns the direction of a query as a new array, f32 [size].
    """
    if perturbation.scale == 0:
        return adapter.values
    values = directions(perturbation.query)
    values *= np.float32(perturbation.scale)
    values += adapter.values
    return values
