"""Backpropagation on the engine: the gradient itself, in one call per batch.

    batch -> engine -> answers -> slope of the mean loss by them -> engine -> gradient by the adapter

Batches add up to the gradient of the step's mean loss. A journal keeps the gradient: nothing smaller would do
to make it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prge.contract import AdaptedModule, Contract, matrices
from prge.engine import Array, Engine, Float64Array, FloatArray
from prge.errors import ConfigError, RunError
from prge.files.journal import GRADIENT, decode_array
from prge.learning.estimators.protocol import Calls, Measurement, Step
from prge.learning.examples import Batch, Example


class Exact:
    """Implements protocol.Estimator with the gradient itself.

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
        adapter = step.adapter.inputs()
        gradient = np.zeros(step.adapter.size)
        calls, loss = Calls(engine, step.trained_head), 0.0
        for batch in step.batches:

            def slope(answers: FloatArray, batch: Batch = batch) -> Array:
                return step.loss(batch, answers).by_answer / step.examples

            answers, gradients = calls.gradient({**batch.inputs(1, contract.is_encoder), **adapter}, slope)
            parts = (gradients[matrix.name].ravel() for matrix in matrices(contract.modules))
            of_batch = np.concatenate([*parts])
            # What the engine answers is the example's share of the mean.
            gradient += shortened(of_batch.astype(float), self.clip_examples / step.examples)
            found = step.loss(batch, answers)
            loss += float(found.losses.sum())
            calls.learn_head(found)
        return Measurement(
            loss / step.examples,
            np.zeros(0),
            calls.head_gradient(step.examples),
            calls.seconds,
            self.rows(contract, len(step.batches)),
            gradient=shortened(gradient, self.clip).astype(np.float32),
        )

    def rows(self, contract: Contract, batches: int) -> int:
        """See protocol.Estimator.rows."""
        return contract.computed_rows * batches

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


def check_single_sequences(examples: Sequence[Example]) -> None:
    """Raise ConfigError if an example whose gradient is to be clipped takes several rows of a call."""
    widest = max(examples, key=lambda example: len(example.sequences))
    if len(widest.sequences) > 1:
        raise ConfigError(
            "--clip-examples takes examples of one sequence each:",
            [f"row {widest.row} has {len(widest.sequences)} sequences, one for each of its candidates"],
            remedy="leave --clip-examples out, or bound the norm of a step's gradient with --clip",
        )
