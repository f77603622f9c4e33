"""Checkpoints are intact or skipped, kept by one rule, and nothing else in their folder is touched."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.errors import AdapterError
from prge.formats.adapter import Adapter
from prge.formats.peft import HASHES
from prge.model_spec import AdaptedModule
from prge.objectives.classification_head import Head
from prge.training.checkpoint import (
    OPTIMIZER,
    STATE,
    TrainingProgress,
    TrainingState,
    checkpoint_folder,
    kept_steps,
    load_checkpoint,
    load_latest,
    prune_checkpoints,
    save_checkpoint,
    saved_steps,
)
from prge.training.optimizers import make_optimizer
from tests.templates import write_peft_folder

MODULES = (AdaptedModule("q_proj", 2, 8, 8),)
FOREIGN = ["step-000015 (copy)", "step-000010-mine", "step-10", "step-0000010", "step-00001x", "step-٠٠٠٠١٠"]


def _state(step: int) -> TrainingState:
    adapter = Adapter.zeros(MODULES)
    adapter.values[:] = step
    optimizer = make_optimizer("adam", adapter.size)
    return TrainingState(adapter, optimizer, Head(2, 3), None, progress=TrainingProgress(step=step))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return write_peft_folder(tmp_path / "template", MODULES)


@pytest.fixture
def checkpoints(tmp_path: Path, template: Path) -> Path:
    """Return checkpoints of steps 5 and 10."""
    folder = tmp_path / "checkpoints"
    for step in (5, 10):
        save_checkpoint(folder, _state(step), template)
    return folder


def test_a_saved_checkpoint_is_loaded(checkpoints: Path) -> None:
    state = _state(0)
    load_checkpoint(checkpoint_folder(checkpoints, 10), state)
    assert state.step == 10
    np.testing.assert_array_equal(state.adapter.values, 10)


def test_folders_with_other_names_are_ignored(checkpoints: Path, template: Path) -> None:
    for name in FOREIGN:
        shutil.copytree(checkpoint_folder(checkpoints, 10), checkpoints / name)
    assert saved_steps(checkpoints) == [5, 10]
    state = _state(0)
    load_latest(checkpoints, state, newest=20)
    assert state.step == 10
    prune_checkpoints(checkpoints, {5})
    assert sorted(os.listdir(checkpoints)) == sorted([*FOREIGN, "step-000005"])


def test_steps_are_ordered_by_number(checkpoints: Path, template: Path) -> None:
    save_checkpoint(checkpoints, _state(1_000_000), template)
    assert saved_steps(checkpoints) == [5, 10, 1_000_000]


@given(st.integers(1, 200), st.integers(0, 30), st.integers(-1, 200))
def test_which_checkpoints_are_kept_depends_on_the_step_alone(step: int, every: int, best: int) -> None:
    kept = kept_steps(TrainingProgress(step=step, best_step=best), every)
    due = {number for number in range(1, step) if every and number % every == 0}
    assert kept == {step, best} | ({max(due)} if due else set())


def _rehashed(folder: Path, name: str, content: bytes) -> None:
    """Change a file and its hash, as an attacker would."""
    (folder / name).write_bytes(content)
    (folder / HASHES).unlink()


def _changed(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = {**json.loads((folder / STATE).read_bytes()), **changes}
        _rehashed(folder, STATE, json.dumps(content).encode())

    return damage


def _pipe(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / HASHES).unlink()
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def _infinite(folder: Path) -> None:
    state = _state(10)
    next(iter(state.optimizer.state.values()))[:] = np.nan
    shutil.rmtree(folder)
    save_checkpoint(folder.parent, state, folder.parents[1] / "template")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a missing file": lambda folder: (folder / OPTIMIZER).unlink(),
    "a changed file": lambda folder: (folder / STATE).write_text("{}"),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_bytes(b""))[0],
    "a pipe for its state": _pipe(STATE),
    "a pipe for its configuration": _pipe("adapter_config.json"),
    "deep nesting": lambda folder: _rehashed(folder, STATE, b"[" * 100_000),
    "a number of 5,000 digits": lambda folder: _rehashed(folder, STATE, b'{"step":' + b"9" * 5000 + b"}"),
    "another step": _changed(step=7),
    "a step that is a word": _changed(step="10"),
    "a best step in the future": _changed(best_step=10**12),
    "a loss that is no number": _changed(first_loss=[]),
    "a loss that is infinite": _changed(smoothed_loss=math.inf),
    "a best value that is no number": _changed(best_value=math.nan),
    "an optimizer that is not finite": _infinite,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.timeout(10)
def test_a_damaged_checkpoint_is_skipped_and_written_again(
    checkpoints: Path, template: Path, damage: str
) -> None:
    DAMAGE[damage](checkpoint_folder(checkpoints, 10))
    with pytest.raises(AdapterError):
        load_checkpoint(checkpoint_folder(checkpoints, 10), _state(0))
    state = _state(0)
    load_latest(checkpoints, state, newest=20)
    assert state.step == 5
    save_checkpoint(checkpoints, _state(10), template)
    load_checkpoint(checkpoint_folder(checkpoints, 10), state)
    assert state.step == 10


def test_an_intact_checkpoint_is_not_written_again(checkpoints: Path, template: Path) -> None:
    before = checkpoint_folder(checkpoints, 10).stat().st_ino
    save_checkpoint(checkpoints, _state(10), template)
    assert checkpoint_folder(checkpoints, 10).stat().st_ino == before


def test_incomplete_checkpoints_of_killed_processes_are_pruned(tmp_path: Path) -> None:
    for name in (".step-000003.8314-f8enbrgv.partial", ".step-000003 (mine).1-a.partial", "step-000002"):
        (tmp_path / name).mkdir()
    prune_checkpoints(tmp_path, {2})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-000003 (mine).1-a.partial",
        "step-000002",
    ]


def test_of_equal_values_the_lower_loss_is_the_best() -> None:
    progress = TrainingProgress()
    records = [(0, -0.2, 0.7), (2, -0.1, 0.5), (4, -0.1, 0.4), (6, -0.1, 0.45), (8, -0.3, 0.1)]
    best = [progress.judge({"step": step, "value": value, "loss": loss}) for step, value, loss in records]
    assert best == [True, True, True, False, False]
    assert (progress.best_step, progress.best_value, progress.best_loss) == (4, -0.1, 0.4)
    # Patience ends where the value doesn't rise.
    assert progress.evaluations_since_best == 3
    # Recording an evaluation again after a resume changes nothing.
    again = TrainingProgress(**json.loads(json.dumps(asdict(progress))))
    assert again.judge({"step": 4, "value": -0.1, "loss": 0.4}) and again == progress


def test_a_checkpoint_of_an_earlier_version_keeps_its_best_step_among_equal_values() -> None:
    progress = TrainingProgress(step=2, judged=2, best_step=2, best_value=-0.1)
    assert not progress.judge({"step": 4, "value": -0.1, "loss": 0.01})
    assert progress.judge({"step": 6, "value": -0.05, "loss": 0.9})
