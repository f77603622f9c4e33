"""The loop: measure a step's batches, estimate a gradient from what was measured, take a step along it.

    rows -> directions(seed, step) -> engine -> scalars -> gradient -> optimizer
    rows -> engine -> gradient -> optimizer

A step that the journal already holds is taken from there instead of from the engine. So a resumed run walks
the same loop as one that was never stopped and ends in the same bits, and a replay needs no engine at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prge.checkpoint import Progress, TrainingState
from prge.engine import Engine
from prge.errors import DivergenceError
from prge.estimators import Estimator, Measurement
from prge.journal import Journal, Record
from prge.sampling import Sampler


@dataclass(frozen=True)
class TrainingSettings:
    """How long to train and what to do on the way; periods are in steps, 0 switches one off."""

    steps: int
    seed: int
    evaluate_every: int = 0
    checkpoint_every: int = 100
    patience: int = 0
    divergence_ratio: float = 3.0


class Observer(Protocol):
    """What the loop tells whoever watches; `measurement` is None for what the journal already held."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """One step was taken."""
        ...

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """Development rows were scored."""
        ...


def train(
    engine: Engine,
    sampler: Sampler,
    estimator: Estimator,
    learning_rates: Callable[[int], dict[str, float]],
    state: TrainingState,
    settings: TrainingSettings,
    journal: Journal,
    save: Callable[[TrainingState], object],
    observer: Observer,
    evaluate: Callable[[TrainingState], Record] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> TrainingState:
    """Train until `settings.steps`, an early stop, or an interruption; `state` is changed in place.

    Raises:
        DivergenceError: the loss or a derivative is not finite, or the loss far above the first one; the
            state before it is saved.
    """
    while True:
        if evaluate is not None and _due(state.step, settings.evaluate_every, settings.steps):
            known = journal.evaluation(state.step)
            record = known or journal.append({"kind": "evaluation", "step": state.step, **evaluate(state)})
            with journal.reading(record):
                is_best = state.judge(record)
            if is_best:
                save(state)
            observer.on_evaluation(record, fresh=known is None)
            if settings.patience and state.progress.evaluations_since_best >= settings.patience:
                break
        if state.step >= settings.steps or interrupted():
            break
        known, measurement = journal.step(state.step), None
        if known is None:
            batches = sampler.batches(state.step)
            measurement = estimator.measure(
                engine,
                state.adapter,
                batches,
                settings.seed,
                state.step,
                state.training_classifier,
                state.trained_head,
            )
            known = {
                "kind": "step",
                "step": state.step,
                "seed": settings.seed,
                "rows": [row for batch in batches for row in batch.rows],
                "loss": measurement.loss,
                **measurement.learnt,
                **learning_rates(state.step),
            }
            if problem := _divergence(measurement, state, settings):
                save(state)
                raise DivergenceError(problem, remedy="start a new run with a lower learning rate")
            journal.append(known)
        with journal.reading(known) if measurement is None else nullcontext():
            gradient = estimator.gradient(known, settings.seed, state.step, state.adapter.modules)
            state.apply(known, gradient)
        observer.on_step(known, measurement)
        if settings.checkpoint_every and state.step % settings.checkpoint_every == 0:
            save(state)
    save(state)
    return state


def _due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def _divergence(measurement: Measurement, state: TrainingState, settings: TrainingSettings) -> str:
    """What is wrong with a step that must not be taken; empty if nothing is."""
    loss, found = measurement.loss, measurement.derivatives
    bad = int(found.size - np.isfinite(found).sum())
    if bad or not math.isfinite(loss):
        kind = "scalars" if measurement.gradient is None else "derivatives"
        return f"step {state.step}: the loss is {loss}, {bad} of {found.size} {kind} are not finite"
    return loss_has_risen(state.progress, settings.divergence_ratio)


def loss_has_risen(progress: Progress, ratio: float) -> str:
    """What to say if the smoothed loss is above `ratio` times the first one, and 1; empty if it isn't."""
    first, smoothed = progress.first_loss, progress.smoothed_loss
    if first is not None and smoothed is not None and smoothed > ratio * max(first, 1.0):
        return f"step {progress.step}: the smoothed loss is {smoothed:.3g}, it began at {first:.3g}"
    return ""
