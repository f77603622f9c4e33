"""Run `prge` in a forked process: the real command line on real files, with limits and real signals.

A fork saves a second of imports per case. The parent imports the verbs and never calls an engine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import prge.cli.main
from prge.errors import INTERRUPTED
from prge.system.memory import resident_bytes

DEVICE_VERBS = ("run", "eval", "inspect", "replay", "report", "rows")
# Modules that the verbs import on use.
_IMPORTED_LATE = ("jinja2", "tokenizers", "tqdm", "yaml")
_TAIL, _MAX_OUTPUT = 3000, 4 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of a case; `memory` is the memory that it maps beyond its parent's."""

    seconds: float = 120.0
    processor_seconds: int = 60
    memory: int | None = 2 << 30
    file_bytes: int | None = None


@dataclass(frozen=True)
class ProcessResult:
    """The result of a call of `prge`.

    Attributes:
        arguments: the command line.
        code: exit code, or minus the signal that ended the process.
        output: standard output and standard error.
        hung: whether the process had to be killed.
        seconds: processor time, including child processes.
        memory: peak resident bytes beyond the parent's, including child processes.
    """

    arguments: tuple[str, ...]
    code: int
    output: str
    hung: bool = False
    seconds: float = 0.0
    memory: int = 0

    @property
    def has_traceback(self) -> bool:
        """Whether Python printed the traceback of an unexpected error."""
        return "Traceback (most recent call last)" in self.output or "Exception ignored" in self.output

    @property
    def tail(self) -> str:
        """The end of the output."""
        return self.output[-_TAIL:]


@functools.cache
def import_verbs(workstation: bool = False) -> None:
    """Import the verbs of a device, or of a workstation with torch, and the modules that they import late."""
    for name in DEVICE_VERBS:
        importlib.import_module(prge.cli.main.VERBS[name].module)
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    if workstation:
        import server_export

        for module_info in pkgutil.walk_packages(server_export.__path__, "server_export."):
            importlib.import_module(module_info.name)
    from device_runner.engines.native import runtime

    runtime.prepare()


@dataclass
class Child:
    """A running call of `prge`; call `wait` for its result.

    Args:
        arguments: the command line.
        limits: limits of the call.
        folder: working directory.
        prepare: function that the child calls first, after its output was redirected.
        call: function to call instead of `prge`; it returns the exit code.
    """

    arguments: Sequence[object]
    limits: Limits = field(default_factory=Limits)
    folder: Path | None = None
    prepare: Callable[[], object] | None = None
    call: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed after its end)
        self._resident = resident_bytes() or 0
        sys.stdout.flush()
        sys.stderr.flush()
        # A program that was started normally can't receive a Ctrl-C before its first line.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        self.process = os.fork()
        if self.process == 0:
            self._run_child()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.began = time.monotonic()
        self._result: ProcessResult | None = None
        self._handle = os.pidfd_open(self.process)

    def signal(self, number: int) -> bool:
        """Send a signal and return True, or return False if the process has ended."""
        if self.has_ended(0.0):
            return False
        os.kill(self.process, number)
        return True

    def has_ended(self, seconds: float) -> bool:
        """Return whether the process ends within a number of seconds."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return self._result is not None or bool(poll.poll(seconds * 1000))

    def wait(self) -> ProcessResult:
        """Wait for the result; kill the process when its time is over."""
        if self._result is None:
            hung = not self.has_ended(max(0.0, self.began + self.limits.seconds - time.monotonic()))
            if hung:
                os.kill(self.process, signal.SIGKILL)
            _, status, usage = os.wait4(self.process, 0)
            os.close(self._handle)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)  # child processes of the child
            code = os.waitstatus_to_exitcode(status)
            self._result = ProcessResult(
                tuple(map(str, self.arguments)),
                code,
                self._output(),
                hung or code == -signal.SIGXCPU,
                usage.ru_utime + usage.ru_stime,
                max(0, usage.ru_maxrss * 1024 - self._resident),
            )
            self._log.close()
        return self._result

    def _output(self) -> str:
        return os.pread(self._log.fileno(), _MAX_OUTPUT, 0).decode(errors="replace")

    def _run_child(self) -> None:
        code, has_started = 1, False
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in (1, 2):
                os.dup2(self._log.fileno(), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self.folder is not None:
                os.chdir(self.folder)
            if self.prepare is not None:
                self.prepare()
            self._limit()
            sys.argv = ["prge", *map(str, self.arguments)]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            has_started = True
            code = (self.call or prge.cli.main.main)()
        except BaseException as error:
            within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if isinstance(error, KeyboardInterrupt) and not (
                has_started and within
            ):  # as if Python were still starting
                os._exit(INTERRUPTED)
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _limit(self) -> None:
        limits = self.limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_seconds, limits.processor_seconds + 5))
        if limits.memory is not None:
            limit = _mapped() + limits.memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if limits.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))


def run_prge(arguments: Sequence[object], limits: Limits | None = None) -> ProcessResult:
    """Call `prge` and return its result."""
    return Child(arguments, limits or Limits()).wait()


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
