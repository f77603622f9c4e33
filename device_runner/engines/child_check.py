"""Trying a program in a forked child, where an abort of the engine ends only the child."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from device_runner.engines.refusals import RefusedError, content, load_error, quoted
from prge.errors import BundleError, EngineError
from prge.host.children import close_all_but
from prge.host.memory import GET_MEMORY, tells_no_memory
from prge.host.parents import end_with_parent

CHECK_SECONDS = 600.0


def check_in_child(path: Path, attempt: Callable[[], object]) -> None:
    """Do `attempt` in a forked child; it loads the program at `path` and runs it. Nothing without fork.

    Check before the first engine runs: a child lacks the threads that a running one waits for.

    Raises:
        BundleError, EngineError: the child was killed by a signal, hangs, or the engine refused the program.
    """
    if not hasattr(os, "fork"):
        return
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        with warnings.catch_warnings():
            # Python warns of forks while threads run; this child calls the engine and leaves.
            warnings.simplefilter("ignore", DeprecationWarning)
            parent = os.getpid()
            child = os.fork()
        if child == 0:
            _child(attempt, answer.fileno(), log.fileno(), parent)
        status = _wait(child, CHECK_SECONDS)
        messages, noise = (content(stream) for stream in (answer, log))
    if status is None:
        raise BundleError(
            f"the engine hangs on {path}: it was not loaded after {CHECK_SECONDS:.0f} seconds",
            remedy="copy or export the bundle again",
            code="program-hangs",
        )
    if os.WIFSIGNALED(status):
        code = os.WTERMSIG(status)
        if code == signal.SIGKILL:
            raise EngineError(
                f"the system ended the process that loaded {path} (SIGKILL)",
                remedy="most likely there is not enough memory: close other programs or use a smaller model",
                code="program-check-killed",
            )
        if code not in _FAULTS:
            raise EngineError(
                f"the process that loaded {path} was ended by {_signal_name(code)}",
                remedy="start again",
                code="program-check-killed",
            )
        if tells_no_memory(noise):
            raise EngineError(
                f"there is not enough memory to load {path}{quoted(noise)}",
                remedy=GET_MEMORY,
                code="out-of-memory",
            )
        raise BundleError(
            f"the engine aborts on this program ({_signal_name(code)}): {path}{quoted(noise)}",
            remedy="copy or export the bundle again; the program is damaged or of another executorch",
            code="program-aborts",
        )
    if os.WEXITSTATUS(status) != 0:
        raise load_error(path, RefusedError(messages, noise))


_FAULTS = frozenset(
    getattr(signal, name)
    for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)


def _child(attempt: Callable[[], object], answer: int, log: int, parent: int) -> None:
    """The forked child: try, tell, leave without running anything of the parent's exit."""
    code = 1
    try:
        end_with_parent(parent)
        faulthandler.disable()
        with contextlib.suppress(Exception):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        close_all_but(answer, log)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
        attempt()
        code = 0
    except BaseException as error:
        os.write(log, getattr(error, "log", "").encode(errors="replace"))
        said = "there is not enough memory" if tells_no_memory(error) else str(error)
        os.write(answer, said.encode(errors="replace"))
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """A child's wait status; None if it had to be killed after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return status
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code).name
    except ValueError:
        return f"signal {code}"
