"""Training sessions: a recipe, an engine, data and a store assembled into a training loop.

`prge run`, learning while serving, and the devices of a fleet train with sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prge.data.forms.task import Task
from prge.engine import Engine
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.training.checkpoint import TrainingState
from prge.training.encoder_heads import Heads
from prge.training.estimators.protocol import Measurement
from prge.training.estimators.rollouts import RolloutSource
from prge.training.evaluation import evaluate
from prge.training.loop import AdapterLearner, Observer, train
from prge.training.recipe import Recipe
from prge.training.sampler import Sampler
from prge.training.store import Store


@dataclass(frozen=True, kw_only=True)
class SessionData:
    """The data of a session.

    Attributes:
        train: training examples.
        dev: development examples; if there are none, nothing is evaluated.
        task: the task of the examples, if they have one.
        objective: the loss as a function of scores.
        adapter: the adapter to start from.
        heads: the classification heads of an encoder.
        sampler: the sampler of training examples; default: the recipe's.
        rollouts: generates and rewards completions of the examples, if they are prompts.
    """

    train: Sequence[Example]
    dev: Sequence[Example] = ()
    task: Task | None = None
    objective: Objective = CROSS_ENTROPY
    adapter: Adapter
    heads: Heads = field(default_factory=Heads)
    sampler: Sampler | None = None
    rollouts: EvaluatedRollouts | None = None


class EvaluatedRollouts(RolloutSource, Protocol):
    """A source of completions that also evaluates an adapter by them."""

    def evaluate(self, adapter: Adapter, prompts: Sequence[Example]) -> Record:
        """Return the record of an evaluation on development prompts; see prge.training.evaluation."""
        ...


@dataclass(frozen=True, kw_only=True)
class Session:
    """An open session; see `open_session`."""

    learner: AdapterLearner

    @property
    def state(self) -> TrainingState:
        """The current adapter, optimizer and progress."""
        return self.learner.state

    @property
    def sampler(self) -> Sampler:
        """The sampler of training examples."""
        return self.learner.sampler

    def train(self, observer: Observer, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train until the last step, until patience runs out, or until `interrupted()` returns True.

        Raises:
            DivergenceError: see prge.training.loop.Learner.step.
        """
        train(self.learner, self.learner.settings, observer, interrupted)


class SilentObserver:
    """Implements Observer; does nothing."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """Do nothing."""

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """Do nothing."""


def open_session(
    recipe: Recipe, engine: Engine, data: SessionData, store: Store, *, until: int | None = None
) -> Session:
    """Open a session, which continues from the journal and the checkpoints in its store.

    Args:
        recipe: the settings that determine the steps.
        engine: computes the steps.
        data: examples, objective, and the adapter to start from.
        store: holds the journal and the checkpoints.
        until: number of steps to stop after; default: all steps of the recipe.
    """

    def evaluate_state(state: TrainingState) -> Record:
        if data.rollouts is not None:
            return data.rollouts.evaluate(state.adapter, data.dev)
        return evaluate(
            engine,
            state.adapter,
            data.dev,
            data.task,
            head=state.head,
            select=recipe.select,
            objective=data.objective,
            normalisation=recipe.loss_normalisation,
        )[0]

    learner = AdapterLearner(
        engine=engine,
        sampler=data.sampler or recipe.sampler(data.train),
        estimator=store.estimator(recipe),
        learning_rates=recipe.learning_rates(),
        state=store.resume(recipe.new_state(data.adapter, data.heads)),
        settings=recipe.loop_settings(save_steps=store.save_steps, until=until),
        journal=store.journal,
        save_state=store.save,
        evaluate_state=evaluate_state if data.dev else None,
        objective=data.objective,
        rollouts=data.rollouts,
    )
    return Session(learner=learner)
