"""The exact gradient, by backpropagation on the engine.

    examples -> forward pass -> outputs -> gradients of the mean loss -> backward pass -> gradient of the
    adapter

The examples of a step are computed in microbatches whose gradients are added, so that the memory of a step is
bounded however many examples it has. The journal stores the whole gradient: it can't be computed again
without the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prge.engine import Array, Call, Engine, Float64Array, FloatArray
from prge.errors import ConfigError, RunError
from prge.formats.journal import GRADIENT, decode_array
from prge.model_spec import AdaptedModule
from prge.objectives.examples import Example, microbatches, sequences_of
from prge.objectives.objective import Loss
from prge.training.estimators.protocol import Measurement, Step

# Most tokens of a microbatch: it bounds the activation checkpoints and residuals that a step holds.
MICROBATCH_TOKENS = 512


class Exact:
    """Implements protocol.Estimator with exact gradients.

    Args:
        max_grad_norm: upper bound for the norm of a step's gradient; 0: no clipping.
        max_example_grad_norm: upper bound for the norm of each example's gradient before they are added; 0:
            no clipping.
    """

    def __init__(self, max_grad_norm: float = 0.0, max_example_grad_norm: float = 0.0) -> None:
        self.max_grad_norm = max_grad_norm
        self.max_example_grad_norm = max_example_grad_norm

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Compute the mean loss and its gradient, one microbatch after the other."""
        gradient, losses, count = np.zeros(step.adapter.size), list[Loss](), len(step.examples)
        begin = engine.seconds
        for examples in self._microbatches(step):

            def grad_fn(outputs: FloatArray, examples: Sequence[Example] = examples) -> Array:
                return step.loss(outputs[None], examples).grad_outputs / count

            call = Call(sequences_of(examples), step.adapter.values[None])
            outputs, microbatch_gradient = engine.vjp(call, grad_fn)
            # `grad_fn` divides by the number of examples, so the bound of an example's norm is divided, too.
            gradient += clip_by_norm(microbatch_gradient.astype(float), self.max_example_grad_norm / count)
            losses.append(step.loss(outputs[None], examples))
        return Measurement(
            sum(float(loss.losses.sum()) for loss in losses) / count,
            np.zeros(0),
            step.head_gradient(losses),
            engine.seconds - begin,
            gradient=clip_by_norm(gradient, self.max_grad_norm).astype(np.float32),
        )

    def _microbatches(self, step: Step) -> Iterator[Sequence[Example]]:
        """Yield the examples of each microbatch.

        Each example is alone if its gradient is clipped; all are together if the loss compares them.
        """
        if self.max_example_grad_norm:
            return iter([[example] for example in step.examples])
        return (
            microbatches(step.examples, MICROBATCH_TOKENS)
            if step.objective.is_separable
            else iter([step.examples])
        )

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """Return the gradient that a record holds, f32 [size].

        Raises:
            RunError: the record's gradient was dropped from the journal.
        """
        if GRADIENT not in record:
            raise RunError(
                f"The journal has no gradient of step {step}: it keeps those since the newest checkpoint.",
                remedy="A run with --keep-gradients can be replayed.",
                code="gradient-missing",
            )
        return decode_array(record[GRADIENT])


def clip_by_norm(gradient: Float64Array, limit: float) -> Float64Array:
    """Return the gradient, scaled down so that its norm is at most `limit`; 0: no clipping."""
    return gradient * (limit / max(float(np.linalg.norm(gradient)), limit)) if limit else gradient


def check_single_sequences(examples: Sequence[Example]) -> None:
    """Raise ConfigError if an example has several sequences, which --max-example-grad-norm doesn't take."""
    widest = max(examples, key=lambda example: len(example.sequences))
    if len(widest.sequences) > 1:
        raise ConfigError(
            "--max-example-grad-norm takes examples of one sequence each:",
            [f"row {widest.row} has {len(widest.sequences)} sequences, one for each of its candidates"],
            remedy="Leave --max-example-grad-norm out, or bound the norm of a step's gradient with "
            "--max-grad-norm.",
            code="clipping-several-sequences",
        )
