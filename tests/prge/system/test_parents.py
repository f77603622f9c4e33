"""A process ends with its parent, on Linux and where a thread polls for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prge.system.parents import environment_of_child, python_command

# A parent that starts a child, prints its id and waits; the child prints when it is bound to its parent.
PARENT = """
import subprocess, sys, time
from prge.system.parents import environment_of_child
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment_of_child(), stdout=sys.stdout)
time.sleep(60)
"""
CHILD = """
import os, sys, time
sys.platform = {platform!r}

from prge.system.parents import end_with_starter
end_with_starter()
assert "PRGE_STARTER" not in os.environ
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture(params=[sys.platform, "darwin"])
def child_code(request: pytest.FixtureRequest) -> str:
    return CHILD.format(platform=request.param)


@pytest.fixture
def parent(child_code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, child_code], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def is_there(process: int) -> bool:
    """Return whether a process exists and isn't a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ends_within(process: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while is_there(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_there(process)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(parent: subprocess.Popen[str], signal_number: signal.Signals) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_there(child)
    parent.send_signal(signal_number)
    parent.wait()
    assert ends_within(child, 2)


def test_a_child_ends_if_its_parent_has_already_ended(child_code: str) -> None:
    """The parent ends before the child calls the kernel, when the child already has another parent."""
    environment = {**os.environ, "PRGE_STARTER": str(os.getppid())}
    done = subprocess.run(
        [sys.executable, "-c", child_code], env=environment, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == -signal.SIGKILL and not done.stdout


def test_a_process_without_a_starter_keeps_running() -> None:
    code = CHILD.format(platform=sys.platform).replace("time.sleep(60)", "")
    assert environment_of_child()["PRGE_STARTER"] == str(os.getpid())
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


def test_python_is_started_again_as_a_phone_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert python_command() == [sys.executable]
    script = tmp_path / "run.sh"
    script.write_text(f'exec "{sys.executable}" "$@"\n')
    monkeypatch.setenv("PRGE_PYTHON", str(script))
    code = "print('it runs')"
    done = subprocess.run([*python_command(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "it runs\n"
