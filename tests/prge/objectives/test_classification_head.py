"""The closed-form head."""

from __future__ import annotations

import numpy as np
import pytest

from prge.objectives.classification_head import Head, fit_cross_fitted, fit_head


def test_a_head_recovers_the_posterior_of_gaussian_classes() -> None:
    """The log-odds of Gaussian classes of one covariance are linear and known."""
    random = np.random.default_rng(0)
    means = np.array([[1.0, 0.0, 0.5], [-0.5, 1.0, 0.0]])
    mix = np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.3, 0.7]])
    labels = (random.random(60_000) < 0.3).astype(np.int64)
    states = means[labels] + random.normal(size=(60_000, 3)) @ mix.T
    head = fit_head(states.astype(np.float32), labels, 2)
    precision = np.linalg.inv(mix @ mix.T)
    weight = precision @ (means[1] - means[0])
    bias = np.log(0.3 / 0.7) - 0.5 * (means[1] @ precision @ means[1] - means[0] @ precision @ means[0])
    np.testing.assert_allclose(head.weight[1] - head.weight[0], weight, atol=0.06)
    np.testing.assert_allclose(head.bias[1] - head.bias[0], bias, atol=0.06)


def test_a_head_stays_finite_with_fewer_rows_than_features() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(20) % 4
    states = random.normal(size=(20, 64)) + np.eye(4, 64)[labels] * 3
    head = fit_head(states.astype(np.float32), labels, 4)
    assert np.isfinite(head.values).all()
    assert (head.scores(states.astype(np.float32)).argmax(-1) == labels).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [4, 16])
def test_identical_states_give_the_class_frequencies(rows: int) -> None:
    head = fit_head(np.ones((rows, 8), np.float32), np.arange(rows) % 4 // 3, 2)
    scores = head.scores(np.ones((1, 8), np.float32))
    assert scores[0, 0] - scores[0, 1] == pytest.approx(np.log(3), rel=0.4)


def test_a_class_without_rows_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[2\]"):
        fit_head(np.ones((4, 3), np.float32), np.array([0, 1, 0, 1]), 3)


def test_a_head_is_as_confident_as_it_is_right_on_unseen_rows() -> None:
    """With more features than rows, a plain fit would be sure of everything and often wrong."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 3, 2400)
    states = random.normal(size=(2400, 300)) + 1.5 * np.eye(3, 300)[labels]
    head = fit_head(states[:400].astype(np.float32), labels[:400], 3)
    scores = head.scores(states[400:].astype(np.float32))
    confidence = np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True))).max(-1)
    right = scores.argmax(-1) == labels[400:]
    assert right.mean() > 0.55
    assert abs(confidence.mean() - right.mean()) < 0.05


@pytest.mark.parametrize("rows", [60, 150, 300, 301, 302, 600])
def test_a_head_learns_nothing_from_noise(rows: int) -> None:
    """A row must not give its own class away when it is left out, whatever the ratio of rows to features."""
    random = np.random.default_rng(5)
    labels = np.arange(rows) % 2
    head = fit_head(random.normal(size=(rows, 300)).astype(np.float32), labels, 2)
    scores = head.scores(random.normal(size=(1000, 300)).astype(np.float32))
    loss = np.log(np.exp(scores).sum(-1)) - scores[np.arange(1000), np.arange(1000) % 2]
    assert loss.mean() < 1.3 * np.log(2)


def test_a_head_is_never_more_confident_than_its_rows_allow() -> None:
    """Rows that were never wrong only show that an error is rarer than one in their number."""
    random = np.random.default_rng(4)
    labels = np.arange(30) % 3
    states = (random.normal(size=(30, 8)) * 1e-6 + np.eye(3, 8)[labels]).astype(np.float32)
    scores = fit_head(states, labels, 3).scores(states)
    confidence = np.exp(scores.max(-1)) / np.exp(scores).sum(-1)
    assert (scores.argmax(-1) == labels).all()
    # On its own rows, it is slightly more confident than on rows that were left out.
    np.testing.assert_allclose(-np.log(confidence).mean(), 1 / 33, rtol=0.3)


def test_the_scale_of_the_states_does_not_matter() -> None:
    random = np.random.default_rng(2)
    labels = np.arange(100) % 2
    states = (random.normal(size=(100, 10)) + labels[:, None]).astype(np.float32)
    small, large = fit_head(states, labels, 2), fit_head(states * 1000, labels, 2)
    np.testing.assert_allclose(small.scores(states), large.scores(states * 1000), rtol=1e-3, atol=1e-3)


def test_more_rows_than_features_give_the_same_head_by_another_algorithm() -> None:
    """Features that are always zero change only the algorithm, which depends on rows and features."""
    random = np.random.default_rng(6)
    labels = random.integers(0, 3, 90)
    states = (random.normal(size=(90, 12)) @ random.normal(size=(12, 12)) + np.eye(3, 12)[labels]).astype(
        np.float32
    )
    states[:, 11] = states[:, 0]  # a redundant feature
    wide = np.concatenate([states, np.zeros((90, 100), np.float32)], 1)
    short, long = fit_head(states, labels, 3), fit_head(wide, labels, 3)
    np.testing.assert_allclose(short.weight, long.weight[:, :12], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(short.bias, long.bias, rtol=1e-4, atol=1e-6)


def test_a_cross_fitted_head_never_saw_the_row_it_scores() -> None:
    random = np.random.default_rng(3)
    rows = random.permutation(60).tolist()
    labels = random.integers(0, 2, 60)
    states = random.normal(size=(60, 8)).astype(np.float32)
    heads = fit_cross_fitted(states, labels, rows, 2, folds=5)
    result = heads.scores(np.stack([states, 2 * states]), rows)
    assert result.shape == (2, 60, 2)
    for i, row in enumerate(rows):
        others = [j for j, other in enumerate(rows) if other % 5 != row % 5]
        alone = fit_head(states[others], labels[others], 2)
        np.testing.assert_allclose(result[0, i], alone.scores(states[i]))
        np.testing.assert_allclose(result[1, i], alone.scores(2 * states[i]))


def test_one_head_scores_all_rows_equally() -> None:
    head = Head(2, 3)
    head.values[:] = np.arange(8)
    states = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(
        head.scores(states, [1, 2, 3, 4]), np.tile([[0 + 1 + 2 + 6, 3 + 4 + 5 + 7]], (4, 1))
    )
