"""Standard output and error: closed, full, or a pipe that nobody reads, they end no work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from prge.errors import visible


def open_standard_files() -> None:
    """Give standard files that are closed /dev/null, and let names that a terminal can't show be spelled out.

    Else the next file that is opened, such as a journal, would get the number of standard error, and with it
    what the engine logs.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def write_text(stream: TextIO, text: str) -> None:
    """Write a text that may hold anything, at once; a terminal is shown control characters spelled out."""
    if stream.isatty():
        text = visible(text)
    stream.write(text)
    stream.flush()


@contextlib.contextmanager
def best_effort(stream: TextIO) -> Iterator[None]:
    """Tell on `stream` how work goes; if it refuses, it is silent from then on."""
    try:
        yield
    except (OSError, ValueError):  # ValueError: closed by this process
        silence(stream)
    except RuntimeError:  # a signal's handler writes while the same stream is written to
        pass


def flush(stream: TextIO) -> OSError | None:
    """Write what a stream still holds; returns why that failed, and then the stream is silent."""
    try:
        stream.flush()
    except ValueError:
        return None
    except OSError as error:
        silence(stream)
        return error
    return None


def silence(stream: TextIO) -> None:
    """Let a stream lead to /dev/null: Python ends with code 120 if it can't write the rest at exit."""
    with contextlib.suppress(OSError, ValueError):
        number = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(number, stream.fileno())
        finally:
            os.close(number)
