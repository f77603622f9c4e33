"""The loop learns, can be killed anywhere, and its result can be computed again from the journal alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.engine import Array, Call, Directions, GradFn
from prge.errors import AdapterError, DivergenceError
from prge.formats.adapter import Adapter
from prge.formats.journal import Journal, Record
from prge.objectives.classification_head import Head
from prge.objectives.scoring import score
from prge.training.checkpoint import (
    TrainingState,
    load_checkpoint,
    load_latest,
    prune_checkpoints,
    save_checkpoint,
)
from prge.training.estimators.differences import Antithetic, Differences, OneSided
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Estimator, EstimatorSequence, Measurement
from prge.training.estimators.tangents import TangentEstimator
from prge.training.loop import AdapterLearner, TrainingSettings, train
from prge.training.optimizers import make_optimizer, schedule
from prge.training.sampler import Sampler
from tests.numpy_engine import NumpyEngine
from tests.refusals import raises
from tests.rows import bigram_completions, classification
from tests.templates import write_peft_folder

SETTINGS = TrainingSettings(steps=12, seed=7, eval_steps=4, save_steps=5)


class Killed(BaseException):
    """Simulates a kill of the process."""


class Silent:
    """An observer that records the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.measured: list[int] = []

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        self.steps.append(record["step"])
        if measurement is not None:
            self.measured.append(record["step"])

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        pass


