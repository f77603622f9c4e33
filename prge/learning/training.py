"""The loop: take a step, score development rows when they are due, keep what was learnt.

    examples -> directions(seed, step) -> engine -> scalars -> gradient -> optimizer
    examples -> engine -> gradient -> optimizer

A step that the journal already holds is taken from there instead of from the engine. So a resumed run walks
the same loop as one that was never stopped and ends in the same bits, and a replay needs no engine at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prge.engine import Engine
from prge.errors import DivergenceError
from prge.files.journal import Journal, Record
from prge.learning.checkpoint import Progress, TrainingState
from prge.learning.estimators.protocol import LEARNT, Estimator, Measurement, Step
from prge.learning.examples import token_count
from prge.learning.objectives import CROSS_ENTROPY, Objective
from prge.learning.sampling import Sampler

_REMEDY = "start a new run with a lower learning rate"


@dataclass(frozen=True)
class TrainingSettings:
    """How long to train and what to do on the way; periods are in steps, 0 switches one off."""

    steps: int
    seed: int
    evaluate_every: int = 0
    evaluate_at: Sequence[int] = ()
    checkpoint_every: int = 100
    patience: int = 0
    divergence_ratio: float = 3.0


class Learner(Protocol):
    """What is trained: an adapter by an estimator (below), or a whole model by another method."""

    @property
    def progress(self) -> Progress:
        """Steps so far, and the best of them."""
        ...

    def step(self) -> tuple[Record, Measurement | None]:
        """Take the next step: its record, and what was measured unless that was known already.

        Raises:
            DivergenceError: the loss, a derivative or what became of the step is not finite, or the loss is
                far above the first one.
        """
        ...

    def evaluate(self) -> tuple[Record, bool] | None:
        """Score development rows: the record, and whether it is new; None where there is nothing to score."""
        ...

    def save(self, best: bool = False) -> None:
        """Keep what was learnt so far, or keep it as the best."""
        ...


class Observer(Protocol):
    """What the loop tells whoever watches; `measurement` is None for what the journal already held."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """One step was taken."""
        ...

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """Development rows were scored."""
        ...


def train(
    learner: Learner,
    settings: TrainingSettings,
    observer: Observer,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Train until `settings.steps`, an early stop, or an interruption.

    Raises:
        DivergenceError: see Learner.step.
    """
    while True:
        step = learner.progress.step
        if _due(step, settings) and (evaluation := learner.evaluate()):
            record, fresh = evaluation
            if learner.progress.judge(record):
                learner.save(best=True)
            observer.on_evaluation(record, fresh)
        if settings.patience and learner.progress.evaluations_since_best >= settings.patience:
            break
        if step >= settings.steps or interrupted():
            break
        record, measurement = learner.step()
        observer.on_step(record, measurement)
        if settings.checkpoint_every and (step + 1) % settings.checkpoint_every == 0:
            learner.save()
    learner.save()


@dataclass(frozen=True, kw_only=True)
class AdapterLearner:
    """Implements Learner: an adapter, along the gradients that an estimator makes of an engine's outputs.

    `state` is changed in place and handed to `keep` and `score`, which writes and scores it.
    """

    engine: Engine
    sampler: Sampler
    estimator: Estimator
    learning_rates: Callable[[int], dict[str, float]]
    state: TrainingState
    settings: TrainingSettings
    journal: Journal
    keep: Callable[[TrainingState], object]
    score: Callable[[TrainingState], Record] | None = None
    objective: Objective = CROSS_ENTROPY

    @property
    def progress(self) -> Progress:
        """See Learner."""
        return self.state.progress

    def step(self) -> tuple[Record, Measurement | None]:
        """See Learner; the state before a step that diverges is saved; no journal has that step."""
        state, measurement = self.state, None
        record = replayed = self.journal.step(state.step)
        if record is None or not record.keys() & LEARNT:
            record, measurement = self._measured()
            # A gradient that the journal has forgotten is computed again; all else is what it was.
            record |= replayed or {}
            not_finite = _not_finite(measurement, state.step)
            if problem := not_finite or loss_has_risen(state.progress, self.settings.divergence_ratio):
                self.save()
                code = "loss-not-finite" if not_finite else "loss-risen"
                raise DivergenceError(problem, remedy=_REMEDY, code=code)
        reading = nullcontext() if replayed is None else self.journal.reading(record)
        with reading, np.errstate(over="ignore", invalid="ignore"):
            gradient = self.estimator.gradient(record, record["seed"], state.step, state.adapter.modules)
            state.apply(record, gradient)
        if problem := state.overflow():
            raise DivergenceError(
                f"step {state.step - 1}: {problem}", remedy=_REMEDY, code="adapter-not-finite"
            )
        if replayed is None:
            self.journal.append(record)
        return record, measurement if replayed is None else None

    def _measured(self) -> tuple[Record, Measurement]:
        state, seed = self.state, self.settings.seed
        examples = self.sampler.batch(state.step)
        step = Step(
            adapter=state.adapter,
            examples=examples,
            seed=seed,
            number=state.step,
            classifier=state.training_classifier,
            trained_head=state.trained_head,
            objective=self.objective,
        )
        measurement = self.estimator.measure(self.engine, step)
        record = {
            "kind": "step",
            "step": state.step,
            "seed": seed,
            "rows": [example.row for example in examples],
            "tokens": token_count(examples),
            "loss": measurement.loss,
            **measurement.learnt,
            **self.learning_rates(state.step),
        }
        return record, measurement

    def evaluate(self) -> tuple[Record, bool] | None:
        """See Learner; an evaluation that the journal holds is taken from there."""
        if self.score is None:
            return None
        replayed = self.journal.evaluation(self.state.step)
        if replayed is not None:
            with self.journal.reading(replayed):
                return {**replayed, "value": float(replayed["value"])}, False
        record = {"kind": "evaluation", "step": self.state.step, **self.score(self.state)}
        if not math.isfinite(record["loss"]) or not math.isfinite(record["value"]):
            what = f"step {self.state.step}: the loss of development rows is {record['loss']}"
            raise DivergenceError(what, remedy=_REMEDY, code="evaluation-not-finite")
        return self.journal.append(record), True

    def save(self, best: bool = False) -> None:
        """See Learner; a checkpoint is the same whether it is the best or not."""
        self.keep(self.state)


def _due(step: int, settings: TrainingSettings) -> bool:
    """Whether development rows are scored after so many steps; after the last they always are."""
    every = settings.evaluate_every
    return step == settings.steps or step in settings.evaluate_at or bool(every and step % every == 0)


def _not_finite(measurement: Measurement, step: int) -> str:
    """What to say if the numbers of a step are not finite; empty if they are."""
    loss, derivatives = measurement.loss, measurement.derivatives
    bad = int(derivatives.size - np.isfinite(derivatives).sum())
    if bad or not math.isfinite(loss):
        name = "scalars" if measurement.gradient is None else "derivatives"
        return f"step {step}: the loss is {loss}, {bad} of {derivatives.size} {name} are not finite"
    return ""


def loss_has_risen(progress: Progress, ratio: float) -> str:
    """What to say if the smoothed loss is above `ratio` times the first one, and 1; empty if it isn't."""
    first, smoothed = progress.first_loss, progress.smoothed_loss
    if first is not None and smoothed is not None and smoothed > ratio * max(first, 1.0):
        return f"step {progress.step}: the smoothed loss is {smoothed:.3g}, it began at {first:.3g}"
    return ""
