"""A program is tried in a forked child: the parent reports whatever happens to the child, and continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from device_runner.engines import child_check
from device_runner.engines.child_check import check_in_child
from device_runner.engines.errors import EngineRefusalError
from prge.errors import BundleError, EngineError, PrgeError
from prge.formats.run_folder import run_lock
from tests.refusals import raises

ROOT = Path(__file__).parents[3]
PROGRAM = Path("block.pte")


def fails_with(error: BaseException) -> Callable[[], None]:
    def attempt() -> None:
        raise error

    return attempt


def dies_of(code: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), code)


def test_a_child_that_succeeds_reports_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    check_in_child(PROGRAM, lambda: None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("attempt", "error", "code", "value"),
    [
        (fails_with(EngineRefusalError("error 0x23", "", 0x23)), BundleError, "program-refused", "block.pte"),
        (os.abort, BundleError, "program-aborts", "SIGABRT"),
        (dies_of(signal.SIGSEGV), BundleError, "program-aborts", "SIGSEGV"),
        (dies_of(signal.SIGKILL), EngineError, "program-check-killed", "SIGKILL"),
        (dies_of(signal.SIGTERM), EngineError, "program-check-killed", "SIGTERM"),
        (fails_with(MemoryError()), EngineError, "out-of-memory", "block.pte"),
    ],
)
def test_the_reason_for_the_end_of_a_child_is_reported(
    attempt: Callable[[], None], error: type[PrgeError], code: str, value: str
) -> None:
    with raises(error, code, containing=value) as caught:
        check_in_child(PROGRAM, attempt)
    assert caught.value.remedy


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_check, "CHECK_SECONDS", 0.2)
    with raises(BundleError, "program-hangs", containing=str(PROGRAM)):
        check_in_child(PROGRAM, lambda: time.sleep(60))


def test_a_child_holds_no_lock_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, signal, time
        from pathlib import Path
        from device_runner.engines.child_check import check_in_child
        from prge.formats.run_folder import run_lock

        def attempt():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(20)

        with run_lock(Path({str(tmp_path / "run")!r})):
            check_in_child(Path("block.pte"), attempt)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
