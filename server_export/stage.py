"""How far a stage of an export is, and how long it takes still.

A bar that moves on a terminal; elsewhere the share that is done every ten seconds, or a dot.
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

from prge.host.progress import duration

_BAR = 24
# From one picture of a bar to the next, and from dot to dot where there is no terminal.
TERMINAL_SECONDS, DOT_SECONDS = 0.5, 10.0


@dataclass
class _Parts:
    """Of the stage that runs: how many it has, and how many are done."""

    count: int = 0
    done: float = 0


_CURRENT: ContextVar[_Parts | None] = ContextVar("parts", default=None)


@contextmanager
def stage(name: str, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show a stage while the block runs; what the block tells comes at its end."""
    out, parts, notes, ended = stream or sys.stdout, _Parts(), list[str](), threading.Event()
    begin, is_terminal = time.monotonic(), out.isatty()

    def show(text: str) -> None:
        line = f"\r{name:<10}{text}\x1b[K" if is_terminal else text
        print(line, end="", file=out, flush=True)

    def draw() -> None:
        while not ended.wait(TERMINAL_SECONDS if is_terminal else DOT_SECONDS):
            seconds = time.monotonic() - begin
            share = parts.done / max(parts.count, 1)
            left = f"about {duration(seconds / share - seconds)} left" if share else ""
            if is_terminal:
                bar = f"|{'#' * round(_BAR * share):<{_BAR}}|  {left}" if parts.count else ""
                show(f"{seconds:6.1f} s  {bar}")
            else:
                show(f"{share:.0%}, {left}  " if share else ".")

    drawing = threading.Thread(target=draw, daemon=True)
    before, told = _CURRENT.set(parts), ""
    show("" if is_terminal else f"{name:<10}")
    drawing.start()
    try:
        yield notes.append
        told = f"{time.monotonic() - begin:6.1f} s  {'; '.join(notes)}"
    finally:
        _CURRENT.reset(before)
        ended.set()
        drawing.join()
        show(told)
        print(file=out, flush=True)


def count_parts(count: int) -> Callable[..., None]:
    """Say how many parts the stage that runs has, if one does; who is returned counts them as done."""
    parts = _CURRENT.get() or _Parts()
    parts.count, parts.done = count, 0

    def done(more: float = 1) -> None:
        parts.done += more

    return done
