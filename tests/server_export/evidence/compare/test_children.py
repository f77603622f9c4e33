"""Verbs run in child processes."""

from __future__ import annotations

from pathlib import Path

from server_export.evidence.compare.children import last_lines, run_verb


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "output.txt"
    assert run_verb(["nonsense"], log) == 2
    assert run_verb(["--version"], log) == 0
    text = log.read_text()
    assert text.startswith("$ prge nonsense\n")
    assert "There is no verb 'nonsense'" in text
    assert last_lines(log, 1).startswith("prge ")
    assert last_lines(tmp_path / "nothing") == ""
