"""Verbs in child processes: settings files, interrupts, and locks of run folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from prge.cli import subprocesses as starting
from prge.cli.subprocesses import run_verb, wait_until_free, write_verb_config
from prge.errors import INTERRUPTED, PrgeError


def test_settings_go_into_a_file_that_the_verb_reads(tmp_path: Path) -> None:
    path = tmp_path / "settings" / "run.yaml"
    settings = {"bundle": Path("b"), "columns": ("a=b", "c=--d"), "quiet": False, "threads": None}
    assert write_verb_config("android run", settings, path) == ["android", "run", "--config", str(path)]
    assert yaml.safe_load(path.read_text()) == {"bundle": "b", "columns": ["a=b", "c=--d"], "quiet": False}


@pytest.mark.parametrize(
    ("code", "expected"), [(INTERRUPTED, KeyboardInterrupt), (2, PrgeError), (-9, PrgeError)]
)
def test_an_interrupted_step_interrupts_the_caller(
    monkeypatch: pytest.MonkeyPatch, code: int, expected: type[BaseException]
) -> None:
    """An interrupted child interrupts its caller; any other exit code is an error."""
    end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    monkeypatch.setattr(starting, "verb_command", lambda *arguments: [sys.executable, "-c", end])
    with pytest.raises(expected):
        run_verb("run")


def test_a_folder_that_no_process_locks_is_free(tmp_path: Path) -> None:
    wait_until_free(tmp_path)
    (tmp_path / "run.lock").touch()
    wait_until_free(tmp_path)
