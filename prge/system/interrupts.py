"""Signal handling: the first Ctrl-C ends the work, and later ones don't disturb the clean-up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


@contextmanager
def single_interrupt(restored: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C only; a process that ignores Ctrl-C goes on ignoring it.

    Args:
        restored: restore the previous handler afterwards; a process that ends then doesn't need it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        with suppress(ValueError):  # only the main thread may set handlers
            signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if restored:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end the work cleanly: SIGINT, SIGTERM, and SIGHUP unless it is ignored.

    A terminal sends SIGHUP when it is closed; a process that `nohup` started ignores it.
    """
    hang_up = [number for number in signal.Signals if number.name == "SIGHUP"]  # Windows has none
    handled = [number for number in hang_up if signal.getsignal(number) is not signal.SIG_IGN]
    return (signal.SIGINT, signal.SIGTERM, *handled)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals]
) -> Iterator[None]:
    """Install a signal handler inside the block, then restore the previous ones; only the main thread can."""
    before = {}
    with suppress(ValueError):
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on, and every other ending signal that has a handler."""
    with suppress(ValueError):
        for number in ending_signals():
            if number is signal.SIGINT or signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: object) -> NoReturn:
    ignore_interrupts()
    raise KeyboardInterrupt
