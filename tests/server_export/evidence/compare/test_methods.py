"""The registry of methods, the rows of a step, and the settings that verbs get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from device_runner.session.settings import EvaluateSettings, RunSettings
from prge.cli.settings import Settings, read_settings
from prge.cli.subprocesses import write_verb_config
from prge.training.estimators.table import ESTIMATORS
from prge.training.settings import TrainingFlags
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.evidence.compare.methods import (
    METHODS,
    PlannedRun,
    export_settings,
    run_settings,
)
from server_export.evidence.compare.methods import (
    test_settings as settings_of_test,
)
from server_export.settings import ExportConfig
from tests.comparisons import settings_for

ROWS = {split: Path(f"{split}.jsonl") for split in ("train", "dev", "test")}


def test_methods_have_their_names_and_those_without_backward_pass_are_marked() -> None:
    assert all(name == method.name for name, method in METHODS.items())
    forward = {name for name, method in METHODS.items() if method.forward_only}
    assert forward == {
        "p-rge", "p-rge-q1", "p-rge-q2", "p-rge-q16", "tangent", "tangent-q16", "fzoo", "mezo",
    }  # fmt: skip


def test_queries_times_examples_are_the_same_for_all() -> None:
    assert {method.queries * method.examples(16) for method in METHODS.values()} == {16}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("p-rge", 32), ("p-rge-q16", 32), ("fzoo", 32), ("tangent", 20),
        ("exact", 48), ("backprop-lora-fa", 48), ("mezo", 32),
    ],
)  # fmt: skip
def test_rows_of_a_step(name: str, rows: int) -> None:
    assert METHODS[name].forward_passes(16) == rows


def parsed(settings_class: type[Settings], settings: Mapping[str, Any], folder: Path) -> Settings:
    """Return settings as the verb reads them from its file."""
    return read_settings(
        settings_class, Path(write_verb_config("verb", settings, folder / "verb.yaml")[2]), "prge verb"
    )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.estimator])
def test_engine_methods_have_settings_that_verbs_take(name: str, tmp_path: Path) -> None:
    settings, method = settings_for(tmp_path / "out", "--sequence-length", 16), METHODS[name]
    config = parsed(ExportConfig, export_settings(settings, tmp_path / "b"), tmp_path)
    assert config.sequence_length == 16
    assert method.estimator and ESTIMATORS[method.estimator].role in config.roles
    plan = PlannedRun(10, 1.25e-3, 3, (0, 2, 7, 10))
    chosen = run_settings(method, settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    run = parsed(RunSettings, chosen, tmp_path)
    assert (run.estimator, run.learning_rate, run.steps) == (method.estimator, 1.25e-3, 10)
    assert run.batch_size == method.examples(16)
    assert run.queries == (None if name.startswith("exact") else method.run["queries"])
    assert run.select == "loss"
    assert (run.eval_at, run.eval_steps, run.save_steps) == ([0, 2, 7, 10], 0, 7)
    paths = tmp_path / "bundle", ROWS["test"], tmp_path / "run", tmp_path / "t"
    assert parsed(EvaluateSettings, settings_of_test(settings, *paths), tmp_path).data == ROWS["test"]


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if not one.estimator])
def test_pytorch_methods_have_settings_that_the_verb_takes(name: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    plan = PlannedRun(10, 1e-3, 3, (0, 5, 10), with_test=True)
    chosen = run_settings(METHODS[name], settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    read = parsed(BaselineSettings, chosen, tmp_path)
    assert (read.method, read.dtype) == (
        (name.removesuffix("-bf16"), "bfloat16") if name.endswith("-bf16") else (name, "float32")
    )
    assert (read.batch_size, read.test) == (16, ROWS["test"])
    plan = PlannedRun(10, 1e-3, 3, (0, 5, 10))
    chosen = run_settings(METHODS[name], settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    assert chosen["test"] is None


def test_a_timed_run_has_no_evaluations(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    settings_classes: tuple[tuple[str, type[TrainingFlags]], ...] = (
        ("tangent", RunSettings),
        ("mezo", BaselineSettings),
    )
    for name, settings_class in settings_classes:
        plan = PlannedRun(8, 1e-3, 3)
        chosen = run_settings(METHODS[name], settings, plan, tmp_path / "b", ROWS, tmp_path / "run")
        run = parsed(settings_class, chosen, tmp_path)
        assert (run.dev, run.eval_at, run.eval_steps) == (None, [], 0)


def test_a_bundle_starts_from_the_adapter_or_from_modules(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    chosen = export_settings(settings_for(tmp_path / "out", "--adapter", start), tmp_path / "bundle")
    assert chosen["start_adapter"] == start and not chosen.keys() & {"rank", "target_modules"}
    chosen = export_settings(settings_for(tmp_path / "out", "--target-modules", "value"), tmp_path / "bundle")
    assert (chosen["rank"], chosen["target_modules"]) == (8, ["value"])
