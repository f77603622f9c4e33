"""The estimators that a run can choose: what each is, needs of a bundle, takes for a step, and is set by.

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
    """exact: the gradient by backpropagation; tangent: exact derivatives along directions; antithetic: two
    perturbed copies a query (P-RGE); fzoo: one copy a query, compared with a clean one in units of the
    losses' deviation. Default: exact, or of a bundle without that role tangent, or antithetic."""
    queries: int | None = None
    """Random directions a step; default: 4. An exact gradient has none."""
    share_directions: bool = False
    """tangent: one direction a query for all examples of a step, instead of one for each."""
    epsilon: float = 1e-2
    """antithetic, fzoo: length of a perturbation, in units of the adapter's values."""
    clip: float = 0.0
    """Largest root mean square of a step's scalars, of each example's with tangents: an estimate of the
    gradient's norm; exact: largest norm of a step's gradient; 0: no clipping. Helps where a step has few
    examples and they differ much."""
    clip_examples: float = 0.0
    """exact: largest norm of each example's gradient; every example is computed alone. For differential
    privacy, which needs noise too, or where few examples are outliers; 0: no clipping."""


@dataclass(frozen=True)
class EstimatorEntry:
    """One estimator.

    Attributes:
        role: what a bundle needs beside `stack`, and what a call of a step computes.
        settings: names of those of EstimatorFlags that it alone, or with few others, has.
        make: the estimator that some settings ask for.
        variants: copies of the adapter that a step of so many queries compares.
        beta2: Adam's second coefficient, where nobody names one. With its usual 0.999, runs of some hundred
            steps would remember their first gradients to the last.
        tag: what model hubs call the kind of training.
        meaning: what a run does, in a sentence.
    """

    role: str
    settings: tuple[str, ...]
    make: Callable[[EstimatorFlags], Estimator]
    tag: str
    meaning: str
    variants: Callable[[int], int] = lambda queries: 1
    beta2: float = 0.999

    @property
    def has_directions(self) -> bool:
        """Whether its steps follow random directions."""
        return "queries" in self.settings

    def copies(self, queries: int | None = None) -> int:
        """Copies of the adapter in a call of so many queries."""
        return self.variants(queries or DEFAULT_QUERIES) if self.role == FORWARD else 1

    def directions(self, queries: int | None = None) -> int:
        """Directions that a call of so many queries has derivatives along."""
        return queries or DEFAULT_QUERIES if self.role == JVP else 0

    def passes(self, queries: int | None = None) -> int:
        """Forward passes that a step of so many queries costs for each sequence."""
        queries = queries or DEFAULT_QUERIES
        if self.role == BACKWARD:
            return BACKPROPAGATION_PASSES
        return 1 + queries if self.role == JVP else self.variants(queries)


def _exact(settings: EstimatorFlags) -> Estimator:
    return Exact(settings.clip, settings.clip_examples)


def _tangents(settings: EstimatorFlags) -> Estimator:
    queries = settings.queries or DEFAULT_QUERIES
    return TangentEstimator(queries, settings.share_directions, settings.clip)


def _antithetic(settings: EstimatorFlags) -> Estimator:
    rule = Antithetic(settings.queries or DEFAULT_QUERIES, settings.epsilon)
    return Differences(rule, settings.clip)


def _fzoo(settings: EstimatorFlags) -> Estimator:
    rule = OneSided(settings.queries or DEFAULT_QUERIES, settings.epsilon)
    return Differences(rule, settings.clip)


# The best first.
ESTIMATORS: dict[EstimatorName, EstimatorEntry] = {
    "exact": EstimatorEntry(
        role=BACKWARD,
        settings=("clip_examples",),
        make=_exact,
        beta2=0.98,
        tag="backpropagation",
        meaning="Exact gradients: every step goes forward and backward through the model and follows the "
        "gradient that backpropagation gives.",
    ),
    "tangent": EstimatorEntry(
        role=JVP,
        settings=("queries", "share_directions"),
        make=_tangents,
        tag="forward-mode-differentiation",
        meaning="Tangents: forward passes only; every step takes exact derivatives of the loss along a few "
        "random directions and follows their mean, a noisy estimate of the gradient.",
    ),
    "antithetic": EstimatorEntry(
        role=FORWARD,
        settings=("queries", "epsilon"),
        make=_antithetic,
        variants=lambda queries: 2 * queries,
        tag="zeroth-order",
        meaning="P-RGE (arXiv 2409.15520): forward passes only; every step compares the losses of two "
        "perturbed copies of the adapter along a few random directions: a noisy estimate of the gradient.",
    ),
    "fzoo": EstimatorEntry(
        role=FORWARD,
        settings=("queries", "epsilon"),
        make=_fzoo,
        variants=lambda queries: 1 + queries,
        tag="zeroth-order",
        meaning="FZOO (arXiv 2506.09034): forward passes only; every step compares the losses of perturbed "
        "copies of the adapter with that of a clean one, along a few random directions, in units of their "
        "deviation: a noisy estimate of the gradient.",
    ),
}


def available_estimators(roles: Collection[str]) -> list[EstimatorName]:
    """The estimators of a bundle with some roles, the best first."""
    return [name for name, entry in ESTIMATORS.items() if entry.role in roles]


def estimators_with_setting(setting: str) -> list[EstimatorName]:
    """The estimators that a setting belongs to."""
    return [name for name, entry in ESTIMATORS.items() if setting in entry.settings]


def make_estimator(settings: EstimatorFlags) -> Estimator:
    """The estimator that settings ask for; ValueError where they name none."""
    if settings.estimator is None:
        raise ValueError("which estimator is not settled")
    return ESTIMATORS[settings.estimator].make(settings)
