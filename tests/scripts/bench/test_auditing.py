"""Audits prove true bounds, and large ones where much can be proven."""

from __future__ import annotations

import math

import numpy as np
import pytest
from auditing import audit, interval

from prge.training.privacy_accounting import epsilon_of

DELTA = 1e-5


@pytest.mark.parametrize(("hits", "trials"), [(0, 30), (1, 30), (17, 40), (39, 40), (50, 50)])
def test_an_interval_has_the_probabilities_that_define_it(hits: int, trials: int) -> None:
    random = np.random.default_rng(hits)
    low, high = interval(hits, trials, 0.1)
    assert 0 <= low < high <= 1
    if hits:
        assert (random.binomial(trials, low, 200_000) >= hits).mean() == pytest.approx(0.1, abs=0.004)
    if hits < trials:
        assert (random.binomial(trials, high, 200_000) <= hits).mean() == pytest.approx(0.1, abs=0.004)


def _counts(random: np.random.Generator, noise: float, trials: int) -> tuple[int, int, int]:
    """Count normal samples that are nearer to their mean with the row."""
    inside, outside = random.normal(1 / noise, size=trials), random.normal(size=trials)
    return int((inside >= 0.5 / noise).sum()), int((outside >= 0.5 / noise).sum()), trials


@pytest.mark.parametrize("noise", [0.7, 1.0, 2.0])
def test_normals_are_proven_to_be_nearly_as_far_apart_as_they_are(noise: float) -> None:
    result = audit(*_counts(np.random.default_rng(1), noise, 4_000), DELTA)
    true = epsilon_of([(noise, 1)], DELTA)
    assert 0.7 * true < result.gaussian <= true
    assert 0.1 * true < result.epsilon <= result.gaussian


def test_an_audit_is_rarely_wrong() -> None:
    """An audit is wrong at most one time in 20."""
    random, true = np.random.default_rng(2), epsilon_of([(1.0, 1)], DELTA)
    audits = [audit(*_counts(random, 1.0, 200), DELTA) for _ in range(200)]
    assert sum(result.gaussian > true for result in audits) <= 15
    assert not any(result.epsilon > true for result in audits)


def test_events_that_need_the_row_prove_much_and_no_events_prove_nothing() -> None:
    assert audit(100, 0, 2000, DELTA).epsilon > math.log(20)
    assert audit(2000, 2000, 2000, DELTA).epsilon == audit(0, 0, 2000, DELTA).epsilon == 0.0
    assert audit(1000, 1000, 2000, DELTA) == audit(0, 2000, 2000, DELTA)
