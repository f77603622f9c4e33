"""The training loop: take optimizer steps, evaluate when an evaluation is due, and save what was learned.

    estimated gradients   examples -> engine (with random directions) -> projected gradients -> gradient
    exact gradients       examples -> engine (forward and backward) -> gradient
    both                  gradient -> optimizer -> adapter

The journal records every step. A step that the journal already holds is replayed from its record instead of
being computed again. A resumed run therefore executes the same loop as an uninterrupted run and ends with the
same bits, and replaying a finished run needs no engine.
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
from prge.formats.journal import Journal, Record
from prge.objectives.examples import token_count
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.training.checkpoint import TrainingProgress, TrainingState
from prge.training.estimators.protocol import GRADIENT_KEYS, Estimator, Measurement, Step
from prge.training.estimators.rollouts import RolloutSource
from prge.training.sampler import Sampler

_REMEDY = "Start a new run with a lower learning rate."


@dataclass(frozen=True)
class TrainingSettings:
    """How long to train, and how often to evaluate and to save.

    Attributes:
        steps: number of optimizer steps.
        seed: seed of the order of examples and of the random directions.
        eval_steps: steps between evaluations on development rows; 0: only after the last step.
        eval_at: further steps to evaluate after.
        save_steps: steps between checkpoints; 0: only after the last step.
        patience: stop after this many evaluations without an improvement; 0: never.
        divergence_ratio: stop when the smoothed loss exceeds this multiple of the first loss.
    """

    steps: int
    seed: int
    eval_steps: int = 0
    eval_at: Sequence[int] = ()
    save_steps: int = 100
    patience: int = 0
    divergence_ratio: float = 3.0


class Learner(Protocol):
    """What the loop trains: `AdapterLearner` below, or another model with a training method of its own."""

    @property
    def progress(self) -> TrainingProgress:
        """The number of steps taken, the losses, and the best evaluation so far."""
        ...

    def step(self) -> tuple[Record, Measurement | None]:
        """Take the next step.

        Returns:
            The step's record, and its measurement; None if the step was replayed from the journal.

        Raises:
            DivergenceError: the loss, a derivative or an updated value is not finite, or the loss is far
                above the first one.
        """
        ...

    def evaluate(self) -> tuple[Record, bool] | None:
        """Score the development rows.

        Returns:
            The record of the evaluation, and whether it is new; None if there are no development rows.
        """
        ...

    def save(self, best: bool = False) -> None:
        """Save a checkpoint of the current step, as the best one if `best` is set."""
        ...


class Observer(Protocol):
    """Callbacks of the loop, such as those that log metrics."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """Handle the end of a step; `measurement` is None if the step was replayed from the journal."""
        ...

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """Handle the result of an evaluation; `fresh` is False if it was replayed from the journal."""
        ...


def train(
    learner: Learner,
    settings: TrainingSettings,
    observer: Observer,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Train until `settings.steps`, until patience runs out, or until `interrupted()` returns True.

    Args:
        learner: takes the steps and scores the development rows.
        settings: when to evaluate, to save and to stop.
        observer: is called after every step and evaluation.
        interrupted: is called before every step.

    Raises:
        DivergenceError: see `Learner.step`.
    """
    while True:
        step = learner.progress.step
        if _is_evaluation_due(step, settings) and (evaluation := learner.evaluate()):
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
        if settings.save_steps and (step + 1) % settings.save_steps == 0:
            learner.save()
    learner.save()


