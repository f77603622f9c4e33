"""Rows to scalars on the stock engine: differences, tangents and the exact gradient say the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.opening import open_engines
from prge.engine import Engine, FloatArray
from prge.files.bundle import open_bundle
from prge.learning.estimators.differences import Antithetic, Differences
from prge.learning.estimators.directions import Directions
from prge.learning.estimators.exact import Exact
from prge.learning.estimators.protocol import Estimator, Step
from prge.learning.estimators.tangents import Tangents
from prge.learning.examples import Example
from prge.learning.sampling import Sampler
from tests.compilers import needs_compiler
from tests.rows import choice, completion
from tests.templates import random_adapter

pytestmark = needs_compiler

QUERIES = 3
ROWS: dict[str, Sequence[Example]] = {
    "completions": [completion(row, [1, row + 3, row + 7, 9, row + 11], 2) for row in range(1, 9)],
    "candidates": [choice(row, [1, row + 3, row + 7], [40, 41], row % 2) for row in range(1, 9)],
}


@pytest.fixture(scope="module")
def engines(workshop: Path) -> dict[str, Engine]:
    """Of one bundle: for an exact step, tangents, and one copy, two, q and 2q copies in a call."""
    bundle = open_bundle(workshop / "bundle")
    contracts = {
        "exact": bundle.chain.contract("back", 2),
        "tangent": bundle.chain.contract("tangent", 2, queries=QUERIES),
        **{str(n): bundle.chain.contract("stack", 2, copies=n) for n in (1, 2, QUERIES, 2 * QUERIES)},
    }
    return {name: open_engines(bundle, contract, 1, "native").step for name, contract in contracts.items()}


def step_of(engine: Engine, rows: str) -> Step:
    batches = Sampler(ROWS[rows], engine.contract, seed=1, calls=2).batches(0)
    return Step(random_adapter(engine.contract.modules, size=0.05), batches, 1, 0)


def gradient(engine: Engine, estimator: Estimator, rows: str) -> FloatArray:
    found = estimator.measure(engine, step_of(engine, rows)).gradient
    assert found is not None
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_small_differences_are_the_gradient_along_their_directions(
    engines: dict[str, Engine], rows: str
) -> None:
    exact = gradient(engines["exact"], Exact(), rows)
    directions = Directions(1, 0, len(exact))
    expected = [directions(query) @ exact for query in range(QUERIES)]
    engine = engines[str(2 * QUERIES)]
    found = Differences(Antithetic(QUERIES, 1e-3)).measure(engine, step_of(engine, rows)).scalars
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=5e-3)
    assert np.abs(expected).max() > 0.3


@pytest.mark.parametrize("rows", ROWS)
def test_tangents_are_the_gradient_along_their_directions(engines: dict[str, Engine], rows: str) -> None:
    """Whatever the examples, the mean over all of u v^T is what the exact gradient says."""
    exact, engine = gradient(engines["exact"], Exact(), rows), engines["tangent"]
    estimator = Tangents(shared=True)
    measured = estimator.measure(engine, step_of(engine, rows))
    moved = estimator.gradient(measured.learnt, 1, 0, engine.contract.modules)
    # Of several directions z_i the estimate is mean_i <g, z_i> z_i.
    assert exact @ moved == pytest.approx(float((measured.scalars.mean(-1) ** 2).mean()), rel=1e-3)
