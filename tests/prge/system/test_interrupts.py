"""Ctrl-C ends the work once, and the caller's handler is restored afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from prge.cli.main import main
from prge.errors import INTERRUPTED
from prge.system.interrupts import ignore_interrupts, single_interrupt


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Install the default handler, since a process in a shell's background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_ends_the_work_and_later_ones_do_not_disturb_its_end() -> None:
    ended = []
    with single_interrupt(restored=True):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        ended.append("called")
    assert ended == ["called"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_after_the_work_is_ignored() -> None:
    with single_interrupt(restored=True):
        ignore_interrupts()
        interrupt()


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with single_interrupt(restored=True):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_line_reports_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_twice(_: object) -> int:
        try:
            interrupt()
        finally:
            interrupt()
        return 0

    monkeypatch.setattr("device_runner.doctor.main", interrupt_twice)
    assert main(["doctor"]) == INTERRUPTED
    assert capsys.readouterr().err == "prge doctor: interrupted\n"


def test_the_command_line_reports_an_interrupt_before_a_verb_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_slowly() -> None:
        interrupt()

    monkeypatch.setattr("prge.cli.main.open_standard_files", open_slowly)
    monkeypatch.delenv("PRGE_DEBUG", raising=False)
    assert main(["doctor"]) == INTERRUPTED
    assert capsys.readouterr().err == "prge: interrupted\n"
