"""Differences of losses between copies of the adapter: from losses of perturbed copies to a gradient.

    variants (query, +-eps) -> losses -> scalar per query -> gradient = mean_i scalar_i * z_i

The variants of a step are laid out in one list and run `copies` at a time, so the number of copies of a call
changes its speed and nothing else:

    copies = 2q   the paper's P-RGE, one call        copies = 2   inner loop parallel, q calls
    copies = q    outer loop parallel, two calls     copies = 1   MeZO's sequence, 2q calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prge.contract import AdaptedModule, Contract
from prge.engine import Engine, Float64Array, FloatArray
from prge.files.adapter import Adapter, AdapterStack, adapter_size
from prge.learning.estimators.directions import Directions
from prge.learning.estimators.protocol import Calls, Measurement, Step, clipped


@dataclass(frozen=True)
class Variant:
    """One copy's perturbation: `scale` times the direction of `query`; scale 0 is the clean adapter."""

    query: int
    scale: float


class Rule(Protocol):
    """Which copies are compared, and how their losses become one scalar per query."""

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
    """One-sided differences to a clean copy: 1 + q copies.

    scalar_i = (L(B + eps z_i) - L(B)) / deviation of the perturbed losses

    That is FZOO's step (arXiv 2506.09034), which shrinks where the loss is steep. Without `normalize` the
    unit is eps: a derivative, as it is to be compared with others.
    """

    queries: int
    epsilon: float
    normalize: bool = True

    def variants(self) -> Sequence[Variant]:
        """The clean copy, then one copy per query."""
        return [Variant(0, 0.0), *(Variant(query, self.epsilon) for query in range(self.queries))]

    def scalars(self, losses: Float64Array) -> Float64Array:
        """Differences to the clean copy, f64 [queries]."""
        perturbed = losses[1:]
        difference: Float64Array = perturbed - losses[0]
        unit = float(perturbed.std()) if self.normalize else self.epsilon
        return difference / unit if unit > 0 else np.zeros_like(difference)


class Differences:
    """Implements protocol.Estimator on stacks of copies: one scalar per query.

    The gradient of a trained head is the mean over the variants.
    """

    def __init__(self, rule: Rule, clip: float = 0.0) -> None:
        self.rule = rule
        self.clip = clip
        self._stack: AdapterStack | None = None

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Loss of every variant over all batches: ceil(variants / copies) calls per batch."""
        contract = engine.contract
        variants = self.rule.variants()
        directions = Directions(step.seed, step.number, step.adapter.size)
        stack = self._stack_of(contract)
        answers: list[list[FloatArray]] = [[] for _ in step.batches]
        calls = Calls(engine, step.trained_head)
        for start in range(0, len(variants), contract.copies):
            chunk = variants[start : start + contract.copies]
            for copy in range(contract.copies):
                # Copies beyond the last variant repeat it; their rows are computed and not read.
                variant = chunk[min(copy, len(chunk) - 1)]
                stack.fill(copy, perturbed(step.adapter, variant, directions))
            for batch, parts in zip(step.batches, answers, strict=True):
                inputs = batch.inputs(contract.copies, contract.is_encoder)
                outputs = calls.forward({**inputs, **stack.inputs})
                parts.append(outputs[contract.answer][: len(chunk) * contract.batch_size])
        total = np.zeros(len(variants))
        # All variants at once: what a loss takes of other examples must be the same for each of them.
        for batch, parts in zip(step.batches, answers, strict=True):
            loss = step.loss(batch, np.concatenate(parts), len(variants))
            total += loss.losses.sum(-1)
            calls.learn_head(loss)
        mean = total / step.examples
        return Measurement(
            float(mean.mean()),
            clipped(self.rule.scalars(mean), self.clip),
            calls.head_gradient(step.examples * len(variants)),
            calls.seconds,
            self.rows(contract, len(step.batches)),
        )

    def rows(self, contract: Contract, batches: int) -> int:
        """See protocol.Estimator.rows."""
        rounds = -(-len(self.rule.variants()) // contract.copies)
        return contract.computed_rows * rounds * batches

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """mean_i scalar_i * z_i, f32 [size]; summed in query order so that a replay has the same bits."""
        scalars = np.asarray(learnt["scalars"], np.float64)
        directions = Directions(seed, step, adapter_size(modules))
        total = np.zeros(directions.size, np.float32)
        for query, scalar in enumerate(scalars):
            term = directions(query)
            term *= np.float32(scalar / len(scalars))
            total += term
        return total

    def _stack_of(self, contract: Contract) -> AdapterStack:
        stack = self._stack
        if stack is None or (stack.modules, stack.copies) != (contract.modules, contract.copies):
            self._stack = stack = AdapterStack(contract.modules, contract.copies)
        return stack


def perturbed(adapter: Adapter, variant: Variant, directions: Callable[[int], FloatArray]) -> FloatArray:
    """The adapter's values moved along one direction, f32 [size]; `directions` makes that of a query."""
    if variant.scale == 0:
        return adapter.values
    moved = directions(variant.query)
    moved *= np.float32(variant.scale)
    moved += adapter.values
    return moved
