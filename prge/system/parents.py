"""Child processes that end when their parent ends, even if the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# Environment variable with the id of the process that started a verb as one of its steps.
_STARTER = "PRGE_STARTER"
# Environment variable with the script that starts Python on a phone; see device_runner/android/run.sh.
_SCRIPT = "PRGE_PYTHON"
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_POLL_SECONDS = 0.1


def python_command() -> list[str]:
    """Return the first words of a command that starts this Python interpreter; on a phone, a script."""
    script = os.environ.get(_SCRIPT)
    return ["sh", script] if script else [sys.executable]


def environment_of_child() -> dict[str, str]:
    """Return the environment for a verb that must be killed when this process ends."""
    return {**os.environ, _STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """Make this process end with the process that started it as a step, if there is one."""
    starter = os.environ.pop(_STARTER, "")
    if starter.isdecimal():
        end_with_parent(int(starter))


def end_with_parent(parent: int) -> None:
    """Have this process killed with SIGKILL when its parent ends; its work must survive kill -9.

    On Linux the kernel does this when the thread that started this process ends; elsewhere a thread polls.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    else:
        threading.Thread(target=_kill_when_orphaned, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
