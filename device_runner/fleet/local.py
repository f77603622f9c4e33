"""A device's part of a round: steps of `prge run`, from the common adapter on, over the device's own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.messages import Answer
from device_runner.fleet.privacy.reported import Draw, Reported, system_noise
from device_runner.session.inputs import read_inputs
from device_runner.session.memory import budget_of_steps
from device_runner.session.planning import plan_run
from device_runner.session.settings import RunSettings
from prge.engine import Engine, FloatArray
from prge.errors import ConfigError
from prge.files.bundle import Bundle
from prge.files.journal import Journal
from prge.learning.checkpoint import TrainingState
from prge.learning.estimators.exact import check_single_sequences
from prge.learning.estimators.protocol import Estimator
from prge.learning.examples import Example
from prge.learning.preferences import Preference
from prge.learning.sampling import Sampler, row_order
from prge.rows.report import warn_unread
from prge.rows.sources import describe_paths
from prge.running.recipe import Recipe
from prge.running.session import SessionData, Unwatched, open_session

# Losses f32 [K], and scalars f32 [K * scalars of a step] or a change f32 [size].
Learnt = tuple[FloatArray, FloatArray]


@dataclass(frozen=True)
class Local:
    """What takes a plan's steps on a device's rows: `examples`, of a file with the SHA-256 `data`."""

    plan: Plan
    engine: Engine
    examples: list[Example]
    draw: Draw = system_noise
    data: str = ""

    def steps(
        self,
        start: TrainingState,
        journal: Journal,
        rows_seed: int,
        taken: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Learnt | None:
        """Take a round's steps; what the journal holds of them already isn't measured again.

        Args:
            start: the common state where the round begins; it stays as it is.
            journal: of this device in this round.
            rows_seed: of the order of this device's rows.
            taken: steps that the device took before, from which on the order goes on.
            stopped: whether to give up.

        Returns:
            What came of them; None if it was stopped.

        Raises:
            DivergenceError: see prge.learning.training.
        """
        plan, store = self.plan, _RoundStore(self.plan, start, journal, self.draw)
        order = CyclicRows if plan.noise else _OwnRows
        sampler = order(self.examples, plan.examples, rows_seed, plan.loss_normalisation)
        sampler.offset = taken - store.first_step
        data = SessionData(train=self.examples, adapter=start.adapter, sampler=sampler)
        end = store.first_step + plan.local_steps
        session = open_session(plan.recipe, self.engine, data, store, until=end)
        session.train(Unwatched(), stopped)
        steps = range(store.first_step, end)
        records = [record for step in steps if (record := journal.step(step)) is not None]
        if len(records) < plan.local_steps:
            return None
        losses = np.array([record["loss"] for record in records], np.float32)
        if plan.by_scalars:
            return losses, np.array([record["scalars"] for record in records], np.float32).ravel()
        return losses, session.state.adapter.values - start.adapter.values


@dataclass(frozen=True)
class _RoundStore:
    """Implements Store for a round: its journal, and the common state that it begins with."""

    plan: Plan
    start: TrainingState
    journal: Journal
    draw: Draw
    checkpoint_every: int = 0

    @property
    def first_step(self) -> int:
        """Steps before the round: the server takes one a round where devices send changes."""
        return self.start.step if self.plan.by_scalars else self.start.step * self.plan.local_steps

    def estimator(self, recipe: Recipe) -> Estimator:
        """See Store; what it measures is what is reported."""
        return Reported(recipe.new_estimator(), self.plan, self.draw)

    def resume(self, first: TrainingState) -> TrainingState:
        """See Store; a device that sends changes begins every round with a new optimizer."""
        state = self.start.copy()
        state.progress.step = self.first_step
        if not self.plan.by_scalars:
            state.optimizer = first.optimizer
        return state

    def save(self, state: TrainingState) -> None:
        """See Store; the journal is enough."""


def open_local(plan: Plan, bundle: Bundle, settings: RunSettings) -> tuple[Local, OpenEngine]:
    """Read a device's rows and open the engine for the steps of a plan.

    Args:
        plan: what the steps are.
        bundle: the device's.
        settings: of `prge run` for the plan's steps, with rows and engine.

    Raises:
        PrgeError: the rows or the bundle can't be used.
    """
    inputs = read_inputs(bundle, settings)
    warn_unread(inputs.train_report)
    if isinstance(inputs.objective, Preference):
        raise ConfigError(
            f"{describe_paths(settings.train)} can't be used by a fleet:",
            ["its rows are preferences, which are compared with scores that no round carries"],
            remedy="give rows of completions, or train on this device alone with `prge run`",
            code="rows-of-preferences",
        )
    if not plan.by_scalars and plan.clip:
        check_single_sequences(inputs.train)
    sized = plan_run(bundle, inputs.train, settings)
    budget = budget_of_steps(bundle, [sized.shape], settings.memory, settings.engine, "this device")
    opened = open_engine(
        bundle,
        sized.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=None if budget is None else budget.loaded,
        folder=settings.out,
    )
    data = inputs.origin["train"]
    return Local(plan, opened.engine, inputs.train, data=data), opened


def told(agreement: Agreement, number: int, step: int, privacy_epsilon: float, learnt: Learnt) -> bytes:
    """The answer to the task of a round, which began at a step.

    Args:
        agreement, number, step: of the task.
        privacy_epsilon: that the device has spent, with this round.
        learnt: what came of the steps.
    """
    examples = agreement.plan.examples * agreement.plan.local_steps
    return Answer(agreement.sha256, number, step, examples, privacy_epsilon, *learnt).to_bytes()


def by_row(examples: Sequence[Example]) -> list[list[Example]]:
    """The examples of each row of a file: several where a text was split into windows."""
    return [list(windows) for _, windows in groupby(examples, lambda example: example.row)]


class _OwnRows(Sampler):
    """A device's batches go on where its last round ended, whichever steps those were for the fleet."""

    offset = 0

    def chosen(self, step: int) -> list[Example]:
        """See Sampler.chosen."""
        return super().chosen(step + self.offset)


class CyclicRows(_OwnRows):
    """Rows in one order over and over, of which a step has none twice; a row's windows take turns."""

    def chosen(self, step: int) -> list[Example]:
        """See Sampler.chosen; fewer than that where there are fewer rows."""
        rows = by_row(self.examples)
        order, count = row_order(self.seed, 0, len(rows)), min(self.batch_size, len(rows))
        turns = range((step + self.offset) * count, (step + self.offset + 1) * count)
        windows = [(turn // len(rows), rows[order[turn % len(rows)]]) for turn in turns]
        return [window[turn % len(window)] for turn, window in windows]
