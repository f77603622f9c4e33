"""Tries a program in a forked child process, where an abort of the engine ends only the child."""

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

from device_runner.engines.errors import EngineRefusalError, load_error, quote_log, read_all
from prge.errors import BundleError, EngineError
from prge.system.memory import OUT_OF_MEMORY_REMEDY, is_out_of_memory
from prge.system.parents import end_with_parent
from prge.system.sandbox import close_all_but

CHECK_SECONDS = 600.0


def check_in_child(path: Path, attempt: Callable[[], object]) -> None:
    """Call `attempt`, which loads and runs the program at `path`, in a forked child; do nothing without fork.

    Call this before the first engine runs: a child lacks the pool's threads, which a running engine waits
    for.

    Raises:
        BundleError, EngineError: a signal killed the child, the child hangs, or the engine refused the
            program.
    """
    if not hasattr(os, "fork"):
        return
    with tempfile.TemporaryFile() as messages_file, tempfile.TemporaryFile() as log_file:
        with warnings.catch_warnings():
            # Python warns of forks while threads run, but this child only calls the engine and exits.
            warnings.simplefilter("ignore", DeprecationWarning)
            parent = os.getpid()
            child = os.fork()
        if child == 0:
            _child(attempt, messages_file.fileno(), log_file.fileno(), parent)
        status = _wait(child, CHECK_SECONDS)
        messages, log = (read_all(stream) for stream in (messages_file, log_file))
    if status is None:
        raise BundleError(
            f"The engine hangs on {path}: it did not load within {CHECK_SECONDS:.0f} seconds.",
            remedy="Copy or export the bundle again.",
            code="program-hangs",
        )
    if os.WIFSIGNALED(status):
        code = os.WTERMSIG(status)
        if code == signal.SIGKILL:
            raise EngineError(
                f"The system killed the process that loaded {path} (SIGKILL).",
                remedy="Most likely there is not enough memory: close other programs or use a smaller model.",
                code="program-check-killed",
            )
        if code not in _FAULTS:
            raise EngineError(
                f"The process that loaded {path} was ended by {_signal_name(code)}.",
                remedy="Try again.",
                code="program-check-killed",
            )
        if is_out_of_memory(log):
            raise EngineError(
                f"There is not enough memory to load {path}{quote_log(log)}.",
                remedy=OUT_OF_MEMORY_REMEDY,
                code="out-of-memory",
            )
        raise BundleError(
            f"The engine aborts on this program ({_signal_name(code)}): {path}{quote_log(log)}.",
            remedy="Copy or export the bundle again; the program is damaged or of another executorch.",
            code="program-aborts",
        )
    if os.WEXITSTATUS(status) != 0:
        raise load_error(path, EngineRefusalError(messages, log))


_FAULTS = frozenset(
    getattr(signal, name)
    for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)


def _child(attempt: Callable[[], object], messages_file: int, log_file: int, parent: int) -> None:
    """Run `attempt` in the forked child, report its error, and exit without the parent's exit handlers."""
    code = 1
    try:
        end_with_parent(parent)
        faulthandler.disable()
        with contextlib.suppress(Exception):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        close_all_but(messages_file, log_file)
        os.dup2(log_file, 1)
        os.dup2(log_file, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
        attempt()
        code = 0
    except BaseException as error:
        os.write(log_file, getattr(error, "log", "").encode(errors="replace"))
        message = "there is not enough memory" if is_out_of_memory(error) else str(error)
        os.write(messages_file, message.encode(errors="replace"))
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """Return the wait status of a child, or None after killing it because `seconds` have passed."""
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
