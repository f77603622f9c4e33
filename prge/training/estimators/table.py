"""The table of estimators: for each its role, its settings, its cost per step, and how it is constructed.

Settings, engines, costs, comparisons, fleets and reports read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.training.estimators.differences import Antithetic, Differences, OneSided
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import BACKPROPAGATION_PASSES, Estimator
from prge.training.estimators.tangents import TangentEstimator

EstimatorName = Literal["exact", "tangent", "antithetic", "fzoo"]
DEFAULT_QUERIES = 4


@dataclass(frozen=True)
class EstimatorFlags:
    """The estimator."""

    estimator: EstimatorName | None = None
    """exact: backpropagation; tangent: exact derivatives along random directions (forward mode); antithetic:
    two perturbed copies per query (P-RGE); fzoo: one perturbed copy per query and an unperturbed one, in
    units of the losses' standard deviation. Default: the first of exact, tangent and antithetic that the
    bundle supports."""
    queries: int | None = None
    """Random directions per step; default: 4. Exact gradients need none."""
    share_directions: bool = False
    """tangent: use one direction per query for all examples of a step, instead of one for each example."""
    epsilon: float = 0.05
    """antithetic, fzoo: size of the perturbation of each adapter value."""
    max_grad_norm: float = 0.0
    """Clip a step's gradient to this norm (exact), or its projected gradients to this root mean square, which
    estimates the norm (tangent: those of each example). 0: no clipping. Helps if steps have few examples that
    differ much."""
    max_example_grad_norm: float = 0.0
    """exact: clip the gradient of each example to this norm; every example is then computed alone. For
    differential privacy, which also needs noise, or if a few examples are outliers. 0: no clipping."""


@dataclass(frozen=True)
class EstimatorEntry:
    """One estimator of the table.

    Attributes:
        role: the role of a bundle that the calls of a step use; `forward` is always needed too.
        settings: names of the fields of EstimatorFlags that don't apply to all estimators.
        make: constructs the estimator from settings.
        variants: copies of the adapter in a step, as a function of the number of queries.
        adam_beta2: default of Adam's second coefficient. With Adam's usual 0.999, exact runs of a few hundred
            steps would remember their first gradients until the end.
        tag: tag of the training method on model hubs.
        meaning: a description of the method, in a sentence.
    """

    role: str
    settings: tuple[str, ...]
    make: Callable[[EstimatorFlags], Estimator]
    tag: str
    meaning: str
    variants: Callable[[int], int] = lambda queries: 1
    adam_beta2: float = 0.999

    @property
    def has_directions(self) -> bool:
        """Whether the estimator uses random directions."""
        return "queries" in self.settings

    def copies(self, queries: int | None = None) -> int:
        """Return the number of copies of the adapter in a call."""
        return self.variants(queries or DEFAULT_QUERIES) if self.role == FORWARD else 1

    def directions(self, queries: int | None = None) -> int:
        """Return the number of directions along which a call computes derivatives."""
        return queries or DEFAULT_QUERIES if self.role == JVP else 0

    def passes(self, queries: int | None = None) -> int:
        """Return the cost of a step per sequence, in forward passes."""
        queries = queries or DEFAULT_QUERIES
        if self.role == BACKWARD:
            return BACKPROPAGATION_PASSES
        return 1 + queries if self.role == JVP else self.variants(queries)


def _exact(settings: EstimatorFlags) -> Estimator:
    return Exact(settings.max_grad_norm, settings.max_example_grad_norm)


def _tangents(settings: EstimatorFlags) -> Estimator:
    queries = settings.queries or DEFAULT_QUERIES
    return TangentEstimator(queries, settings.share_directions, settings.max_grad_norm)


def _antithetic(settings: EstimatorFlags) -> Estimator:
    rule = Antithetic(settings.queries or DEFAULT_QUERIES, settings.epsilon)
    return Differences(rule, settings.max_grad_norm)


def _fzoo(settings: EstimatorFlags) -> Estimator:
    rule = OneSided(settings.queries or DEFAULT_QUERIES, settings.epsilon)
    return Differences(rule, settings.max_grad_norm)


# Best first.
ESTIMATORS: dict[EstimatorName, EstimatorEntry] = {
    "exact": EstimatorEntry(
        role=BACKWARD,
        settings=("max_example_grad_norm",),
        make=_exact,
        adam_beta2=0.98,
        tag="backpropagation",
        meaning="Exact gradients: every step computes the gradient by backpropagation.",
    ),
    "tangent": EstimatorEntry(
        role=JVP,
        settings=("queries", "share_directions"),
        make=_tangents,
        tag="forward-mode-differentiation",
        meaning="Tangents: forward passes only; every step computes exact derivatives of the loss along a "
        "few random directions. Their mean is a noisy estimate of the gradient.",
    ),
    "antithetic": EstimatorEntry(
        role=FORWARD,
        settings=("queries", "epsilon"),
        make=_antithetic,
        variants=lambda queries: 2 * queries,
        tag="zeroth-order",
        meaning="P-RGE (arXiv 2409.15520): forward passes only; every step compares the losses of two "
        "perturbed copies of the adapter along a few random directions, a noisy estimate of the gradient.",
    ),
    "fzoo": EstimatorEntry(
        role=FORWARD,
        settings=("queries", "epsilon"),
        make=_fzoo,
        variants=lambda queries: 1 + queries,
        tag="zeroth-order",
        meaning="FZOO (arXiv 2506.09034): forward passes only; every step compares the losses of perturbed "
        "copies of the adapter with that of the unperturbed one, in units of their deviation, along "
        "a few random directions, a noisy estimate of the gradient.",
    ),
}


def available_estimators(roles: Collection[str]) -> list[EstimatorName]:
    """Return the estimators that a bundle with these roles supports, best first."""
    return [name for name, entry in ESTIMATORS.items() if entry.role in roles]


def estimators_with_setting(setting: str) -> list[EstimatorName]:
    """Return the estimators that a setting applies to."""
    return [name for name, entry in ESTIMATORS.items() if setting in entry.settings]


def make_estimator(settings: EstimatorFlags) -> Estimator:
    """Construct the estimator of the settings; raises ValueError if they name none."""
    if settings.estimator is None:
        raise ValueError("the settings name no estimator")
    return ESTIMATORS[settings.estimator].make(settings)
