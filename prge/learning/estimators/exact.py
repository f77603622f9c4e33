"""Backpropagation on the engine: the gradient itself.

    examples -> engine -> outputs -> derivative of the mean loss by them -> engine -> gradient by the adapter

A step's examples are computed in microbatches, whose gradients add up: the memory of a step has a bound,
however many examples it has. A journal keeps the gradient: nothing smaller would do to make it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prge.engine import Array, Call, Engine, Float64Array, FloatArray
from prge.errors import ConfigError, RunError
from prge.files.journal import GRADIENT, decode_array
from prge.learning.estimators.protocol import Measurement, Step
from prge.learning.examples import Example, microbatches, sequences_of
from prge.learning.objectives import Loss
from prge.model_spec import AdaptedModule

# Tokens whose activations are kept at once.
MICROBATCH_TOKENS = 512


class Exact:
    """Implements protocol.Estimator with the gradient itself.

    `clip` bounds the norm of a step's gradient, `clip_examples` that of every example's before they are added
    up; 0 leaves them.
    """

    def __init__(self, clip: float = 0.0, clip_examples: float = 0.0) -> None:
        self.clip = clip
        self.clip_examples = clip_examples

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Loss of every example and the gradient of their mean, one microbatch after the other."""
        gradient, losses, count = np.zeros(step.adapter.size), list[Loss](), len(step.examples)
        begin = engine.seconds
        for examples in self._microbatches(step):

            def grad_fn(outputs: FloatArray, examples: Sequence[Example] = examples) -> Array:
                return step.loss(outputs[None], examples).by_output / count

            call = Call(sequences_of(examples), step.adapter.values[None])
            outputs, found = engine.vjp(call, grad_fn)
            # What the engine returns is the example's share of the mean.
            gradient += shortened(found.astype(float), self.clip_examples / count)
            losses.append(step.loss(outputs[None], examples))
        return Measurement(
            sum(float(loss.losses.sum()) for loss in losses) / count,
            np.zeros(0),
            step.head_gradient(losses),
            engine.seconds - begin,
            gradient=shortened(gradient, self.clip).astype(np.float32),
        )

    def _microbatches(self, step: Step) -> Iterator[Sequence[Example]]:
        """Examples that are computed together: one where it is clipped, all where the loss compares them."""
        if self.clip_examples:
            return iter([[example] for example in step.examples])
        return (
            microbatches(step.examples, MICROBATCH_TOKENS)
            if step.objective.is_separate
            else iter([step.examples])
        )

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
                code="gradient-missing",
            )
        return decode_array(learnt[GRADIENT])


def shortened(gradient: Float64Array, limit: float) -> Float64Array:
    """A gradient whose norm is at most `limit`; 0 leaves it."""
    return gradient * (limit / max(float(np.linalg.norm(gradient)), limit)) if limit else gradient


def check_single_sequences(examples: Sequence[Example]) -> None:
    """Raise ConfigError if an example whose gradient is to be clipped has several sequences."""
    widest = max(examples, key=lambda example: len(example.sequences))
    if len(widest.sequences) > 1:
        raise ConfigError(
            "--clip-examples takes examples of one sequence each:",
            [f"row {widest.row} has {len(widest.sequences)} sequences, one for each of its candidates"],
            remedy="leave --clip-examples out, or bound the norm of a step's gradient with --clip",
            code="clipping-several-sequences",
        )
