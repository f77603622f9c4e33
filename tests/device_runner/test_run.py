"""`prge run`, `replay` and `eval` on tangent bundles, with a model in numpy for the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import evaluate as evaluate_verb
from device_runner import run as run_verb
from device_runner.replay import main as replay
from device_runner.run import run
from device_runner.session.settings import RunSettings
from prge.bundle import MANIFEST, open_bundle
from prge.errors import ConfigError
from prge.journal import Journal
from prge.run_folder import with_stored_settings
from prge.settings import parse_settings
from tests.device_runner.numpy_device import BATCH, QUERIES, Device, Killed, write_films

STEPS = 12


@pytest.fixture(params=[False, True], ids=["decoder", "encoder"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(request.param)
    device.replaces(monkeypatch, run_verb)
    return device


@pytest.fixture
def settings(device: Device, tmp_path: Path) -> RunSettings:
    """A short run; an encoder's is a classification, a decoder's learns texts."""
    write_films(tmp_path)
    return RunSettings(
        bundle=device.write_bundle(tmp_path / "bundle"),
        train=tmp_path / "train.jsonl",
        dev=tmp_path / "dev.jsonl",
        task=str(tmp_path / "task.yaml") if device.encoder else None,
        out=tmp_path / "run",
        steps=STEPS,
        calls=2,
        learning_rate=0.02,
        evaluate_every=4,
        checkpoint_every=5,
        head_folds=4,
        select="loss",
        quiet=True,
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shared", [False, True])
def test_it_learns_and_its_journal_makes_the_same_bits_again(
    device: Device, settings: RunSettings, shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(settings, steps=60, share_directions=shared))
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert min(r["loss"] for r in evaluations) < 0.98 * evaluations[0]["loss"]
    device.load = None  # type: ignore[assignment, method-assign]
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out


def test_the_journal_says_what_the_bundle_settled(device: Device, settings: RunSettings) -> None:
    run(settings)
    with Journal(settings.out / "journal.jsonl", writable=False) as journal:
        start = journal.first("start")
        assert start is not None
        assert (start["settings"]["estimator"], start["settings"]["queries"]) == ("tangent", QUERIES)
        first = journal.step(0)
        assert first is not None and np.shape(first["scalars"]) == (QUERIES, 2 * BATCH)
    stored = parse_settings(RunSettings, with_stored_settings(["--resume", str(settings.out)]), "prge run")
    assert (stored.estimator, stored.queries) == ("tangent", QUERIES)


def test_metrics_count_rows_and_tell_the_largest_tangent(device: Device, settings: RunSettings) -> None:
    run(settings)
    steps = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "step"]
    assert [r["rows"] for r in steps] == [n * 2 * BATCH * (1 + QUERIES) for n in range(1, STEPS + 1)]
    assert all(r["largest_tangent"] > 0 and r["scalar_deviation"] > 0 for r in steps)
    summary = json.loads((settings.out / "run.json").read_text())
    assert summary["train"]["largest_tangent"] == max(r["largest_tangent"] for r in steps)


def test_one_program_is_loaded_at_a_time(device: Device, settings: RunSettings) -> None:
    run(settings)
    assert device.loads == ["score", "forward"] * 3 + ["score"]


def test_programs_are_kept_if_asked_and_change_nothing_else(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    run(settings)
    device.loads.clear()
    run(replace(settings, keep_programs=True, out=tmp_path / "kept"))
    assert sorted(device.loads) == ["forward", "score"]
    assert (tmp_path / "kept/journal.jsonl").read_bytes() == (settings.out / "journal.jsonl").read_bytes()


def test_killed_after_any_calls_and_resumed_it_ends_in_the_same_bits(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    run(settings)
    killed = replace(settings, out=tmp_path / "killed")
    resumes = 0
    while True:
        device.calls_left = 3 + resumes % 8
        resume = killed.out if (killed.out / "config.yaml").is_file() else None
        try:
            run(replace(killed, resume=resume))
            break
        except Killed:
            resumes += 1
    assert resumes > 3
    for name in ("journal.jsonl", "final/adapter_model.safetensors"):
        assert (killed.out / name).read_bytes() == (settings.out / name).read_bytes()


def test_a_run_isnt_resumed_with_other_directions(device: Device, settings: RunSettings) -> None:
    run(settings)
    with pytest.raises(ConfigError, match="share_directions was False, is True"):
        run(replace(settings, resume=settings.out, share_directions=True))


def test_differences_need_another_bundle(settings: RunSettings) -> None:
    with pytest.raises(ConfigError, match="export with --estimator antithetic"):
        run(replace(settings, estimator="antithetic"))
    assert not settings.out.exists()


def test_evaluation_loads_the_program_for_scoring_alone(
    device: Device, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings)
    device.loads.clear()
    device.replaces(monkeypatch, evaluate_verb)
    assert settings.dev is not None
    found = evaluate_verb.run(
        evaluate_verb.EvaluateSettings(settings.bundle, settings.dev, settings.task, adapter=settings.out)
    )
    assert device.loads == ["score"]
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert found["loss"] == pytest.approx(min(r["loss"] for r in evaluations), rel=1e-6)


def test_the_bundle_of_these_tests_is_whole(settings: RunSettings) -> None:
    bundle = open_bundle(settings.bundle)
    assert bundle.contract.is_tangent and not bundle.score_contract.is_tangent
    assert (settings.bundle / MANIFEST).is_file()
