"""The classification head of an encoder: a linear layer outside of the engine, fitted in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from prge.engine import Float64Array, FloatArray, IntArray

# Singular values below this share of the largest one are rounding errors of float32 states.
_ROUNDING = 1e-7


class Classifier(Protocol):
    """Computes class scores from an encoder's pooled states."""

    def scores(self, pooled: FloatArray, rows: Sequence[int]) -> Float64Array:
        """Return class scores, f64 [..., examples, classes].

        Args:
            pooled: pooled states, [..., examples, width].
            rows: number of each example's row in its data file.
        """
        ...

    def jvp(self, tangents: FloatArray, rows: Sequence[int]) -> Float64Array:
        """Return the tangents of the scores, f64 [..., examples, classes].

        Args:
            tangents: tangents of the pooled states, [..., examples, width].
            rows: as for `scores`.
        """
        ...

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Return each example's weight f32 [examples, classes, width] and bias f32 [examples, classes]."""
        ...


class Head:
    """A linear classification head: scores = pooled @ weight.T + bias.

    Attributes:
        values: all parameters as one flat vector, f32 [classes * (width + 1)].
        weight: view of `values`, f32 [classes, width].
        bias: view of `values`, f32 [classes].
    """

    def __init__(self, classes: int, width: int) -> None:
        self.values: FloatArray = np.zeros(classes * (width + 1), np.float32)
        self.weight: FloatArray = self.values[: classes * width].reshape(classes, width)
        self.bias: FloatArray = self.values[classes * width :]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.values.size

    def scores(self, pooled: FloatArray, rows: Sequence[int] = ()) -> Float64Array:
        """Return class scores, f64 [..., classes], of pooled states [..., width]; the rows don't matter."""
        return self.jvp(pooled) + self.bias

    def jvp(self, tangents: FloatArray, rows: Sequence[int] = ()) -> Float64Array:
        """Return the tangents of the scores, f64 [..., classes], of tangents of the states [..., width]."""
        # The order in which a matrix product adds may depend on the number of rows; that of einsum doesn't.
        scores: Float64Array = np.einsum(
            "...w,cw->...c", np.asarray(tangents, np.float64), self.weight.astype(np.float64)
        )
        return scores

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """See Classifier.layers."""
        count = len(rows)
        weight, bias = self.weight, self.bias
        return np.broadcast_to(weight, (count, *weight.shape)), np.broadcast_to(bias, (count, *bias.shape))

    def gradient(self, pooled: FloatArray, score_gradient: Float64Array) -> Float64Array:
        """Return the exact gradient of the summed loss with respect to `values`, f64 [size].

        Args:
            pooled: pooled states, [copies, examples, width].
            score_gradient: gradients of the losses with respect to the scores, [copies, examples, classes].
        """
        classes, width = self.weight.shape
        grad_scores = score_gradient.reshape(-1, classes)
        grad_weight = grad_scores.T @ np.asarray(pooled, np.float64).reshape(-1, width)
        return np.concatenate([grad_weight.ravel(), grad_scores.sum(0)])


