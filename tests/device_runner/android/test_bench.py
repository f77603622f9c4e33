"""`prge android bench`, with a folder of this machine as the phone and a small bundle for all trials."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from device_runner.android import bench, bundles, trial
from device_runner.android.bundles import BenchModel
from device_runner.android.device import Job, Phone
from device_runner.engines.native.build import library
from prge.errors import DeviceError, PrgeError, RunError
from prge.training.trials import TRIALS
from tests.device_runner.android.daemons import Daemon, end_jobs
from tests.device_runner.android.fake_adb import FakePhone
from tests.refusals import raises

ARGUMENTS = ("--tiny", "--steps", 3, "--threads", 1, "--start-below-celsius", 150)


@pytest.fixture
def fake(tmp_path: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    """Return a phone whose trials all use the workshop's bundle."""

    def make_bundles(models: Sequence[BenchModel], cache: Path | None) -> dict[BenchModel, Path | PrgeError]:
        return dict.fromkeys(models, workshop / "bundle")

    monkeypatch.setattr(bench, "make_bundles", make_bundles)
    # Measured processes have a cache of their own, without the compiled library.
    monkeypatch.setenv("PRGE_NATIVE_LIBRARY", str(library()))
    return FakePhone(tmp_path / "there")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_steps_and_generation_are_measured_once(fake: FakePhone, tmp_path: Path) -> None:
    arguments = ("smollm2-135m", "texts", *ARGUMENTS, "--json", tmp_path / "phone.json")
    lines = fake.prge("bench", *arguments).stdout.splitlines()
    results = read(tmp_path / "phone.json")
    assert results["tiny"] is True and results["runtime"] == "whole"
    steps, texts = (results["trials"][name] for name in ("smollm2-135m", "texts"))
    assert len(steps["step_seconds"]) == 2 and steps["seconds_a_step"] > 0
    assert (
        steps["threads"] == 1
        and steps["trial"]["tokens"] == 16
        and steps["model"] == "random:smollm2-135m:tiny"
    )
    assert texts["tokens_a_second"] > 0 and texts["tokens"] == [8]
    for each in (steps, texts):
        assert each["status"] == "measured" and 10 < each["anonymous_mb"] < each["peak_rss_mb"]
        assert set(each["celsius"]) == {"start", "end"} and set(each["joules"]) == {"by_charge", "by_power"}
    assert [line for line in lines if line.startswith("| smollm2-135m | ") and " s | " in line]
    # No files stay on the phone, and the results don't identify its owner.
    left = {
        path.name for name in ("bundles", "bench", "jobs", "runs") for path in fake.folder.glob(f"{name}/*")
    }
    assert left == set()
    assert '"fake"' not in json.dumps(results) and str(Path.home()) not in json.dumps(results)
    pushed = fake.adb.with_name("adb.pushed").read_text()
    fake.prge("bench", *arguments)
    assert fake.adb.with_name("adb.pushed").read_text() == pushed and read(tmp_path / "phone.json") == results


