"""An encoder's classification head: a few thousand numbers in the driver, fitted in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from prge.engine import Float64Array, FloatArray, IntArray

# Singular values of states in float32 that are smaller than this share of the greatest are none.
_ROUNDING = 1e-7


class Classifier(Protocol):
    """What turns pooled states into class scores."""

    def scores(self, pooled: FloatArray, rows: Sequence[int]) -> Float64Array:
        """Class scores, f64 [..., examples, classes], of states [..., examples, width].

        Args:
            pooled: the states.
            rows: number of each example in its data file.
        """
        ...

    def slopes(self, tangents: FloatArray, rows: Sequence[int]) -> Float64Array:
        """Derivatives of the scores, f64 [..., examples, classes], from those of the states.

        Args:
            tangents: derivatives of the states, [..., examples, width].
            rows: as for `scores`.
        """
        ...

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Weight and bias that score each example, f32 [examples, classes, width] and [examples, classes]."""
        ...


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

    def scores(self, pooled: FloatArray, rows: Sequence[int] = ()) -> Float64Array:
        """Class scores, f64 [..., classes], of pooled states [..., width]; the same for all rows."""
        return self.slopes(pooled) + self.bias

    def slopes(self, tangents: FloatArray, rows: Sequence[int] = ()) -> Float64Array:
        """Derivatives of the scores, f64 [..., classes], from those of the states [..., width]."""
        # A matrix product may add in another order for another number of rows, einsum doesn't.
        slopes: Float64Array = np.einsum(
            "...w,cw->...c", np.asarray(tangents, np.float64), self.weight.astype(np.float64)
        )
        return slopes

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """See Classifier.layers."""
        count = len(rows)
        weight, bias = self.weight, self.bias
        return np.broadcast_to(weight, (count, *weight.shape)), np.broadcast_to(bias, (count, *bias.shape))

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


