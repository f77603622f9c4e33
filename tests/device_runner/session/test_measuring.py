"""A verb is run by another process, which tells what it took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.verbs import REPOSITORY


def started(tmp_path: Path, *words: object) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "device_runner.session.measuring",
        tmp_path / "cache",
        tmp_path / "found",
    ]
    return subprocess.Popen(
        [*map(str, (*command, *words))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def test_a_verb_is_measured_and_has_a_cache_of_its_own(tmp_path: Path) -> None:
    child = started(tmp_path, "cache", "--json")
    told, _ = child.communicate(timeout=60)
    assert json.loads(told)["folders"][0]["folder"].startswith(str(tmp_path / "cache"))
    found = json.loads((tmp_path / "found").read_text())
    assert child.returncode == found["code"] == 0
    assert 0 < found["anonymous_mb"] < found["peak_rss_mb"] and found["seconds"] > 0
    assert found["sensors"]["start"].keys() == found["sensors"]["end"].keys()
    assert found["joules"].keys() == {"by_charge", "by_power"}


def test_an_error_and_a_kill_have_their_codes(tmp_path: Path, workshop: Path) -> None:
    child = started(tmp_path, "cache", "--nothing")
    assert "--nothing is no flag" in child.communicate(timeout=60)[1] and child.returncode == 2
    words = ("--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--out", tmp_path / "run")
    child = started(tmp_path, "run", *words, "--steps", 100_000, "--task", workshop / "task.yaml")
    journal, until = tmp_path / "run/journal.jsonl", time.monotonic() + 60
    while not (journal.is_file() and b'"kind":"step"' in journal.read_bytes()):
        assert time.monotonic() < until
        time.sleep(0.05)
    # Told to stop, the run ends after its step.
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert json.loads((tmp_path / "found").read_text())["code"] == 130
