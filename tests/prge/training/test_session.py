"""A session continues from its store, and ends with the same bits wherever it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.errors import ConfigError
from prge.formats.adapter import Adapter
from prge.formats.journal import Journal, Record
from prge.objectives.examples import Example
from prge.training.estimators.protocol import Measurement
from prge.training.recipe import Recipe
from prge.training.sampler import Sampler
from prge.training.session import SessionData, SilentObserver, open_session
from prge.training.store import RunStore
from tests.numpy_engine import NumpyEngine
from tests.refusals import raises
from tests.rows import bigram_completions
from tests.templates import write_peft_folder

EXAMPLES = bigram_completions(24)
RECIPE = Recipe(
    estimator="exact",
    optimizer="adam",
    adam_beta2=0.98,
    batch_size=4,
    steps=9,
    eval_steps=4,
    learning_rate=0.05,
)


@pytest.fixture
def engine() -> NumpyEngine:
    return NumpyEngine()


@pytest.fixture
def data(engine: NumpyEngine) -> SessionData:
    adapter = Adapter.zeros(engine.model.modules)
    return SessionData(train=EXAMPLES, dev=EXAMPLES[:8], adapter=adapter)


@pytest.fixture
def store(engine: NumpyEngine, tmp_path: Path) -> Iterator[RunStore]:
    template = write_peft_folder(tmp_path / "template", engine.model.modules)
    (tmp_path / "run").mkdir()
    with Journal(tmp_path / "run" / "journal.jsonl") as journal:
        yield RunStore(folder=tmp_path / "run", journal=journal, template=template, save_steps=3)


def identity(**changes: Any) -> Record:
    """Return the identity of a run with the recipe."""
    hashes = dict.fromkeys(("bundle", "train", "dev", "task", "adapter", "tokens", "objective"), "")
    return {"type": "start", **hashes, "settings": replace(RECIPE, **changes).to_record()}


def begin(store: RunStore, may_change: bool = False, **changes: Any) -> None:
    store.begin(identity(**changes), "steps: 9\n", date="2026-01-01", may_change=may_change)


class Steps(SilentObserver):
    """Records which steps were computed and which were replayed from the journal."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        if measurement is not None:
            self.computed.append(record["step"])


def test_a_session_trains_and_writes_the_best_step(
    engine: NumpyEngine, data: SessionData, store: RunStore
) -> None:
    begin(store)
    session = open_session(RECIPE, engine, data, store)
    assert session.state.step == 0
    session.train(SilentObserver())
    assert session.state.step == 9
    evaluations = [record["loss"] for record in store.journal.records if record["type"] == "evaluation"]
    assert len(evaluations) == 4 and evaluations[-1] < 0.9 * evaluations[0]
    assert (store.write_result(session.state) / "adapter_model.safetensors").is_file()
    assert not data.adapter.values.any()


@pytest.mark.parametrize("until", [1, 3, 5, 9])
def test_an_interrupted_session_resumes_with_the_same_bits(
    engine: NumpyEngine, data: SessionData, store: RunStore, until: int, tmp_path: Path
) -> None:
    begin(store)
    (tmp_path / "whole").mkdir()
    with Journal(tmp_path / "whole" / "journal.jsonl") as journal:
        other = replace(store, folder=tmp_path / "whole", journal=journal)
        begin(other)
        whole = open_session(RECIPE, engine, data, other)
        whole.train(SilentObserver())
    first = open_session(RECIPE, engine, data, store)
    first.train(SilentObserver(), lambda: first.state.step == until)
    again, steps = open_session(RECIPE, engine, data, store), Steps()
    assert again.state.step == until
    again.train(steps)
    assert steps.computed == [*range(until, 9)]
    assert again.state.adapter.values.tobytes() == whole.state.adapter.values.tobytes()


def test_a_session_may_end_before_the_recipes_last_step(
    engine: NumpyEngine, data: SessionData, store: RunStore
) -> None:
    """A shorter session has the learning rates of the whole recipe."""
    begin(store)
    session = open_session(RECIPE, engine, data, store, until=4)
    session.train(SilentObserver())
    rates = RECIPE.learning_rates()
    learning_rates = [record["learning_rate"] for record in store.journal.records if record["type"] == "step"]
    assert learning_rates == [rates(step)["learning_rate"] for step in range(4)]


def test_data_can_have_their_own_sampler(engine: NumpyEngine, data: SessionData, store: RunStore) -> None:
    class Last(Sampler):
        def examples_at(self, step: int) -> list[Example]:
            return list(self.examples[-2:])

    begin(store)
    session = open_session(RECIPE, engine, replace(data, sampler=Last(EXAMPLES, 2, 0)), store)
    session.train(SilentObserver())
    rows = {tuple(record["rows"]) for record in store.journal.records if record["type"] == "step"}
    assert rows == {tuple(example.row for example in EXAMPLES[-2:])}


def test_a_resumed_run_must_have_the_same_settings(store: RunStore) -> None:
    begin(store)
    begin(store)
    assert len(store.journal.records) == 1
    with raises(ConfigError, "settings-changed", containing="learning_rate") as caught:
        begin(store, learning_rate=0.1)
    assert "--change-estimator lets these differ" in str(caught.value.remedy)
    with raises(ConfigError, "settings-changed", containing="train"):
        store.begin({**identity(), "train": "else"}, "", date=None, may_change=False)


def test_a_step_is_replayed_by_the_estimator_that_computed_it(
    engine: NumpyEngine, data: SessionData, store: RunStore
) -> None:
    begin(store)
    first = open_session(RECIPE, engine, data, store)
    first.train(SilentObserver(), lambda: first.state.step == 2)
    changed = replace(RECIPE, estimator="tangent", queries=2)
    begin(store, may_change=True, estimator="tangent", queries=2)
    second, steps = open_session(changed, engine, data, store), Steps()
    second.train(steps)
    assert steps.computed == [*range(2, 9)]
    has_gradient = [
        "gradient" in record or "projected_gradients" in record for record in store.journal.records
    ]
    assert any(has_gradient) and np.isfinite(second.state.adapter.values).all()
