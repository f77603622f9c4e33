"""How far a stage of an export is: a bar that moves on a terminal, a dot every ten seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

_NAME, _BAR = 10, 24
_TERMINAL_SECONDS, _DOT_SECONDS = 0.5, 10.0
_CLEAR = "\x1b[K"


class _Stage:
    """A stage that runs: who computes counts its parts, a thread draws."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.done = self.parts = 0
        self.notes: list[str] = []
        self.is_terminal = stream.isatty()
        self._name, self._stream = name, stream
        self._begin = time.monotonic()

    def draw(self) -> None:
        """Show that it still runs."""
        if not self.is_terminal:
            self._write(".")
            return
        filled = _BAR * self.done // self.parts if self.parts else 0
        bar = f"|{'#' * filled}{' ' * (_BAR - filled)}|  "
        self._write(f"\r{self._name:<{_NAME}}{self._seconds()}  {bar if self.parts else ''}{_CLEAR}")

    def begin(self) -> None:
        """Show its name."""
        self._write(f"{self._name:<{_NAME}}")

    def end(self, failed: bool) -> None:
        """Show its time and notes, or leave the line to an error."""
        again = f"\r{self._name:<{_NAME}}" if self.is_terminal else ""
        told = "" if failed else f"{self._seconds()}  {'; '.join(self.notes)}"
        self._write(f"{again}{told}{_CLEAR if self.is_terminal else ''}\n")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._begin:6.1f} s"

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


_CURRENT: ContextVar[_Stage | None] = ContextVar("stage", default=None)


@contextmanager
def stage(name: str, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show a stage while the block runs; what the block tells comes at its end."""
    shown, ended = _Stage(name, stream or sys.stdout), threading.Event()
    every = _TERMINAL_SECONDS if shown.is_terminal else _DOT_SECONDS

    def draw() -> None:
        while not ended.wait(every):
            shown.draw()

    drawing = threading.Thread(target=draw, daemon=True)
    before, failed = _CURRENT.set(shown), True
    shown.begin()
    drawing.start()
    try:
        yield shown.notes.append
        failed = False
    finally:
        _CURRENT.reset(before)
        ended.set()
        drawing.join()
        shown.end(failed)


def count_parts(count: int) -> Callable[..., None]:
    """Say that the stage that runs, if one does, has so many parts; who is returned counts them as done."""
    shown = _CURRENT.get()
    if shown is not None:
        shown.done, shown.parts = 0, count

    def done(more: int = 1) -> None:
        if shown is not None:
            shown.done += more

    return done
