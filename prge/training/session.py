"""A training session: the steps of a recipe on some data, computed by an engine, kept in a store.

`prge run`, rounds of learning while serving, and a fleet's device are sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prge.data.forms.task import Task
from prge.engine import Engine
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.training.checkpoint import TrainingState
from prge.training.encoder_heads import Heads
from prge.training.estimators.protocol import Measurement
from prge.training.evaluation import evaluate
from prge.training.loop import AdapterLearner, Observer, train
from prge.training.recipe import Recipe
from prge.training.sampler import Sampler
from prge.training.store import Store


@dataclass(frozen=True, kw_only=True)
class SessionData:
    """What a session trains.

    Attributes:
        train: examples to train on.
        dev: examples that are scored on the way; without any there are no evaluations.
        task: of the rows, if they are of one.
        objective: makes a loss of scores.
        adapter: that training starts from.
        heads: an encoder's.
        sampler: the examples of each step; default: the recipe's.
    """

    train: Sequence[Example]
    dev: Sequence[Example] = ()
    task: Task | None = None
    objective: Objective = CROSS_ENTROPY
    adapter: Adapter
    heads: Heads = field(default_factory=Heads)
    sampler: Sampler | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session that is open; `state` is what it has learnt so far."""

    learner: AdapterLearner

    @property
    def state(self) -> TrainingState:
        """The adapter, the optimizer, and how far the session has come."""
        return self.learner.state

    @property
    def sampler(self) -> Sampler:
        """The examples of each step."""
        return self.learner.sampler

    def train(self, observer: Observer, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train until the last step, an early stop, or an interruption.

        Raises:
            DivergenceError: see prge.training.loop.Learner.step.
        """
        train(self.learner, self.learner.settings, observer, interrupted)


class SilentObserver:
    """Implements Observer: nobody watches."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """Nothing."""

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """Nothing."""


def open_session(
    recipe: Recipe, engine: Engine, data: SessionData, store: Store, *, until: int | None = None
) -> Session:
    """A session that goes on from what its store has.

    Args:
        recipe: what its steps are.
        engine: computes them.
        data: what it trains.
        store: keeps what it learns.
        until: step to stop after; default: the recipe's last one.
    """

    def score(state: TrainingState) -> Record:
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
        settings=recipe.loop_settings(checkpoint_every=store.checkpoint_every, until=until),
        journal=store.journal,
        keep=store.save,
        score=score if data.dev else None,
        objective=data.objective,
    )
    return Session(learner=learner)
