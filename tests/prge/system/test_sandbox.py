"""A sandboxed child can compute and answer requests, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.system.sandbox import BoundedChild, LimitError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are rights of Linux")


@pytest.fixture(params=["limits", "landlock"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use only one of the mechanisms that restrict the child."""
    if request.param == "landlock":
        need_landlock()
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    else:
        monkeypatch.setattr("prge.system.sandbox.enter_landlock", lambda: None)
    return str(request.param)


def need_landlock() -> None:
    """Skip unless the kernel has Landlock with ports and signals."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 6:
        pytest.skip("the kernel has no Landlock of version 6")


def outcome(attempt: Callable[[], object]) -> str:
    """Return the result of an attempt in the child: "done", or the name of its error."""

    def serve(_: bytes) -> bytes:
        try:
            attempt()
        except Exception as error:
            return type(error).__name__.encode()
        return b"done"

    return BoundedChild(serve, 5.0, 1 << 28).call(b"").decode()


def test_a_sandboxed_child_opens_no_file(means: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    refused = {"limits": "OSError", "landlock": "PermissionError"}[means]
    assert outcome(secret.read_text) == outcome(lambda: os.listdir(tmp_path)) == refused
    assert outcome(lambda: secret.write_text("y")) == refused and secret.read_text() == "x"


def test_a_sandboxed_child_changes_no_name(tmp_path: Path) -> None:
    need_landlock()
    kept = tmp_path / "kept"
    kept.write_text("all of it")
    attempts: list[Callable[[], object]] = [
        kept.unlink,
        lambda: os.truncate(kept, 0),
        lambda: kept.rename(tmp_path / "moved"),
        lambda: os.symlink("/", tmp_path / "link"),
        (tmp_path / "new").mkdir,
    ]
    assert {outcome(attempt) for attempt in attempts} == {"PermissionError"}
    assert kept.read_text() == "all of it" and list(tmp_path.iterdir()) == [kept]


def test_a_sandboxed_child_reaches_no_port(means: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert outcome(lambda: socket.create_connection(listener.getsockname(), timeout=5)) != "done"
    assert outcome(lambda: socket.create_server(("127.0.0.1", 0))) != "done"


def test_a_sandboxed_child_starts_no_program(means: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = ["/bin/sh", "-c", f"echo >{trace}"]
    with contextlib.suppress(LimitError):
        assert outcome(lambda: os.execv(command[0], command)) != "done"
    assert not trace.exists()


def test_a_sandboxed_child_signals_no_other_process() -> None:
    need_landlock()
    with subprocess.Popen(["sleep", "60"]) as other:
        assert outcome(lambda: os.kill(other.pid, signal.SIGTERM)) == "PermissionError"
        other.kill()


def test_a_sandboxed_child_knows_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time zone's file is read before the child loses access to files."""
    with monkeypatch.context() as context:
        context.setenv("TZ", "America/St_Johns")
        child = BoundedChild(lambda _: time.strftime("%Z").encode(), 5.0, 1 << 28)
        assert child.call(b"") in (b"NST", b"NDT")
    time.tzset()
