"""Standard output and error that never end the work, even if they are closed, full or a broken pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from prge.errors import escape_control


def open_standard_files() -> None:
    """Open closed standard streams as /dev/null, and escape characters that the terminal can't encode.

    Without this, the next opened file, such as a journal, could get the descriptor of standard error and
    receive the engine's log.
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
    """Write an untrusted text and flush it; control characters are escaped on a terminal."""
    if stream.isatty():
        text = escape_control(text)
    stream.write(text)
    stream.flush()


@contextlib.contextmanager
def best_effort(stream: TextIO) -> Iterator[None]:
    """Ignore errors of writing to `stream` inside the block; after an error the stream is silenced."""
    try:
        yield
    except (OSError, ValueError):  # ValueError: this process has closed the stream
        silence(stream)
    except RuntimeError:  # a signal handler writes while the stream is being written to
        pass


def flush(stream: TextIO) -> OSError | None:
    """Flush a stream; return the error if this fails, and silence the stream then."""
    try:
        stream.flush()
    except ValueError:
        return None
    except OSError as error:
        silence(stream)
        return error
    return None


def silence(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, since Python exits with code 120 if it can't flush a stream at exit."""
    with contextlib.suppress(OSError, ValueError):
        number = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(number, stream.fileno())
        finally:
            os.close(number)