def test_a_trial_that_fails_has_a_reason_and_the_others_continue(
    fake: FakePhone, tmp_path: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = PrgeError(f"fake: no {Path.home() / 'model'}")

    def make_bundles(models: Sequence[BenchModel], cache: Path | None) -> dict[BenchModel, Path | PrgeError]:
        return {
            model: failure if model.trial.shape == "qwen3-1.7b" else workshop / "bundle" for model in models
        }

    arguments = ("qwen3-1.7b", "qwen2-0.5b", *ARGUMENTS, "--json", tmp_path / "phone.json")
    with monkeypatch.context() as patch:
        patch.setattr(bench, "make_bundles", make_bundles)
        output = fake.prge("bench", *arguments, code=1).stdout
    trials = read(tmp_path / "phone.json")["trials"]
    assert trials["qwen3-1.7b"]["reason"] == "the phone: no ~/model" and "no ~/model" in output
    assert trials["qwen2-0.5b"]["status"] == "measured"
    fake.prge("bench", *arguments)
    assert read(tmp_path / "phone.json")["trials"]["qwen2-0.5b"] == trials["qwen2-0.5b"]


def test_a_job_of_an_interrupted_bench_is_continued(
    fake: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(there: Phone, name: str) -> Job:
        raise KeyboardInterrupt

    arguments = ("qwen2.5-3b", *ARGUMENTS, "--json", tmp_path / "phone.json")
    with monkeypatch.context() as patch:
        patch.setattr(trial, "wait_for", interrupt)
        fake.prge("bench", *arguments, code=130)
    (first,) = (fake.folder / "jobs").iterdir()
    process = (first / "pid").read_text()
    starts: list[str] = []
    monkeypatch.setattr(Phone, "start", lambda there, name, arguments: starts.append(name))
    fake.prge("bench", *arguments)
    assert not starts and process
    assert read(tmp_path / "phone.json")["trials"]["qwen2.5-3b"]["status"] == "measured"


def test_a_full_phone_is_not_measured(
    fake: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phone, "free_bytes", lambda there: 1 << 20)
    reason = "The trial needs"
    assert reason in fake.prge("bench", "texts", "--tiny", "--json", tmp_path / "phone.json", code=1).stdout
    assert read(tmp_path / "phone.json")["trials"]["texts"]["reason"].startswith(reason)


def test_the_error_of_a_verb_is_the_reason(
    fake: FakePhone, tmp_path: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "letters", lambda count, seed=0: "")
    arguments = ("qwen2-0.5b", *ARGUMENTS, "--json", tmp_path / "phone.json")
    fake.prge("bench", *arguments, code=1)
    reason = read(tmp_path / "phone.json")["trials"]["qwen2-0.5b"]["reason"]
    assert reason.startswith("run: prge run: error: ")
    assert "row 1" in reason, "the reason includes the message's details"
    end_jobs(fake.folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smollm",), "there is no trial smollm; the trials are smollm2-135m, texts"),
        (("--steps", 1), "--steps is 1, must be at least 2"),
        (("--models", "qwen=x"), "--models has qwen=x, must be SHAPE=MODEL"),
        (("--start-below-celsius", "warm"), "--start-below-celsius must be a number"),
    ],
)
def test_unusable_settings_are_refused_at_once(
    arguments: tuple[object, ...], message: str, fake: FakePhone
) -> None:
    fake.adb.unlink()
    assert message in fake.prge("bench", *arguments, code=2).stderr


def test_unprepared_phones_and_results_of_another_phone_are_refused(fake: FakePhone, tmp_path: Path) -> None:
    path = tmp_path / "phone.json"
    path.write_text(json.dumps({"prge": "0.0.1", "phone": {}, "trials": {}}))
    error = fake.prge("bench", "texts", "--json", path, code=2).stderr
    assert "another phone" in error and "prge is 0.0.1" in error and "--json" in error
    path.write_text("[")
    assert "Cannot read" in fake.prge("bench", "texts", "--json", path, code=2).stderr
    (fake.folder / "runtime.tree").unlink()
    assert "has no runtime" in fake.prge("bench", "texts", code=2).stderr
    fake.adb.write_text("#!/bin/sh\necho 'List of devices attached'\n")
    assert "Connected devices: none" in fake.prge("bench", "texts", code=2).stderr


def test_bundles_are_estimated_and_refused_if_the_storage_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = {"weights_bytes": 4 << 40, "programs_bytes": 0, "model": {"parameters": 1 << 40}}
    output = json.dumps({**estimate, "export": {"seconds": 90}})
    monkeypatch.setattr(bundles, "output_of", lambda *arguments: output)
    with raises(RunError, "storage-full", containing=str(tmp_path)):
        bundles.make_bundles([BenchModel(TRIALS["qwen3-1.7b"])], tmp_path)
    assert "1 min 30 s" in capsys.readouterr().out


def test_trials_of_one_export_share_a_bundle_and_a_failed_export_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports: list[Path] = []

    def export(*arguments: str, quiet: bool) -> None:
        exports.append(Path(arguments[-1]))
        raise DeviceError("it failed")

    monkeypatch.setattr(bundles, "run_verb", export)
    models = [BenchModel(TRIALS[name], tiny=True) for name in ("smollm2-135m", "texts", "qwen2-0.5b")]
    results = bundles.make_bundles(models, tmp_path)
    assert len(exports) == len(results) == 2 and models[0] == models[1]
    assert all(isinstance(each, DeviceError) for each in results.values())


@pytest.mark.whole
def test_a_bench_that_was_killed_continues(
    daemon: Daemon, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """This test uses the real adb and a real runtime, with a bundle that is exported on this machine."""
    there: Path = request.getfixturevalue("phone")
    path = tmp_path / "phone.json"
    arguments = ["smollm2-360m", *ARGUMENTS, "--steps", 400, "--cache", tmp_path / "cache", "--json", path]
    arguments += ["--folder", there]
    command = [sys.executable, "-m", "prge.cli.main", "android", "bench", *arguments]
    client = daemon.network.start(command, env=daemon.environment, stdout=-3, stderr=-3)
    until = time.monotonic() + 400
    while not (journals := [*there.glob("runs/bench-*/journal.jsonl")]):
        assert time.monotonic() < until and client.poll() is None
        time.sleep(0.02)
    client.send_signal(signal.SIGKILL)
    client.wait()
    (job,) = there.glob("jobs/bench-*")
    begun = job.stat().st_ino, (job / "pid").read_text()
    second = daemon.network.start(command, env=daemon.environment, stdout=-3, stderr=-3)
    time.sleep(2)
    if job.exists():
        assert begun == (job.stat().st_ino, (job / "pid").read_text())
    assert second.wait(timeout=400) == 0
    results = read(path)["trials"]["smollm2-360m"]
    assert results["status"] == "measured" and len(results["step_seconds"]) == 399
    assert not journals[0].exists() and not [*there.glob("bench/*")]
