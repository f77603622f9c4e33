"""Studies call a verb once for each folder, resume interrupted runs, and keep runs that diverged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import verbs

Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of verbs; a call with `status` writes run.json and fails."""
    made: Calls = []

    def prge(verb: str, **flags: Any) -> None:
        made.append((verb, flags))
        folder: Path = flags.get("resume") or flags["out"]
        folder.mkdir(exist_ok=True)
        if status := flags.get("status"):
            (folder / "run.json").write_text(json.dumps({"run": {"status": status}}), encoding="utf-8")
            raise subprocess.CalledProcessError(1, verb)
        (folder / "final").mkdir()

    monkeypatch.setattr(verbs, "prge", prge)
    return made


def test_a_finished_run_is_not_called_again(tmp_path: Path, calls: Calls) -> None:
    for _ in range(2):
        assert verbs.make_once("run", tmp_path / "run", steps=3) == tmp_path / "run"
    assert calls == [("run", {"steps": 3, "out": tmp_path / "run"})]


def test_an_interrupted_run_is_resumed(tmp_path: Path, calls: Calls) -> None:
    (tmp_path / "journal.jsonl").touch()
    verbs.make_once("run", tmp_path, steps=3)
    assert calls == [("run", {"resume": tmp_path})]


def test_a_run_that_diverged_is_a_result_and_one_that_failed_an_error(tmp_path: Path, calls: Calls) -> None:
    for _ in range(2):
        assert verbs.has_diverged(verbs.make_once("run", tmp_path / "high", status="diverged"))
    assert len(calls) == 1
    with pytest.raises(subprocess.CalledProcessError):
        verbs.make_once("run", tmp_path / "broken", status="failed")