class CrossFittedHeads:
    """Heads for training rows: each row is scored by a head that was fitted without the row's fold.

    A head is overconfident on the rows that it was fitted on, and a loss that is already low has small
    gradients. Row number r belongs to fold r modulo the number of folds.
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = tuple(heads)

    def scores(self, pooled: FloatArray, rows: Sequence[int]) -> Float64Array:
        """See Classifier.scores."""
        heads = self._heads_of(rows)
        return np.stack([head.scores(pooled[..., i, :]) for i, head in enumerate(heads)], -2)

    def jvp(self, tangents: FloatArray, rows: Sequence[int]) -> Float64Array:
        """See Classifier.jvp."""
        heads = self._heads_of(rows)
        return np.stack([head.jvp(tangents[..., i, :]) for i, head in enumerate(heads)], -2)

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """See Classifier.layers."""
        heads = self._heads_of(rows)
        return np.stack([head.weight for head in heads]), np.stack([head.bias for head in heads])

    def _heads_of(self, rows: Sequence[int]) -> list[Head]:
        return [self.heads[row % len(self.heads)] for row in rows]


def fit_cross_fitted(
    pooled: FloatArray, labels: IntArray, rows: Sequence[int], classes: int, folds: int
) -> CrossFittedHeads:
    """Fit one head per fold, on the rows outside of that fold.

    Args:
        pooled: pooled states of the training rows, [rows, width].
        labels: class of each row, i64 [rows].
        rows: number of each row in its data file.
        classes: number of classes.
        folds: number of folds.

    Raises:
        ValueError: a class has no row outside of a fold.
    """
    fold = np.asarray(rows) % folds
    return CrossFittedHeads([fit_head(pooled[fold != k], labels[fold != k], classes) for k in range(folds)])


def fit_head(pooled: FloatArray, labels: IntArray, classes: int) -> Head:
    """Fit a head in closed form, without hyperparameters: calibrated ridge regression.

    1. Ridge regression predicts class indicators from the states. The prediction for each row by a regression
       on all other rows has a closed form (Allen's PRESS statistic, 1974).
    2. Linear discriminant analysis of these leave-one-out predictions gives log-posteriors.
    3. The ridge strength is the one whose leave-one-out log-posteriors have the lowest cross-entropy, so that
       the head's confidence matches its accuracy on unseen rows.
    4. Scores are scaled down until their cross-entropy is at least 1 / (rows + classes), by Laplace's rule of
       succession: even perfectly separated classes don't justify more confidence.

    Args:
        pooled: pooled states of the training rows, [rows, width].
        labels: class of each row, i64 [rows]; every class must occur.
        classes: number of classes.

    Raises:
        ValueError: a class has no row.
    """
    states = np.asarray(pooled, np.float64)
    counts = np.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise ValueError(f"classes without a row: {np.flatnonzero(counts == 0).tolist()}")
    rows = len(states)
    min_loss = 1 / (rows + classes)
    indicators = np.eye(classes)[labels]
    centre, prior = states.mean(0), indicators.mean(0)
    left, singular, right = _svd(states - centre)
    projected = left.T @ (indicators - prior)
    # Identical states have no singular values.
    size = (singular**2).mean() if len(singular) else 0.0
    strengths = 10.0 ** np.arange(2, -6.1, -0.25) * size
    damping = singular[:, None] ** 2 / (singular[:, None] ** 2 + strengths)
    leverages = left**2 @ damping + 1 / rows
    damped = damping[:, :, None] * projected[:, None]
    count = len(strengths)
    fitted = (left @ damped.reshape(len(singular), count * classes)).reshape(rows, count, classes)

    # Leaving a row out moves the mean of the indicators away from its class, which would reveal that class.
    mean_shift = (indicators - prior) / max(rows - 1, 1)
    lowest, head = np.inf, Head(classes, states.shape[1])
    # Strengths are in descending order: of equally good ones the strongest is kept.
    for index in range(count):
        residual = indicators - prior - fitted[:, index]
        left_out = indicators - residual / np.maximum(1 - leverages[:, index, None], 1e-9) + mean_shift
        weight, bias = _discriminant(left_out, labels, counts / rows)
        scores = left_out @ weight.T + bias
        loss = max(_cross_entropy(scores, labels), min_loss)
        if loss < lowest:
            lowest = loss
            scale = _max_scale(scores, labels, min_loss)
            weight, bias = scale * weight, scale * bias
            regression = right.T @ (damped[:, index] / singular[:, None])
            head.weight[:] = weight @ regression.T
            head.bias[:] = bias + weight @ (prior - centre @ regression)
    return head


def _svd(centred: Float64Array) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return the left singular vectors, singular values and right singular vectors of centred states.

    With more rows than features, the Gram matrix is decomposed, which is faster. It loses singular values
    below the rounding of float32 states, which don't matter: even the weakest ridge damps them to 0.
    """
    if len(centred) <= centred.shape[1]:
        left, singular, right = np.linalg.svd(centred, full_matrices=False)
        significant = singular > singular[0] * _ROUNDING
        return left[:, significant], singular[significant], right[significant]
    squares, vectors = np.linalg.eigh(centred.T @ centred)
    significant = squares > squares[-1] * _ROUNDING**2
    singular, vectors = np.sqrt(squares[significant]), vectors[:, significant]
    return centred @ (vectors / singular), singular, vectors.T


def _discriminant(
    values: Float64Array, labels: IntArray, prior: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return weight and bias of linear discriminant analysis: log-posteriors of the classes."""
    means = np.stack([values[labels == c].mean(0) for c in range(len(prior))])
    centred = values - means[labels]
    # Predicted indicators add up to 1, so their covariance is singular.
    weight = means @ np.linalg.pinv(centred.T @ centred / len(values), rcond=1e-9, hermitian=True)
    return weight, np.log(prior) - 0.5 * (means * weight).sum(1)


def _max_scale(scores: Float64Array, labels: IntArray, min_loss: float) -> float:
    """Return the largest scale, at most 1, with a cross-entropy of the scores of at least `min_loss`."""
    low, high = 0.0, 1.0
    if _cross_entropy(scores, labels) >= min_loss:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cross_entropy(middle * scores, labels) >= min_loss else (low, middle)
    return low


def _cross_entropy(scores: Float64Array, labels: IntArray) -> float:
    highest = scores.max(-1, keepdims=True)
    logarithm = np.log(np.exp(scores - highest).sum(-1)) + highest[:, 0]
    return float((logarithm - scores[np.arange(len(labels)), labels]).mean())
