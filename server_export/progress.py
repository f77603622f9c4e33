"""Progress of an export's stages, with the estimated time left.

On a terminal a bar is updated in place. Elsewhere the completed share, or a dot, is printed every ten
seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

from prge.system.progress import format_duration

_BAR = 24
# Seconds between updates of the bar on a terminal, and between dots elsewhere.
TERMINAL_SECONDS, DOT_SECONDS = 0.5, 10.0


@dataclass
class _Parts:
    """The number of parts of the current stage, and of those that are done."""

    count: int = 0
    done: float = 0


_CURRENT: ContextVar[_Parts | None] = ContextVar("parts", default=None)


@contextmanager
def stage(name: str, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show the progress of a stage while the context is active.

    Args:
        name: the name of the stage.
        stream: the stream to write to; default: the standard output.

    Yields:
        A function that adds a note to the end of the stage's line.
    """
    out, parts, notes, ended = stream or sys.stdout, _Parts(), list[str](), threading.Event()
    begin, is_terminal = time.monotonic(), out.isatty()

    def show(text: str) -> None:
        line = f"\r{name:<10}{text}\x1b[K" if is_terminal else text
        print(line, end="", file=out, flush=True)

    def draw() -> None:
        while not ended.wait(TERMINAL_SECONDS if is_terminal else DOT_SECONDS):
            seconds = time.monotonic() - begin
            share = parts.done / max(parts.count, 1)
            left = f"about {format_duration(seconds / share - seconds)} left" if share else ""
            if is_terminal:
                bar = f"|{'#' * round(_BAR * share):<{_BAR}}|  {left}" if parts.count else ""
                show(f"{seconds:6.1f} s  {bar}")
            else:
                show(f"{share:.0%}, {left}  " if share else ".")

    drawing = threading.Thread(target=draw, daemon=True)
    token, summary = _CURRENT.set(parts), ""
    show("" if is_terminal else f"{name:<10}")
    drawing.start()
    try:
        yield notes.append
        summary = f"{time.monotonic() - begin:6.1f} s  {'; '.join(notes)}"
    finally:
        _CURRENT.reset(token)
        ended.set()
        drawing.join()
        show(summary)
        print(file=out, flush=True)


def count_parts(count: int) -> Callable[..., None]:
    """Set the current stage's number of parts; return a callback that marks parts as done."""
    parts = _CURRENT.get() or _Parts()
    parts.count, parts.done = count, 0

    def done(more: float = 1) -> None:
        parts.done += more

    return done
