"""The steps of a round on one device: those of `prge run`, on the global adapter and the device's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.messages import RoundResult
from device_runner.fleet.privacy.reported import NoiseSampler, ReportingEstimator, system_noise
from device_runner.session.inputs import read_inputs
from device_runner.session.memory import step_budget
from device_runner.session.plan import plan_run
from device_runner.session.settings import RunSettings
from prge.data.row_report import warn_unread
from prge.data.sources import describe_paths
from prge.engine import Engine, FloatArray
from prge.errors import ConfigError
from prge.formats.bundle import Bundle
from prge.formats.journal import Journal
from prge.objectives.examples import Example
from prge.objectives.preferences import Preference
from prge.training.checkpoint import TrainingState
from prge.training.estimators.exact import check_single_sequences
from prge.training.estimators.protocol import Estimator
from prge.training.recipe import Recipe
from prge.training.sampler import Sampler, row_order
from prge.training.session import SessionData, SilentObserver, open_session

# Losses f32 [K]; and projected gradients f32 [K * projected gradients per step] or an adapter change f32
# [size].
LocalUpdate = tuple[FloatArray, FloatArray]


@dataclass(frozen=True)
class LocalTrainer:
    """Takes a plan's steps on a device's rows.

    Attributes:
        plan: the plan of the fleet.
        engine: the engine of the device's bundle.
        examples: the examples of the device's rows.
        draw: a function that samples noise.
        data: SHA-256 of the file with the rows.
    """

    plan: Plan
    engine: Engine
    examples: list[Example]
    draw: NoiseSampler = system_noise
    data: str = ""

    def train(
        self,
        start: TrainingState,
        journal: Journal,
        rows_seed: int,
        taken: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> LocalUpdate | None:
        """Take the steps of a round; steps that the journal already holds are not measured again.

        Args:
            start: the global state at the start of the round; it is not changed.
            journal: the journal of this device in this round.
            rows_seed: the seed of the order of this device's rows.
            taken: steps that the device took before; the order of the rows continues there.
            stopped: returns whether to stop.

        Returns:
            The losses and the update; None if the steps were stopped.

        Raises:
            DivergenceError: see prge.training.loop.
        """
        plan, store = self.plan, _RoundStore(self.plan, start, journal, self.draw)
        order = CyclicRows if plan.noise else _OwnRows
        sampler = order(self.examples, plan.examples, rows_seed, plan.loss_normalisation)
        sampler.offset = taken - store.first_step
        data = SessionData(train=self.examples, adapter=start.adapter, sampler=sampler)
        end = store.first_step + plan.local_steps
        session = open_session(plan.recipe, self.engine, data, store, until=end)
        session.train(SilentObserver(), stopped)
        steps = range(store.first_step, end)
        records = [record for step in steps if (record := journal.step(step)) is not None]
        if len(records) < plan.local_steps:
            return None
        losses = np.array([record["loss"] for record in records], np.float32)
        if plan.sends_projected_gradients:
            return losses, np.array([record["projected_gradients"] for record in records], np.float32).ravel()
        return losses, session.state.adapter.values - start.adapter.values


@dataclass(frozen=True)
class _RoundStore:
    """Implements Store for a round: its journal, and the global state that it begins with."""

    plan: Plan
    start: TrainingState
    journal: Journal
    draw: NoiseSampler
    save_steps: int = 0

    @property
    def first_step(self) -> int:
        """Steps before the round. If devices send changes, the server takes one step per round."""
        return (
            self.start.step
            if self.plan.sends_projected_gradients
            else self.start.step * self.plan.local_steps
        )

    def estimator(self, recipe: Recipe) -> Estimator:
        """See Store; the estimator measures what the device reports."""
        return ReportingEstimator(recipe.new_estimator(), self.plan, self.draw)

    def resume(self, first: TrainingState) -> TrainingState:
        """See Store; a device that sends changes begins every round with a new optimizer."""
        state = self.start.copy()
        state.progress.step = self.first_step
        if not self.plan.sends_projected_gradients:
            state.optimizer = first.optimizer
        return state

    def save(self, state: TrainingState) -> None:
        """See Store; the journal suffices."""


def open_local(plan: Plan, bundle: Bundle, settings: RunSettings) -> tuple[LocalTrainer, OpenEngine]:
    """Read a device's rows and open the engine for the steps of a plan.

    Args:
        plan: the plan of the fleet.
        bundle: the bundle of the device.
        settings: the settings of a `prge run` that takes the plan's steps, with the device's rows and engine.

    Raises:
        PrgeError: the rows or the bundle can't be used.
    """
    inputs = read_inputs(bundle, settings)
    if inputs.train_report is not None:
        warn_unread(inputs.train_report)
    if isinstance(inputs.objective, Preference):
        raise ConfigError(
            f"{describe_paths(settings.train)} can't be used by a fleet:",
            ["its rows are preferences, which need reference scores that rounds do not carry"],
            remedy="Give rows of completions, or train on this device only, with `prge run`.",
            code="rows-of-preferences",
        )
    if not plan.sends_projected_gradients and plan.max_grad_norm:
        check_single_sequences(inputs.train)
    run_plan = plan_run(bundle, inputs.train, settings)
    budget = step_budget(bundle, [run_plan.shape], settings.memory, settings.engine, "this device")
    opened = open_engine(
        bundle,
        run_plan.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=None if budget is None else budget.loaded,
        folder=settings.out,
    )
    data = inputs.origin["train"]
    return LocalTrainer(plan, opened.engine, inputs.train, data=data), opened


def encode_result(
    agreement: Agreement, number: int, step: int, privacy_epsilon: float, update: LocalUpdate
) -> bytes:
    """Encode the result of a round.

    Args:
        agreement, number, step: as in the task.
        privacy_epsilon: the epsilon that the device has spent, with this round.
        update: losses, and projected gradients or the change of the adapter.
    """
    examples = agreement.plan.examples * agreement.plan.local_steps
    return RoundResult(agreement.sha256, number, step, examples, privacy_epsilon, *update).to_bytes()


def by_row(examples: Sequence[Example]) -> list[list[Example]]:
    """Group examples by the row that they come from; a text that was split into windows has several."""
    return [list(windows) for _, windows in groupby(examples, lambda example: example.row)]


class _OwnRows(Sampler):
    """Samples batches from where the device's last round ended, whatever the numbers of its global steps."""

    offset = 0

    def examples_at(self, step: int) -> list[Example]:
        """See Sampler.examples_at."""
        return super().examples_at(step + self.offset)


class CyclicRows(_OwnRows):
    """Cycles through the rows in one order; a step has no row twice, and the windows of a row take turns."""

    def examples_at(self, step: int) -> list[Example]:
        """See Sampler.examples_at; a step has fewer examples if there are fewer rows."""
        rows = by_row(self.examples)
        order, count = row_order(self.seed, 0, len(rows)), min(self.batch_size, len(rows))
        turns = range((step + self.offset) * count, (step + self.offset + 1) * count)
        windows = [(turn // len(rows), rows[order[turn % len(rows)]]) for turn in turns]
        return [window[turn % len(window)] for turn, window in windows]
