"""Another process runs a verb and reports the time and memory that the verb took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from device_runner.session import measurement as measuring
from device_runner.session.sensors import SensorReading, Sensors
from tests.verbs import REPOSITORY


def started(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    module = ["-m", "device_runner.session.measurement", tmp_path / "cache", tmp_path / "found"]
    command = [sys.executable, *module, 150, 1]
    return subprocess.Popen(
        [*map(str, (*command, *arguments))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def test_a_verb_is_measured_and_has_a_cache_of_its_own(tmp_path: Path) -> None:
    child = started(tmp_path, "cache", "--json")
    message, _ = child.communicate(timeout=60)
    assert json.loads(message)["folders"][0]["folder"].startswith(str(tmp_path / "cache"))
    result = json.loads((tmp_path / "found").read_text())
    assert child.returncode == result["code"] == 0
    assert 0 < result["anonymous_mb"] < result["peak_rss_mb"] and result["seconds"] > 0
    assert result["sensors"]["start"].keys() == result["sensors"]["end"].keys()
    assert result["joules"].keys() == {"by_charge", "by_power"}


def test_an_error_and_a_kill_have_their_codes(tmp_path: Path, workshop: Path) -> None:
    child = started(tmp_path, "cache", "--nothing")
    assert "--nothing is not a flag" in child.communicate(timeout=60)[1] and child.returncode == 2
    arguments = (
        "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--out", tmp_path / "run",
    )  # fmt: skip
    child = started(tmp_path, "run", *arguments, "--steps", 100_000, "--task", workshop / "task.yaml")
    journal, until = tmp_path / "run/journal.jsonl", time.monotonic() + 60
    while not (journal.is_file() and b'"type":"step"' in journal.read_bytes()):
        assert time.monotonic() < until
        time.sleep(0.05)
    # After the signal the run ends after its step.
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert json.loads((tmp_path / "found").read_text())["code"] == 130


def test_a_verb_waits_until_the_phone_is_cool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = [50.0, 41.0, 40.0]
    monkeypatch.setattr(Sensors, "temperature", lambda sensors: SensorReading(degrees.pop(0)))
    monkeypatch.setattr(measuring, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(measuring, "measure", lambda cache, arguments: {"code": 0})
    arguments = [str(tmp_path), str(tmp_path / "found"), "40"]
    assert measuring.main([*arguments, "1", "cache"]) == 0 and not degrees
    degrees[:] = [50.0] * 9
    (tmp_path / "found").unlink()
    assert measuring.main([*arguments, "0", "cache"]) == 2
    assert "error: too hot: 50.0 degrees Celsius after 0 minutes, not 40" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()
    monkeypatch.setattr(Sensors, "temperature", lambda sensors: SensorReading(None, reason="it doesn't tell"))
    assert measuring.main([*arguments, "0", "cache"]) == 0
