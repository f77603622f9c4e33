"""The closed-form head."""

from __future__ import annotations

import numpy as np
import pytest

from prge.head import fit_head


def test_recovers_the_posterior_of_gaussian_classes() -> None:
    """For Gaussian classes of one covariance the log-odds are linear and known."""
    random = np.random.default_rng(0)
    means = np.array([[1.0, 0.0, 0.5], [-0.5, 1.0, 0.0]])
    mix = np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.3, 0.7]])
    labels = (random.random(60_000) < 0.3).astype(np.int64)
    states = means[labels] + random.normal(size=(60_000, 3)) @ mix.T
    head = fit_head(states.astype(np.float32), labels, 2, shrinkage=0.0)
    precision = np.linalg.inv(mix @ mix.T)
    weight = precision @ (means[1] - means[0])
    bias = np.log(0.3 / 0.7) - 0.5 * (means[1] @ precision @ means[1] - means[0] @ precision @ means[0])
    np.testing.assert_allclose(head.weight[1] - head.weight[0], weight, atol=0.06)
    np.testing.assert_allclose(head.bias[1] - head.bias[0], bias, atol=0.06)


def test_stays_finite_with_fewer_rows_than_features() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(20) % 4
    states = random.normal(size=(20, 64)) + np.eye(4, 64)[labels] * 3
    head = fit_head(states.astype(np.float32), labels, 4, shrinkage=0.3)
    assert np.isfinite(head.values).all()
    assert (head.scores(states.astype(np.float32)).argmax(-1) == labels).all()


def test_names_a_class_without_rows() -> None:
    with pytest.raises(ValueError, match=r"\[2\]"):
        fit_head(np.ones((4, 3), np.float32), np.array([0, 1, 0, 1]), 3)
