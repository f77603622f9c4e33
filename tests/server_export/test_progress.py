"""The displayed progress of an export's stages."""

from __future__ import annotations

import io
import time

import pytest

from server_export import progress as module
from server_export.progress import count_parts, stage
from tests.terminals import Terminal


def lines(text: str) -> list[str]:
    return text.replace("\x1b[K", "").split("\r")


def test_a_bar_moves_on_a_terminal_and_leaves_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TERMINAL_SECONDS", 0.01)
    terminal = Terminal()
    with stage("lowering", terminal) as note:
        done = count_parts(4)
        for _ in range(4):
            time.sleep(0.05)
            done()
        time.sleep(0.05)
        note("two kinds")
    *updates, last = lines(terminal.getvalue())
    bars = [line.count("#") for line in updates]
    assert bars == sorted(bars) and len(set(bars)) == 5 and max(bars) == 24
    assert last.startswith("lowering") and last.endswith("s  two kinds\n") and "#" not in last


def test_without_a_terminal_dots_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOT_SECONDS", 0.02)
    stream = io.StringIO()
    with stage("lowering", stream):
        time.sleep(0.1)
    output = stream.getvalue()
    assert output.startswith("lowering  ..") and output.endswith(" s  \n") and "\r" not in output


def test_counted_parts_give_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOT_SECONDS", 0.05)
    stream = io.StringIO()
    with stage("lowering", stream):
        count_parts(1000)(1)
        time.sleep(0.2)
    assert "0%, about " in stream.getvalue() and " s left  " in stream.getvalue()


def test_a_failed_stage_ends_its_line_before_the_error() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), stage("lowering", stream):
        count_parts(3)()
        raise ValueError("no")
    assert stream.getvalue() == "lowering  \n"


def test_parts_counted_without_a_stage_do_not_count_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOT_SECONDS", 0.02)
    count_parts(3)(2)
    stream = io.StringIO()
    with stage("lowering", stream):
        time.sleep(0.1)
    assert "%" not in stream.getvalue()
