"""A sandboxed child process for untrusted input, with limits on CPU time and memory.

The child can only compute: it can't open files or connections, and can't start programs.
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

_MAX_FILES = 1 << 16
_RESPONSE, _OUT_OF_MEMORY = b"a", b"m"
# Seconds of wall time after which a child that uses no CPU time counts as hung.
_LONGEST_WAIT = 120.0
# From Linux's <linux/landlock.h> and <linux/prctl.h>; the numbers are the same on all architectures.
_CREATE_RULESET, _RESTRICT_SELF, _RULESET_VERSION, _NO_NEW_PRIVS = 444, 446, 1, 38


class LimitError(Exception):
    """The child exceeded a limit or crashed; the message continues a sentence that begins with its work."""


class BoundedChild:
    """A forked child process that answers requests; it ends with this object or with the parent.

    Args:
        serve: called in the child for each request. An exception ends the child. It can't open files, so its
            imports must have been done before.
        seconds: CPU time limit of a request; each megabyte of the request adds as much again.
        memory: limit in bytes above the parent's memory; 32 times a request's size is added.
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

    def call(self, request: bytes) -> bytes:
        """Send a request to the child and return its response.

        Raises:
            LimitError: the request exceeded a limit, or the child crashed; the child is ended then.
        """
        with contextlib.suppress(OSError, EOFError):
            self._connection.send_bytes(request)
            if not self._connection.poll(_LONGEST_WAIT + _cpu_seconds(request, self._seconds)):
                self._end()
                raise LimitError("doesn't answer")
            response = self._connection.recv_bytes()
            if response[:1] == _RESPONSE:
                return response[1:]
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
    """Close all file descriptors of a forked child except the standard ones and those given.

    An inherited descriptor may carry a lock, which would outlive a killed parent.
    """
    start = 3
    for number in sorted(kept):
        os.closerange(start, number)
        start = max(start, number + 1)
    os.closerange(start, _MAX_FILES)


def _child(connection: Connection, serve: Callable[[bytes], bytes], seconds: float, memory: int) -> None:
    """Answer requests until the parent is gone; never returns."""
    try:
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(name, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        close_all_but(connection.fileno())
        before = _own_memory()
        _drop_rights()
        while True:
            request = connection.recv_bytes()
            if before:
                _limit_memory(before + _memory_bytes(request, memory))
            signal.setitimer(signal.ITIMER_PROF, _cpu_seconds(request, seconds))
            try:
                response = _RESPONSE + serve(request)
            except MemoryError:
                response = _OUT_OF_MEMORY
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(response)
    finally:
        os._exit(0)


def _drop_rights() -> None:
    """Drop the rights to open files, connections and processes, as far as the system supports this."""
    time.tzset()  # loads the time zone from its file while that is still possible
    if sys.platform == "linux":
        enter_landlock()
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (0, 0))


def enter_landlock() -> None:
    """Enter a Landlock domain without rules: no access to paths and ports, no signals to other processes."""
    system = ctypes.CDLL(None)
    version = system.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION)
    if version < 1:  # the kernel is too old, or has no Landlock
        return
    # A kernel refuses rights that are newer than itself.
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


def _limit_memory(limit: int) -> None:
    """Limit the address space of this process to so many bytes."""
    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _own_memory() -> int:
    """Return the size of this process's address space in bytes; 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def _end(process: int, connection: Connection) -> int | None:
    """Kill a child and return its wait status; None if another caller has already waited for it."""
    connection.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]
    return None
