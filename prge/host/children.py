"""A forked child that serves requests within bounds of CPU time and memory: for programs of strangers.

What it computes is all that it can do: it opens no file and no connection, and starts no program.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import struct
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

_MOST_FILES = 1 << 16
_ANSWER, _NO_MEMORY = b"a", b"m"
# Of the clock, in case that the child neither computes nor answers.
_LONGEST_WAIT = 120.0
# Of Linux's <linux/landlock.h> and <linux/prctl.h>; these system calls have the same numbers everywhere.
_CREATE_RULESET, _RESTRICT_SELF, _RULESET_VERSION, _NO_NEW_PRIVS = 444, 446, 1, 38


class LimitError(Exception):
    """Why a child gave no answer, in words that follow the name of what it did."""


class BoundedChild:
    """A child process that replies with what `serve` returns; it ends with this object, or with the parent.

    Args:
        serve: called in the child for each request; its exceptions end the child, so it should have none. It
            can't open files, so what it imports must have been imported before.
        seconds: CPU time of a request, and as much again for each of its megabytes.
        memory: bytes that the child may take above what the parent had, and 32 times a request's size.
    """

    def __init__(self, serve: Callable[[bytes], bytes], seconds: float, memory: int) -> None:
        self._seconds, self._memory = seconds, memory
        self._connection, other = Pipe()
        with warnings.catch_warnings():
            # Python warns of forks while threads run; this child calls `serve` and leaves.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            _child(other, serve, seconds, memory)
        other.close()
        self._end = weakref.finalize(self, _end, self._process, self._connection)

    def ask(self, request: bytes) -> bytes:
        """The answer to a request.

        Raises:
            LimitError: it takes more than the bounds, or the child crashed; there are no more answers then.
        """
        with contextlib.suppress(OSError, EOFError):
            self._connection.send_bytes(request)
            if not self._connection.poll(_LONGEST_WAIT + _cpu_seconds(request, self._seconds)):
                self._end()
                raise LimitError("doesn't answer")
            answer = self._connection.recv_bytes()
            if answer[:1] == _ANSWER:
                return answer[1:]
            self._end()
            raise LimitError(f"takes more than {_memory_bytes(request, self._memory) >> 20} MiB of memory")
        status = self._end()
        code = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        if code == signal.SIGPROF:
            raise LimitError(
                f"takes more than {_cpu_seconds(request, self._seconds):.0f} seconds of CPU time"
            )
        raise LimitError(f"ends its process ({signal.Signals(code).name if code else 'no signal'})")


def close_all_but(*kept: int) -> None:
    """Close every file of a forked child but the standard ones and those kept.

    A file that the parent has open may carry a lock, which would outlive a parent that is killed.
    """
    start = 3
    for number in sorted(kept):
        os.closerange(start, number)
        start = max(start, number + 1)
    os.closerange(start, _MOST_FILES)


def _child(connection: Connection, serve: Callable[[bytes], bytes], seconds: float, memory: int) -> None:
    """Answer until the parent is gone; never returns."""
    try:
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(name, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        close_all_but(connection.fileno())
        before = _own_memory()
        _give_up_rights()
        while True:
            request = connection.recv_bytes()
            if before:
                _limit_memory(before + _memory_bytes(request, memory))
            signal.setitimer(signal.ITIMER_PROF, _cpu_seconds(request, seconds))
            try:
                answer = _ANSWER + serve(request)
            except MemoryError:
                answer = _NO_MEMORY
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)
    finally:
        os._exit(0)


def _give_up_rights() -> None:
    """Keep what is open, and lose what else the system lets a process do, as far as it can take that away."""
    time.tzset()  # programs may ask for the time, whose zone is in a file
    if sys.platform == "linux":
        enter_landlock()
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (0, 0))


def enter_landlock() -> None:
    """A Landlock domain without a rule: no path opened, changed or executed, no port, no signal to others."""
    system = ctypes.CDLL(None)
    version = system.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION)
    if version < 1:  # an older kernel, or one without it
        return
    # A kernel refuses rights that it doesn't know.
    files = 13 + sum(version >= since for since in (2, 3, 5))
    rights = struct.pack("QQQ", (1 << files) - 1, 3 * (version >= 4), 3 * (version >= 6))
    ruleset = system.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0)
    if ruleset >= 0:
        system.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        system.syscall(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def _cpu_seconds(request: bytes, seconds: float) -> float:
    return seconds * (1 + len(request) / 1e6)


def _memory_bytes(request: bytes, memory: int) -> int:
    return memory + 32 * len(request)


def _limit_memory(most: int) -> None:
    """Let this process have so many bytes of addresses."""
    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _own_memory() -> int:
    """Bytes of addresses that this process has; 0 where that isn't known."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def _end(process: int, connection: Connection) -> int | None:
    """End a child and give its wait status, which is its own where it has ended; None if it was taken."""
    connection.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]
    return None
