"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# Tells a verb which process it is a step of.
_STARTER = "PRGE_STARTER"
# Tells which script starts Python where that needs a loader of its own; see device_runner/android/run.sh.
_SCRIPT = "PRGE_PYTHON"
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_POLL_SECONDS = 0.1


def python_command() -> list[str]:
    """The first words of a command that starts this Python again: on a phone, through its script."""
    script = os.environ.get(_SCRIPT)
    return ["sh", script] if script else [sys.executable]


def environment_of_child() -> dict[str, str]:
    """The environment of a verb that this process starts: the verb is killed when this process ends."""
    return {**os.environ, _STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """Let this process end with that which started it as a step of its own, if one did."""
    starter = os.environ.pop(_STARTER, "")
    if starter.isdecimal():
        end_with_parent(int(starter))


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, however that ends: what it does must survive kill -9.

    On Linux the system does it, when the thread ends that started this process; elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    else:
        threading.Thread(target=_wait_for_its_end, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the system was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_its_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
