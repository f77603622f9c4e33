"""Costs and settings of the estimators in the table."""

from __future__ import annotations

import pytest

from prge.training.estimators.protocol import Step
from prge.training.estimators.table import ESTIMATORS, EstimatorFlags, EstimatorName, make_estimator
from tests.numpy_engine import NumpyEngine, make_nonzero_adapter
from tests.rows import random_completions


@pytest.mark.parametrize(
    ("name", "copies", "directions", "passes"),
    [("exact", 1, 0, 3), ("tangent", 1, 5, 6), ("antithetic", 10, 0, 10), ("fzoo", 6, 0, 6)],
)
def test_a_step_of_five_queries_has_known_costs(
    name: EstimatorName, copies: int, directions: int, passes: int
) -> None:
    entry = ESTIMATORS[name]
    assert (entry.copies(5), entry.directions(5), entry.passes(5)) == (copies, directions, passes)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_measures_a_projected_gradient_for_each_query(name: EstimatorName) -> None:
    engine = NumpyEngine()
    step = Step(make_nonzero_adapter(engine), random_completions(3), 1, 0)
    queries = 5 if ESTIMATORS[name].has_directions else None
    result = make_estimator(EstimatorFlags(estimator=name, queries=queries)).measure(engine, step)
    assert (result.gradient is None) == (queries is not None)
    assert len(result.projected_gradients) == (queries or 0)
