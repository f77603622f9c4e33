"""Backpropagation on the engine: the gradient itself, in one call per batch.

    batch, classifier -> what describes the loss -> engine -> answers and gradient by the adapter

The engine sums its examples' losses with the weights that it is given, so that batches add up to the
gradient of the step's mean loss. A journal keeps the gradient: nothing smaller would do to make it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prge.contract import ABSENT, GRADIENT_PREFIX, AdaptedModule, Contract
from prge.engine import Array, Engine, FloatArray
from prge.errors import ConfigError, RunError
from prge.estimators import Calls, Float64Array, Measurement, Step
from prge.examples import Batch, Example
from prge.head import Classifier
from prge.journal import GRADIENT, decode_array
from prge.objectives import losses, score_gradient, scores

# A backward counts as two forwards wherever rows are compared, though past frozen weights it costs about one.
ROWS_OF_A_STEP = 3


class Exact:
    """Implements prge.estimators.Estimator with the gradient itself.

    `clip` bounds the norm of a step's gradient, `clip_examples` that of every example's before they are added
    up, for batches of one example; 0 leaves them.
    """

    def __init__(self, clip: float = 0.0, clip_examples: float = 0.0) -> None:
        self.clip = clip
        self.clip_examples = clip_examples

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Loss of every example and the gradient of their mean: one call per batch.

        Raises:
            ValueError: examples are clipped, and a batch has several.
        """
        if self.clip_examples and any(batch.examples != 1 for batch in step.batches):
            raise ValueError("only the gradient of a batch of one example is an example's")
        contract = engine.contract
        lora_b = step.adapter.inputs()
        gradient = np.zeros(step.adapter.size)
        calls, loss = Calls(engine, step.trained_head), 0.0
        for batch in step.batches:
            inputs = {**batch.inputs(1, contract.is_encoder), **lora_b}
            outputs = calls.forward(inputs | loss_inputs(contract, batch, step.examples, step.classifier))
            of_batch = np.concatenate(
                [outputs[GRADIENT_PREFIX + module.name].ravel() for module in contract.modules], dtype=float
            )
            # What the engine answers is the example's share of the mean.
            gradient += shortened(of_batch, self.clip_examples / step.examples)
            batch_scores = scores(batch, outputs, 1, step.classifier)
            loss += float(losses(batch_scores, batch.labels).sum())
            if step.trained_head is not None:
                by_score = score_gradient(batch_scores, batch.labels)
                calls.learn_head(outputs["pooled"][None, batch.owner >= 0], by_score)
        return Measurement(
            loss / step.examples,
            np.zeros(0),
            calls.head_gradient(step.examples),
            calls.seconds,
            self.rows(contract, len(step.batches)),
            gradient=shortened(gradient, self.clip).astype(np.float32),
        )

    def rows(self, contract: Contract, batches: int) -> int:
        """See prge.estimators.Estimator.rows."""
        return ROWS_OF_A_STEP * contract.rows * batches

    def gradient(
        self, learnt: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """The gradient that was measured, f32 [size].

        Raises:
            RunError: a journal has forgotten it.
        """
        if GRADIENT not in learnt:
            raise RunError(
                f"the journal has no gradient of step {step}: it keeps those since the newest checkpoint",
                remedy="a run with --keep-gradients can be replayed",
            )
        return decode_array(learnt[GRADIENT])


def shortened(gradient: Float64Array, limit: float) -> Float64Array:
    """A gradient whose norm is at most `limit`; 0 leaves it."""
    return gradient * (limit / max(float(np.linalg.norm(gradient)), limit)) if limit else gradient


def loss_inputs(
    contract: Contract, batch: Batch, examples: int, classifier: Classifier | None = None
) -> dict[str, Array]:
    """What an exact call is told of its loss: the batch's part of the mean over the step's `examples`.

    A completion's loss is minus its score, that of a candidate the log-sum-exp of all scores minus its own.
    """
    table = (contract.rows, contract.candidates)
    real = np.arange(batch.examples)
    offsets, labels = np.full(table, ABSENT, np.float32), np.zeros(table, np.float32)
    offsets[real] = np.where(np.arange(table[1]) < batch.candidates[:, None], 0.0, ABSENT)
    labels[real, np.maximum(batch.labels, 0)] = 1 / examples
    shares = np.zeros((contract.rows, 1), np.float32)
    shares[real, 0] = (batch.labels >= 0) / examples
    inputs: dict[str, Array] = {"offsets": offsets, "labels": labels, "shares": shares}
    if classifier is not None:
        heads = np.zeros((*table, contract.width), np.float32)
        weights, biases = classifier.layers(batch.rows)
        classes = biases.shape[1]
        heads[real, :classes], offsets[real, :classes] = weights, biases
        return {**inputs, "heads": heads}
    read = batch.owner >= 0
    return {
        **inputs,
        "weights": np.where(read[:, None], batch.weights, 0.0).astype(np.float32),
        "cells": np.where(read[:, None], batch.owner[:, None] * table[1] + batch.candidate, 0),
    }


def answer_slopes(contract: Contract, answers: FloatArray, inputs: Mapping[str, Array]) -> FloatArray:
    """Derivative of the loss by the answers, f32 of their shape, from what `loss_inputs` says of it.

    answers -> scores [rows, candidates] -> shares * softmax(scores) - labels -> derivative by the answers
    """
    if contract.is_encoder:
        heads = inputs["heads"]
        scores = np.matmul(heads, answers[:, :, None])[:, :, 0] + inputs["offsets"]
        by_score = _by_score(scores, inputs)
        return np.asarray(np.matmul(by_score[:, None], heads)[:, 0], np.float32)
    weights, cells = inputs["weights"], inputs["cells"]
    scores = inputs["offsets"].astype(np.float64)
    np.add.at(scores.reshape(-1), cells.ravel(), (answers * weights).ravel())
    return np.asarray(weights * _by_score(scores, inputs).reshape(-1)[cells], np.float32)


def _by_score(scores: Array, inputs: Mapping[str, Array]) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Array = powers / powers.sum(-1, keepdims=True) * inputs["shares"]
    return shares - inputs["labels"]


def check_single_sequences(examples: Sequence[Example]) -> None:
    """Raise ConfigError if an example whose gradient is to be clipped takes several rows of a call."""
    widest = max(examples, key=lambda example: len(example.sequences))
    if len(widest.sequences) > 1:
        raise ConfigError(
            "--clip-examples takes examples of one sequence each:",
            [f"row {widest.row} has {len(widest.sequences)} sequences, one for each of its candidates"],
            remedy="leave --clip-examples out, or bound the norm of a step's gradient with --clip",
        )


def check_candidates(contract: Contract, examples: Sequence[Example]) -> None:
    """Raise ConfigError if an example has more candidates than the loss of a call has room for."""
    most = max(examples, key=lambda example: example.candidates)
    if most.candidates > contract.candidates:
        raise ConfigError(
            "the rows don't fit the bundle:",
            [
                f"row {most.row} has {most.candidates} candidates, the loss of a call has room for "
                f"{contract.candidates}"
            ],
            remedy=f"give a larger --batch-size than {contract.batch_size}",
        )
