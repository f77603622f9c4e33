"""From losses of perturbed copies to a gradient.

    variants (query, +-eps) -> losses -> scalar per query -> gradient = mean_i scalar_i * z_i

The variants of a step are laid out in one list and run `copies` at a time, so the number of copies that a
program was exported with changes its speed and nothing else:

    copies = 2q   the paper's P-RGE, one call        copies = 2   inner loop parallel, q calls
    copies = q    outer loop parallel, two calls     copies = 1   MeZO's sequence, 2q calls
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from prge.adapter import Adapter, LoraBStack
from prge.directions import Directions
from prge.engine import Engine, FloatArray
from prge.examples import Batch
from prge.head import Classifier, Head
from prge.objectives import Float64Array, losses, score_gradient, scores


@dataclass(frozen=True)
class Variant:
    """One copy's perturbation: `scale` times the direction of `query`; scale 0 is the clean adapter."""

    query: int
    scale: float


class Estimator(Protocol):
    """How losses of perturbed copies become one scalar per query."""

    @property
    def queries(self) -> int:
        """Random directions of a step."""
        ...

    def variants(self) -> Sequence[Variant]:
        """The perturbed copies that a step needs, in order."""
        ...

    def scalars(self, losses: Float64Array) -> Float64Array:
        """One scalar per query, f64 [queries], from the variants' losses, f64 [variants]."""
        ...


@dataclass(frozen=True)
class Antithetic:
    """Two-sided differences, the paper's (arXiv 2409.15520).

    scalar_i = (L(B + eps z_i) - L(B - eps z_i)) / (2 eps)
    """

    queries: int
    epsilon: float

    def variants(self) -> Sequence[Variant]:
        """All positive copies, then all negative ones."""
        return [Variant(query, sign * self.epsilon) for sign in (1, -1) for query in range(self.queries)]

    def scalars(self, losses: Float64Array) -> Float64Array:
        """Central differences, f64 [queries]."""
        above, below = losses[: self.queries], losses[self.queries :]
        slopes: Float64Array = (above - below) / (2 * self.epsilon)
        return slopes


@dataclass(frozen=True)
class OneSided:
    """One-sided differences with a baseline: 1 + q copies, or q with `leave-one-out`.

    clean          scalar_i = (L(B + eps z_i) - L(B)) / eps
    leave-one-out  scalar_i = (L_i - mean of the other L_j) / eps
    With `normalize`, the standard deviation of the perturbed losses stands in for eps: FZOO's step
    (arXiv 2506.09034), which shrinks where the loss is steep.
    """

    queries: int
    epsilon: float
    baseline: Literal["clean", "leave-one-out"] = "clean"
    normalize: bool = False

    def variants(self) -> Sequence[Variant]:
        """The clean copy where the baseline needs one, then one copy per query."""
        clean = [Variant(0, 0.0)] if self.baseline == "clean" else []
        return clean + [Variant(query, self.epsilon) for query in range(self.queries)]

    def scalars(self, losses: Float64Array) -> Float64Array:
        """Differences to the baseline, f64 [queries]."""
        perturbed = losses[-self.queries :]
        if self.baseline == "clean":
            difference: Float64Array = perturbed - losses[0]
        else:
            others = (perturbed.sum() - perturbed) / (self.queries - 1)
            difference = perturbed - others
        unit = float(perturbed.std()) if self.normalize else self.epsilon
        slopes: Float64Array = difference / unit if unit > 0 else np.zeros_like(difference)
        return slopes


def clipped(scalars: Float64Array, limit: float) -> Float64Array:
    """Scalars shrunk together until their root mean square is at most `limit`; 0 leaves them.

    For random signs that root mean square estimates the gradient's norm, so this is clipping by norm.
    Gradients of single examples have heavy tails, and the few largest would drown the rest.
    """
    size = float(np.sqrt((scalars**2).mean()))
    return scalars * (limit / size) if limit and size > limit else scalars


@dataclass(frozen=True)
class Measurement:
    """What the engine answered in one step.

    `losses` f64 [variants]: mean over the step's examples. `head_gradient`: exact derivative of the mean loss
    by the head's values, f32 [size], averaged over the variants; None without a trained head.
    """

    losses: Float64Array
    head_gradient: FloatArray | None
    engine_seconds: float
    rows: int


def measure(
    engine: Engine,
    adapter: Adapter,
    stack: LoraBStack,
    variants: Sequence[Variant],
    directions: Directions,
    batches: Iterable[Batch],
    classifier: Classifier | None = None,
    trained_head: Head | None = None,
) -> Measurement:
    """Loss of every variant of the adapter over all batches: ceil(variants / copies) calls per batch.

    An encoder's states are scored by `classifier`; the derivative by `trained_head` is measured on the way.
    """
    contract = engine.contract
    batches = list(batches)
    examples = sum(batch.examples for batch in batches)
    total = np.zeros(len(variants))
    head_gradient = np.zeros(trained_head.size) if trained_head is not None else None
    engine_seconds, rows = 0.0, 0
    for start in range(0, len(variants), contract.copies):
        chunk = variants[start : start + contract.copies]
        for copy in range(contract.copies):
            # Copies beyond the last variant repeat it; their rows are computed and not read.
            variant = chunk[min(copy, len(chunk) - 1)]
            stack.fill(copy, perturbed(adapter, variant, directions))
        for batch in batches:
            inputs = batch.inputs(contract.copies, contract.is_encoder)
            begin = time.perf_counter()
            outputs = engine.forward({**inputs, **stack.inputs})
            engine_seconds += time.perf_counter() - begin
            rows += contract.rows
            batch_scores = scores(batch, outputs, contract.copies, classifier)[: len(chunk)]
            total[start : start + len(chunk)] += losses(batch_scores, batch.labels).sum(-1)
            if trained_head is not None and head_gradient is not None:
                real = batch.owner >= 0
                pooled = outputs["pooled"].reshape(contract.copies, len(real), -1)[: len(chunk), real]
                head_gradient += trained_head.gradient(pooled, score_gradient(batch_scores, batch.labels))
    if head_gradient is not None:
        head_gradient /= examples * len(variants)
    return Measurement(
        total / examples,
        None if head_gradient is None else head_gradient.astype(np.float32),
        engine_seconds,
        rows,
    )


def perturbed(adapter: Adapter, variant: Variant, directions: Directions) -> FloatArray:
    """The adapter's values moved along one direction, f32 [size]."""
    if variant.scale == 0:
        return adapter.values
    moved = directions(variant.query)
    moved *= np.float32(variant.scale)
    moved += adapter.values
    return moved


def gradient(scalars: Float64Array, directions: Directions) -> FloatArray:
    """mean_i scalar_i * z_i, f32 [size]; summed in query order so that a replay has the same bits."""
    total = np.zeros(directions.size, np.float32)
    for query, scalar in enumerate(scalars):
        term = directions(query)
        term *= np.float32(scalar / len(scalars))
        total += term
    return total