@dataclass(frozen=True, kw_only=True)
class AdapterLearner:
    """Implements Learner: trains an adapter with gradients that an estimator computes on an engine.

    Attributes:
        engine: computes outputs and their derivatives.
        sampler: the examples of each step.
        estimator: computes a gradient from what it measures on the engine.
        learning_rates: the learning rates of a step, by their names in the journal.
        state: adapter, optimizer and progress; every step changes it in place.
        settings: settings of the loop.
        journal: holds the steps and evaluations of earlier processes, and receives new ones.
        save_state: writes a checkpoint of the state.
        evaluate_state: scores the development rows with the state's adapter; None: there are no such rows.
        objective: the loss as a function of scores.
        rollouts: generates completions of the examples' prompts, to learn from a reward.
    """

    engine: Engine
    sampler: Sampler
    estimator: Estimator
    learning_rates: Callable[[int], dict[str, float]]
    state: TrainingState
    settings: TrainingSettings
    journal: Journal
    save_state: Callable[[TrainingState], object]
    evaluate_state: Callable[[TrainingState], Record] | None = None
    objective: Objective = CROSS_ENTROPY
    rollouts: RolloutSource | None = None

    @property
    def progress(self) -> TrainingProgress:
        """See Learner."""
        return self.state.progress

    def step(self) -> tuple[Record, Measurement | None]:
        """See Learner.

        If a step diverges, a checkpoint of the state before that step is saved, and the journal doesn't get
        the step's record.
        """
        state, measurement = self.state, None
        record = replayed = self.journal.step(state.step)
        if record is None or not record.keys() & GRADIENT_KEYS:
            record, measurement = self._measure()
            # The journal drops gradients before a checkpoint: only the gradient is computed again.
            record |= replayed or {}
            not_finite = _describe_not_finite(measurement, state.step)
            if problem := not_finite or loss_has_risen(state.progress, self.settings.divergence_ratio):
                self.save()
                code = "loss-not-finite" if not_finite else "loss-risen"
                raise DivergenceError(problem, remedy=_REMEDY, code=code)
        check_record = nullcontext() if replayed is None else self.journal.reading(record)
        with check_record, np.errstate(over="ignore", invalid="ignore"):
            gradient = self.estimator.gradient(record, record["seed"], state.step, state.adapter.modules)
            state.apply(record, gradient)
        if problem := state.overflow():
            raise DivergenceError(
                f"Step {state.step - 1}: {problem}", remedy=_REMEDY, code="adapter-not-finite"
            )
        if replayed is None:
            self.journal.append(record)
        return record, measurement if replayed is None else None

    def _measure(self) -> tuple[Record, Measurement]:
        """Measure the step's examples on the engine; return the step's record and the measurement."""
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
            rollouts=self.rollouts,
        )
        measurement = self.estimator.measure(self.engine, step)
        record = {
            "type": "step",
            "step": state.step,
            "seed": seed,
            "rows": [example.row for example in examples],
            "tokens": token_count(examples),
            "loss": measurement.loss,
            **measurement.journal_fields,
            **self.learning_rates(state.step),
        }
        return record, measurement

    def evaluate(self) -> tuple[Record, bool] | None:
        """See Learner; an evaluation that the journal holds is not computed again."""
        if self.evaluate_state is None:
            return None
        replayed = self.journal.evaluation(self.state.step)
        if replayed is not None:
            with self.journal.reading(replayed):
                return {**replayed, "value": float(replayed["value"])}, False
        record = {"type": "evaluation", "step": self.state.step, **self.evaluate_state(self.state)}
        if not math.isfinite(record["loss"]) or not math.isfinite(record["value"]):
            problem = f"Step {self.state.step}: the loss on the development rows is {record['loss']}"
            raise DivergenceError(problem, remedy=_REMEDY, code="evaluation-not-finite")
        return self.journal.append(record), True

    def save(self, best: bool = False) -> None:
        """See Learner; the checkpoint of a best step doesn't differ from others."""
        self.save_state(self.state)


def loss_has_risen(progress: TrainingProgress, ratio: float) -> str:
    """Return a message if the smoothed loss exceeds `ratio` times the first loss (or 1, if that is larger).

    The message is empty if the loss hasn't risen that far.
    """
    first, smoothed = progress.first_loss, progress.smoothed_loss
    if first is not None and smoothed is not None and smoothed > ratio * max(first, 1.0):
        return f"Step {progress.step}: the smoothed loss is {smoothed:.3g}, the first loss was {first:.3g}"
    return ""


def _is_evaluation_due(step: int, settings: TrainingSettings) -> bool:
    """Return whether to evaluate after this many steps; True after the last step."""
    every = settings.eval_steps
    return step == settings.steps or step in settings.eval_at or bool(every and step % every == 0)


def _describe_not_finite(measurement: Measurement, step: int) -> str:
    """Return a message if the loss or a derivative of a step is not finite; else an empty string."""
    loss, derivatives = measurement.loss, measurement.derivatives
    count = int(derivatives.size - np.isfinite(derivatives).sum())
    if count or not math.isfinite(loss):
        name = "projected gradients" if measurement.gradient is None else "derivatives"
        return f"Step {step}: the loss is {loss}, and {count} of {derivatives.size} {name} are not finite"
    return ""