class Run:
    """A run on the numpy engine in a folder."""

    def __init__(
        self,
        folder: Path,
        encoder: bool = False,
        estimator: Estimator | None = None,
        forgets: bool = False,
        **settings: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.forgets = forgets
        self.folder = folder
        self.engine = NumpyEngine(encoder=encoder)
        self.estimator = estimator or Differences(Antithetic(4, 1e-2))
        self.settings = replace(SETTINGS, **settings)
        self.encoder = encoder
        self.examples = (
            [classification(row, [row % 3, row % 5], 3, row % 3) for row in range(1, 25)]
            if encoder
            else bigram_completions(24)
        )
        self.template = write_peft_folder(folder / "template", self.engine.model.modules)
        self.observer = Silent()

    def fresh_state(self) -> TrainingState:
        adapter = Adapter.zeros(self.engine.model.modules)
        head = Head(3, 6) if self.encoder else None
        head_optimizer = make_optimizer("adam", head.size) if head is not None else None
        return TrainingState(adapter, make_optimizer("adam", adapter.size), head, head_optimizer)

    def evaluate(self, state: TrainingState) -> Record:
        result = score(self.engine, state.adapter, self.examples[:8], state.head)
        return {"loss": result.loss, "value": -result.loss}

    def go(
        self,
        engine: Any = None,
        save: Callable[[TrainingState], object] | None = None,
        constant_rate: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> TrainingState:
        journal = Journal(self.folder / "journal.jsonl")
        checkpoints = self.folder / "checkpoints"
        state = self.fresh_state()
        load_latest(checkpoints, state, newest=sum(r["type"] == "step" for r in journal.records))
        cosine = schedule("cosine", 0.05, self.settings.steps)

        def rates(step: int) -> dict[str, float]:
            rate = cosine(step) if constant_rate is None else constant_rate
            return {"learning_rate": rate, "head_learning_rate": 0.01}

        def keep(state: TrainingState) -> None:
            save_checkpoint(checkpoints, state, self.template)
            if self.forgets:
                journal.forget_gradients(state.step)

        try:
            learner = AdapterLearner(
                engine=engine or self.engine,
                sampler=Sampler(self.examples, 4, self.settings.seed),
                estimator=self.estimator,
                learning_rates=rates,
                state=state,
                settings=self.settings,
                journal=journal,
                save_state=save or keep,
                evaluate_state=self.evaluate,
            )
            train(learner, self.settings, self.observer, interrupted=interrupted)
            return state
        finally:
            journal.close()


def _bits(state: TrainingState) -> bytes:
    arrays = [state.adapter.values, *state.optimizer.state.values()]
    if state.head is not None and state.head_optimizer is not None:
        arrays += [state.head.values, *state.head_optimizer.state.values()]
    return b"".join(array.tobytes() for array in arrays) + repr(state.progress).encode()


ESTIMATORS = {
    "antithetic": Differences(Antithetic(4, 1e-2)),
    "fzoo": Differences(OneSided(4, 1e-2)),
    "tangent": TangentEstimator(3),
    "tangent, shared directions": TangentEstimator(3, shared=True),
    "tangent, clipped": TangentEstimator(3, max_grad_norm=1.0),
    "exact": Exact(),
    "exact, clipped": Exact(max_grad_norm=1.0),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_loop_learns(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "run", estimator=ESTIMATORS[name], steps=150)
    before = score(run.engine, run.fresh_state().adapter, run.examples).loss
    after = score(run.engine, run.go().adapter, run.examples).loss
    assert after < 0.5 * before


class DyingEngine:
    """An engine whose process is killed after a number of calls."""

    def __init__(self, engine: NumpyEngine, calls: int) -> None:
        self.engine, self.left = engine, calls
        self.model = engine.model

    @property
    def seconds(self) -> float:
        return self.engine.seconds

    def forward(self, call: Call) -> Array:
        self._count()
        return self.engine.forward(call)

    def jvp(self, call: Call, directions: Directions) -> tuple[Array, Array]:
        self._count()
        return self.engine.jvp(call, directions)

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Array, Array]:
        self._count()
        return self.engine.vjp(call, grad_fn)

    def _count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


@pytest.mark.parametrize(
    ("name", "forgets"),
    [
        ("antithetic", False),
        ("tangent", False),
        ("tangent, shared directions", False),
        ("exact", False),
        ("exact", True),
    ],
)
@pytest.mark.parametrize("encoder", [False, True])
def test_a_run_killed_at_any_call_resumes_with_the_same_bits(
    tmp_path: Path, encoder: bool, name: str, forgets: bool
) -> None:
    expected = _bits(Run(tmp_path / "whole", encoder, ESTIMATORS[name], forgets).go())
    run = Run(tmp_path / "killed", encoder, ESTIMATORS[name], forgets)
    for calls in range(1, 50):
        try:
            result = run.go(DyingEngine(run.engine, calls % 4))
            break
        except Killed:
            continue
    assert calls > 5
    assert _bits(result) == expected
    assert (tmp_path / "killed/journal.jsonl").read_bytes() == (tmp_path / "whole/journal.jsonl").read_bytes()


def test_a_run_killed_before_a_checkpoint_is_written_resumes_with_the_same_bits(tmp_path: Path) -> None:
    expected = _bits(Run(tmp_path / "whole").go())
    run = Run(tmp_path / "killed")

    def die(state: TrainingState) -> None:
        raise Killed

    with pytest.raises(Killed):
        run.go(save=die)
    assert _bits(run.go()) == expected


def test_a_run_resumes_from_any_checkpoint_or_from_none(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    expected = _bits(run.go())
    checkpoints = sorted((tmp_path / "run/checkpoints").glob("step-*"), reverse=True)
    assert [folder.name for folder in checkpoints][:2] == ["step-000012", "step-000010"]
    for number in range(len(checkpoints) + 1):
        prune_checkpoints(tmp_path / "run/checkpoints", {int(f.name[5:]) for f in checkpoints[number:]})
        assert _bits(run.go(DyingEngine(run.engine, 0))) == expected


@pytest.mark.parametrize("encoder", [False, True])
def test_dropped_gradients_are_computed_again_if_a_checkpoint_is_damaged(
    tmp_path: Path, encoder: bool
) -> None:
    expected = _bits(Run(tmp_path / "kept", encoder, Exact()).go())
    run = Run(tmp_path / "run", encoder, Exact(), forgets=True)
    assert _bits(run.go()) == expected
    journal = (tmp_path / "run/journal.jsonl").read_bytes()
    assert b'"gradient"' not in journal and b'"gradient"' in (tmp_path / "kept/journal.jsonl").read_bytes()
    for number in range(3):
        checkpoints = sorted((tmp_path / "run/checkpoints").glob("step-*"), reverse=True)
        for folder in checkpoints[: number + 1]:
            (folder / "adapter_model.safetensors").write_bytes(b"damaged")
        run.observer = Silent()
        assert _bits(run.go()) == expected
        # Steps that are computed again count as replayed steps, not as new ones.
        assert run.observer.measured == []
        assert (tmp_path / "run/journal.jsonl").read_bytes() == journal


def test_a_dropped_gradient_is_computed_again_by_the_estimator_of_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", estimator=Exact(), forgets=True)
    with pytest.raises(Killed):
        run.go(DyingEngine(run.engine, 6))
    run.estimator = EstimatorSequence([(0, Exact()), (6, Exact(max_grad_norm=1e-3))])
    expected = _bits(run.go())
    prune_checkpoints(tmp_path / "run/checkpoints", set())
    assert _bits(run.go()) == expected


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_replay_needs_no_engine(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "run", estimator=ESTIMATORS[name])
    expected = _bits(run.go())
    prune_checkpoints(tmp_path / "run/checkpoints", set())
    run.observer = Silent()
    assert _bits(run.go(DyingEngine(run.engine, 0))) == expected
    assert run.observer.steps == list(range(12))
    assert run.observer.measured == []


def test_the_best_evaluation_has_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    state = run.go()
    restored = run.fresh_state()
    load_checkpoint(tmp_path / f"run/checkpoints/step-{state.progress.best_step:06d}", restored)
    assert run.evaluate(restored)["value"] == state.progress.best_value


def test_patience_stops_a_run_early(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", steps=1000, eval_steps=2, patience=3, divergence_ratio=1e9)
    values = iter([0.1, 0.5, 0.2, 0.3, 0.5])
    run.evaluate = lambda state: {"loss": 0.0, "value": next(values)}  # type: ignore[method-assign]
    assert run.go().step == 8


def test_evaluations_happen_at_the_given_steps_and_after_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", eval_steps=0, eval_at=(0, 1, 5))
    run.go()
    with Journal(tmp_path / "run/journal.jsonl") as journal:
        result = [record["step"] for record in journal.records if record["type"] == "evaluation"]
    assert result == [0, 1, 5, 12]


def test_an_interrupted_run_saves_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.go(interrupted=lambda: len(run.observer.steps) == 3)
    assert (run.folder / "checkpoints/step-000003").is_dir()


class BrokenEngine(DyingEngine):
    """An engine whose last output is NaN after a number of calls."""

    def forward(self, call: Call) -> Array:
        return self._broken(super().forward(call))

    def jvp(self, call: Call, directions: Directions) -> tuple[Array, Array]:
        outputs, derivatives = super().jvp(call, directions)
        return outputs, self._broken(derivatives)

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Array, Array]:
        outputs, gradient = super().vjp(call, grad_fn)
        return outputs, self._broken(gradient)

    def _count(self) -> None:
        self.left -= 1

    def _broken(self, array: Array) -> Array:
        return array if self.left >= 0 else np.full(array.shape, np.nan)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_state_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", eval_steps=0)
    with raises(DivergenceError, "loss-not-finite", containing="Step 3"):
        run.go(BrokenEngine(run.engine, 3))
    restored = run.fresh_state()
    load_checkpoint(tmp_path / "run/checkpoints/step-000003", restored)
    assert np.isfinite(restored.adapter.values).all()


def test_a_tangent_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", estimator=TangentEstimator(3), eval_steps=0)
    with raises(DivergenceError, "loss-not-finite", containing="12 of 12"):
        run.go(BrokenEngine(run.engine, 3))
    with Journal(tmp_path / "run/journal.jsonl") as journal:
        assert journal.steps == 3
    assert (tmp_path / "run/checkpoints/step-000003").is_dir()


def test_a_step_that_overflows_is_not_taken(tmp_path: Path) -> None:
    """Adam's first update is the learning rate times the signs of the gradient."""
    run = Run(tmp_path / "run", eval_steps=0)
    with raises(DivergenceError, "adapter-not-finite", containing="Step 0"):
        run.go(constant_rate=3.4e38)
    with Journal(run.folder / "journal.jsonl") as journal:
        assert journal.steps == 0
    assert not list(run.folder.glob("checkpoints/*"))


def test_a_loss_of_development_rows_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.evaluate = lambda state: {"loss": np.nan, "value": 0.5}  # type: ignore[method-assign]
    with raises(DivergenceError, "evaluation-not-finite", containing="Step 0"):
        run.go()
    with Journal(tmp_path / "run/journal.jsonl") as journal:
        assert journal.records == []


def test_a_growing_loss_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", steps=400)
    run.engine.weight *= 0.1
    with raises(DivergenceError, "loss-risen"):
        run.go(constant_rate=-1.0)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.go()
    other = run.fresh_state()
    other.optimizer = make_optimizer("sgd", other.adapter.size)
    with raises(AdapterError, "optimizer-differs"):
        load_checkpoint(tmp_path / "run/checkpoints/step-000012", other)


def test_a_journal_holds_a_projected_gradient_for_every_query_and_example(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", estimator=TangentEstimator(3))
    run.go()
    with Journal(tmp_path / "run/journal.jsonl") as journal:
        records = [record for record in journal.records if record["type"] == "step"]
    assert {np.shape(record["projected_gradients"]) for record in records} == {(3, 4)}
    assert {len(record["rows"]) for record in records} == {4}


def test_recorded_losses(tmp_path: Path) -> None:
    """If these change, runs of earlier versions can't be compared with runs of this version."""
    run = Run(tmp_path / "run")
    run.go()
    with Journal(tmp_path / "run/journal.jsonl") as journal:
        losses = [record["loss"] for record in journal.records if record["type"] == "step"]
    recorded = (
        "4.171188 4.258299 3.667934 3.926559 3.944267 3.655813 "
        "4.008866 3.660753 3.740748 3.001193 3.298386 3.456108"
    )
    np.testing.assert_allclose(losses, [*map(float, recorded.split())], rtol=1e-5)