class CrossFittedHeads:
    """Heads for the training rows themselves: each row is scored by one that was fitted without it.

    A head is sure of the rows that it was fitted on, and a loss that is low already teaches little.
    Row number r belongs to fold r modulo the number of folds.
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = tuple(heads)

    def scores(self, pooled: FloatArray, rows: Sequence[int]) -> Float64Array:
        """See Classifier.scores."""
        heads = self._heads_of(rows)
        return np.stack([head.scores(pooled[..., i, :]) for i, head in enumerate(heads)], -2)

    def slopes(self, tangents: FloatArray, rows: Sequence[int]) -> Float64Array:
        """See Classifier.slopes."""
        heads = self._heads_of(rows)
        return np.stack([head.slopes(tangents[..., i, :]) for i, head in enumerate(heads)], -2)

    def layers(self, rows: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """See Classifier.layers."""
        heads = self._heads_of(rows)
        return np.stack([head.weight for head in heads]), np.stack([head.bias for head in heads])

    def _heads_of(self, rows: Sequence[int]) -> list[Head]:
        return [self.heads[row % len(self.heads)] for row in rows]


def fit_cross_fitted(
    pooled: FloatArray, labels: IntArray, rows: Sequence[int], classes: int, folds: int
) -> CrossFittedHeads:
    """Fit one head per fold on the rows outside it; `rows` as in `Classifier.scores`, the rest as `fit_head`.

    Raises:
        ValueError: a class has no row outside some fold.
    """
    fold = np.asarray(rows) % folds
    return CrossFittedHeads([fit_head(pooled[fold != k], labels[fold != k], classes) for k in range(folds)])


def fit_head(pooled: FloatArray, labels: IntArray, classes: int) -> Head:
    """Fit a head in closed form, with nothing to tune: ridge regression, calibrated.

    The states are regressed on class indicators. Every row's prediction by the regression on all other rows
    is known in closed form (Allen's PRESS statistic, 1974); linear discriminant analysis of these few numbers
    turns them into log-posteriors. The strength of the ridge is the one whose log-posteriors of left-out rows
    have the lowest cross-entropy, so that the head is as confident as it is right on rows it has not seen.
    However well the classes are apart, no cross-entropy below 1 / (rows + classes) is believed, by Laplace's
    rule of succession: the scores are made smaller.

    Args:
        pooled: states of the training rows, [rows, width].
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
    least = 1 / (rows + classes)
    indicators = np.eye(classes)[labels]
    centre, prior = states.mean(0), indicators.mean(0)
    left, spread, right = _factors(states - centre)
    projected = left.T @ (indicators - prior)
    # States that are all the same have no singular values.
    size = (spread**2).mean() if len(spread) else 0.0
    strengths = 10.0 ** np.arange(2, -6.1, -0.25) * size
    damping = spread[:, None] ** 2 / (spread[:, None] ** 2 + strengths)
    leverages = left**2 @ damping + 1 / rows
    damped = damping[:, :, None] * projected[:, None]
    count = len(strengths)
    fitted = (left @ damped.reshape(len(spread), count * classes)).reshape(rows, count, classes)

    # Without its own row the mean of the indicators leans away from that row, which would tell its class.
    lean = (indicators - prior) / max(rows - 1, 1)
    lowest, head = np.inf, Head(classes, states.shape[1])
    # Of equally good strengths the greatest.
    for index in range(count):
        residual = indicators - prior - fitted[:, index]
        left_out = indicators - residual / np.maximum(1 - leverages[:, index, None], 1e-9) + lean
        weight, bias = _discriminant(left_out, labels, counts / rows)
        scores = left_out @ weight.T + bias
        loss = max(_cross_entropy(scores, labels), least)
        if loss < lowest:
            lowest = loss
            share = _believed(scores, labels, least)
            weight, bias = share * weight, share * bias
            regression = right.T @ (damped[:, index] / spread[:, None])
            head.weight[:] = weight @ regression.T
            head.bias[:] = bias + weight @ (prior - centre @ regression)
    return head


def _factors(centred: Float64Array) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Left vectors, singular values and right vectors of centred states.

    Of many rows by way of their Gram matrix, which is faster. What that loses, singular values below the
    rounding of states in float32, counts for nothing: the weakest ridge damps them to nothing.
    """
    if len(centred) <= centred.shape[1]:
        left, spread, right = np.linalg.svd(centred, full_matrices=False)
        kept = spread > spread[0] * _ROUNDING
        return left[:, kept], spread[kept], right[kept]
    squares, vectors = np.linalg.eigh(centred.T @ centred)
    kept = squares > squares[-1] * _ROUNDING**2
    spread, vectors = np.sqrt(squares[kept]), vectors[:, kept]
    return centred @ (vectors / spread), spread, vectors.T


def _discriminant(
    values: Float64Array, labels: IntArray, prior: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Weight and bias of linear discriminant analysis: log-posteriors of classes of one covariance."""
    means = np.stack([values[labels == c].mean(0) for c in range(len(prior))])
    centred = values - means[labels]
    # Predictions of indicators sum to one, so their covariance has no inverse.
    weight = means @ np.linalg.pinv(centred.T @ centred / len(values), rcond=1e-9, hermitian=True)
    return weight, np.log(prior) - 0.5 * (means * weight).sum(1)


def _believed(scores: Float64Array, labels: IntArray, least: float) -> float:
    """The largest factor, at most 1, with which the scores have no cross-entropy below `least`."""
    low, high = 0.0, 1.0
    if _cross_entropy(scores, labels) >= least:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cross_entropy(middle * scores, labels) >= least else (low, middle)
    return low


def _cross_entropy(scores: Float64Array, labels: IntArray) -> float:
    highest = scores.max(-1, keepdims=True)
    logarithm = np.log(np.exp(scores - highest).sum(-1)) + highest[:, 0]
    return float((logarithm - scores[np.arange(len(labels)), labels]).mean())
