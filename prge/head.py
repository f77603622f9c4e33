"""An encoder's classification head: a few thousand numbers in the driver, fitted in closed form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prge.engine import FloatArray, IntArray

Float64Array = NDArray[np.float64]


class Head:
    """Linear head: scores = pooled @ weight.T + bias, kept as one flat f32 vector `values`.

    `weight` f32 [classes, width] and `bias` f32 [classes] are views of it.
    """

    def __init__(self, classes: int, width: int) -> None:
        self.values: FloatArray = np.zeros(classes * (width + 1), np.float32)
        self.weight: FloatArray = self.values[: classes * width].reshape(classes, width)
        self.bias: FloatArray = self.values[classes * width :]

    @property
    def size(self) -> int:
        """Number of trained values."""
        return self.values.size

    def scores(self, pooled: FloatArray) -> Float64Array:
        """Class scores, f64 [..., classes], of pooled states [..., width]."""
        scores: Float64Array = np.asarray(pooled, np.float64) @ self.weight.T.astype(np.float64) + self.bias
        return scores

    def gradient(self, pooled: FloatArray, score_gradient: Float64Array) -> Float64Array:
        """Exact derivative of the summed loss by `values`, f64 [size].

        Args:
            pooled: [copies, examples, width].
            score_gradient: derivative of each example's loss by its scores, [copies, examples, classes].
        """
        classes, width = self.weight.shape
        by_score = score_gradient.reshape(-1, classes)
        by_weight = by_score.T @ np.asarray(pooled, np.float64).reshape(-1, width)
        return np.concatenate([by_weight.ravel(), by_score.sum(0)])


def fit_head(pooled: FloatArray, labels: IntArray, classes: int, shrinkage: float = 0.1) -> Head:
    """Linear discriminant analysis with a shrunk covariance: calibrated scores in closed form.

        weight_c = S^-1 mean_c        bias_c = log(prior_c) - mean_c . S^-1 mean_c / 2
        S = (1 - shrinkage) * within-class covariance + shrinkage * its mean variance * I

    Args:
        pooled: states of the training rows, [rows, width].
        labels: class of each row, i64 [rows]; every class must occur.
        classes: number of classes.
        shrinkage: 0 to 1; more for fewer rows (Ledoit and Wolf 2004 give the reasons).

    Raises:
        ValueError: a class has no row.
    """
    states = np.asarray(pooled, np.float64)
    counts = np.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise ValueError(f"classes without a row: {np.flatnonzero(counts == 0).tolist()}")
    means = np.stack([states[labels == c].mean(0) for c in range(classes)])
    centred = states - means[labels]
    covariance = centred.T @ centred / len(states)
    width = states.shape[1]
    target = np.trace(covariance) / width
    shrunk = (1 - shrinkage) * covariance + shrinkage * target * np.eye(width)
    weight = np.linalg.solve(shrunk, means.T).T
    head = Head(classes, width)
    head.weight[:] = weight
    head.bias[:] = np.log(counts / len(states)) - 0.5 * (means * weight).sum(1)
    return head
