"""`prge baseline`: the files of a run, and restarts of a killed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from device_runner.report import ReportSettings, report
from prge.cli.main import main
from prge.errors import ConfigError, DivergenceError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.peft import find_adapter, read_arrays, read_peft
from prge.formats.run_folder import read_metrics
from prge.training.monitor import RunMonitor
from server_export.evidence.baselines.command import run
from server_export.evidence.baselines.methods import METHODS, MethodName
from server_export.evidence.baselines.settings import BaselineSettings
from tests.refusals import raises

MakeSettings = Callable[..., BaselineSettings]
WEIGHTS = "adapter_model.safetensors"


def train_block(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "run.json").read_text())
    assert content.keys() == {"run", "train", "meta"}
    return dict(content["train"])


def test_files_of_a_run(make_settings: MakeSettings, workshop: Path) -> None:
    settings = make_settings(test=workshop / "dev.jsonl", steps=40, learning_rate=0.005)
    final = run(settings)
    assert final == settings.out / "final"
    records = read_metrics(settings.out)
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 41))
    # Four rows in a step, and a backward pass at the cost of two forward passes.
    assert [record["forward_passes"] for record in steps] == [12 * step for step in range(1, 41)]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    assert [record["step"] for record in evaluations] == list(range(0, 41, 4))
    assert evaluations[-1]["loss"] < 0.5 * evaluations[0]["loss"]
    train = train_block(settings.out)
    assert (train["steps"], train["forward_passes"]) == (40, 480)
    assert train["trained_values"] == sum(
        m.rank * m.out_features for m in open_bundle(settings.bundle).chain.modules
    )
    assert 0 < train["evaluation_seconds"] < train["seconds"]
    assert train["memory"]["baseline_bytes"] < train["memory"]["peak_bytes"]
    best = max(evaluations, key=lambda record: (record["accuracy"], -record["loss"]))
    assert train["best"] == {
        "step": best["step"],
        "loss": best["loss"],
        "accuracy": best["accuracy"],
        "examples": 16,
    }
    # The test rows of this run are its development rows, scored with the best step's adapter.
    assert train["test"]["examples"] == 16
    assert train["test"]["loss"] == pytest.approx(best["loss"], rel=1e-6)
    report(ReportSettings((settings.out,), settings.out / "curves.svg"))
    assert {path.name for path in settings.out.iterdir()} >= {"config.yaml", "log.txt"}
    assert not (settings.out / "best.pt").exists()


def test_the_adapter_of_a_baseline_fits_the_bundle(make_settings: MakeSettings) -> None:
    settings = make_settings()
    run(settings)
    bundle = open_bundle(settings.bundle)
    adapter = read_peft(find_adapter(settings.out), bundle.chain.modules)
    assert np.abs(adapter.values).max() > 0


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"executorch-training"}))
def test_a_killed_baseline_that_starts_again_ends_with_the_same_numbers(
    make_settings: MakeSettings, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = 1e-4 if method in ("mezo", "backprop-full", "quantized-training") else 0.01
    chosen: dict[str, Any] = {"method": method, "learning_rate": rate, "steps": 4, "eval_steps": 2}
    if method == "sparse-bp":
        # A quarter of one block is too little for any update.
        chosen["memory_share"] = 0.9
    whole = make_settings(out=tmp_path / "whole", **chosen)
    run(whole)
    killed = make_settings(out=tmp_path / "killed", **chosen)
    on_step = RunMonitor.on_step

    def stop(self: Any, record: Any, *rest: Any) -> None:
        on_step(self, record, *rest)
        if record["step"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunMonitor, "on_step", stop)
        run(killed)
    assert json.loads((killed.out / "run.json").read_text())["run"]["status"] == "interrupted"
    run(killed)
    (path,) = whole.out.glob("final/*.safetensors")
    expected, result = read_arrays(path), read_arrays(killed.out / "final" / path.name)
    assert expected.keys() == result.keys()
    assert all(np.array_equal(expected[name], result[name]) for name in expected)
    losses = [[record["loss"] for record in read_metrics(folder)] for folder in (whole.out, killed.out)]
    assert losses[0] == losses[1]
    assert not (killed.out / "best.pt").exists()


def test_a_finished_run_is_left_alone(make_settings: MakeSettings) -> None:
    settings = make_settings(steps=2)
    run(settings)
    with raises(RunError, "run-exists", containing=str(settings.out)):
        run(settings)
    assert (settings.out / "final" / WEIGHTS).is_file()


def test_another_run_is_left_alone(make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with raises(RunError, "folder-occupied", containing=str(tmp_path / "run")):
        run(make_settings())


def test_patience_ends_a_run_and_the_best_step_is_the_result(make_settings: MakeSettings) -> None:
    settings = make_settings(steps=40, patience=2, learning_rate=1e-9, select="metric")
    run(settings)
    assert train_block(settings.out)["best"]["accuracy"] == train_block(settings.out)["before"]["accuracy"]
    assert json.loads((settings.out / "run.json").read_text())["run"]["status"] == "stopped early"
    assert train_block(settings.out)["steps"] == 8


def test_a_diverging_loss_ends_the_run(make_settings: MakeSettings) -> None:
    settings = make_settings(learning_rate=1e4, optimizer="sgd", steps=40, divergence_ratio=1.5)
    with raises(DivergenceError, "loss-risen"):
        run(settings)
    assert json.loads((settings.out / "run.json").read_text())["run"]["status"] == "diverged"


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"method": "mezo", "optimizer": "adam"}, "--optimizer is adam"),
        ({"epsilon": 0.1}, "--epsilon"),
        ({"retention": 1.5, "method": "far"}, "--retention is 1.5"),
        ({"memory_share": 0.0, "method": "sparse-bp"}, "--memory-share is 0.0"),
        ({"warmup_steps": 13}, "--warmup-steps is 13"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused_by_name(
    make_settings: MakeSettings, changes: dict[str, Any], value: str
) -> None:
    with raises(ConfigError, "settings-unusable", containing=value):
        make_settings(**changes)


def test_every_method_has_a_name_and_a_module() -> None:
    assert tuple(METHODS) == get_args(MethodName)
    assert all(callable(entry.load()) for entry in METHODS.values())


def test_the_verb_runs_from_the_command_line(
    make_settings: MakeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(steps=2)
    arguments = ["baseline", "--quiet"]
    for name in ("method", "bundle", "model", "train", "task", "out", "steps"):
        arguments += [f"--{name}", str(getattr(settings, name))]
    assert main([*arguments, "--queries", "4", "--method", "mezzo"]) == 2
    output = capsys.readouterr().err
    assert "--queries is not a flag of this verb" in output
    assert "--method must be one of backprop-lora-fa, " in output
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"{settings.out / 'final'}\n")
    assert main(arguments) == 2
    assert "holds a finished run" in capsys.readouterr().err
