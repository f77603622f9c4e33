"""`prge` in a forked process: the real command line on real files, with limits, killed by real signals.

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
# What the verbs import when they are called.
_IMPORTED_LATE = ("jinja2", "tokenizers", "tqdm", "yaml")
_TAIL, _MOST_OUTPUT = 3000, 4 << 20


@dataclass(frozen=True)
class Limits:
    """What a case may take; memory is what it maps beyond its parent."""

    seconds: float = 120.0
    processor_seconds: int = 60
    memory: int | None = 2 << 30
    file_bytes: int | None = None


@dataclass(frozen=True)
class Ended:
    """How `prge` ended: its exit code, or minus the signal that ended it, and what it printed.

    `hung`: it had to be ended. `seconds` of the processor and `memory`, its largest resident size beyond its
    parent's, count its children too.
    """

    words: tuple[str, ...]
    code: int
    output: str
    hung: bool = False
    seconds: float = 0.0
    memory: int = 0

    @property
    def has_traceback(self) -> bool:
        """Whether Python told of an error that `prge` didn't expect."""
        return "Traceback (most recent call last)" in self.output or "Exception ignored" in self.output

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return self.output[-_TAIL:]


@functools.cache
def import_verbs(workstation: bool = False) -> None:
    """Import a device's verbs, or a workstation's with torch, and what they import when they are called."""
    for name in DEVICE_VERBS:
        importlib.import_module(prge.cli.main.VERBS[name].module)
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    if workstation:
        import server_export

        for found in pkgutil.walk_packages(server_export.__path__, "server_export."):
            importlib.import_module(found.name)
    from device_runner.engines.native import runtime

    runtime.prepare()


@dataclass
class Child:
    """One call of `prge`, going on; `wait` for its end.

    Args:
        words: of the command line.
        limits: which it ends by.
        folder: where it works.
        prepare: called in the child before anything else, after its output was redirected.
        call: what is called instead of `prge`; its exit code.
    """

    words: Sequence[object]
    limits: Limits = field(default_factory=Limits)
    folder: Path | None = None
    prepare: Callable[[], object] | None = None
    call: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed after its end)
        self._resident = resident_bytes() or 0
        sys.stdout.flush()
        sys.stderr.flush()
        # A program of its own has no time before its first line, in which nobody would take a Ctrl-C.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        self.process = os.fork()
        if self.process == 0:
            self._become_prge()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.began = time.monotonic()
        self._ended: Ended | None = None
        self._handle = os.pidfd_open(self.process)

    def signal(self, number: int) -> bool:
        """Send a signal, unless the process has ended."""
        if self.has_ended(0.0):
            return False
        os.kill(self.process, number)
        return True

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return self._ended is not None or bool(poll.poll(seconds * 1000))

    def wait(self) -> Ended:
        """Wait for its end, or end it when its time is over."""
        if self._ended is None:
            hung = not self.has_ended(max(0.0, self.began + self.limits.seconds - time.monotonic()))
            if hung:
                os.kill(self.process, signal.SIGKILL)
            _, status, usage = os.wait4(self.process, 0)
            os.close(self._handle)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)  # its own children
            code = os.waitstatus_to_exitcode(status)
            self._ended = Ended(
                tuple(map(str, self.words)),
                code,
                self._output(),
                hung or code == -signal.SIGXCPU,
                usage.ru_utime + usage.ru_stime,
                max(0, usage.ru_maxrss * 1024 - self._resident),
            )
            self._log.close()
        return self._ended

    def _output(self) -> str:
        return os.pread(self._log.fileno(), _MOST_OUTPUT, 0).decode(errors="replace")

    def _become_prge(self) -> None:
        code, begun = 1, False
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
            sys.argv = ["prge", *map(str, self.words)]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            begun = True
            code = (self.call or prge.cli.main.main)()
        except BaseException as error:
            within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if isinstance(error, KeyboardInterrupt) and not (begun and within):  # as while Python starts
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
            most = _mapped() + limits.memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if limits.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))


def prge_ends(words: Sequence[object], limits: Limits | None = None) -> Ended:
    """Call `prge` and wait for its end."""
    return Child(words, limits or Limits()).wait()


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
