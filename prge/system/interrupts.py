"""Ctrl-C ends the work once: while its end is told and files are closed, another one changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


@contextmanager
def single_interrupt(restored: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C only; who had it ignored before keeps that.

    `restored` says whether Ctrl-C is as before afterwards; a process that ends then has no use for it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        with suppress(ValueError):  # in a thread, which no signal reaches
            signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if restored:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Signals that end the work in order: Ctrl-C, SIGTERM, and SIGHUP, of a terminal that was closed.

    What `nohup` started ignores SIGHUP, and goes on doing so.
    """
    hang_up = [number for number in signal.Signals if number.name == "SIGHUP"]  # Windows has none
    heeded = [number for number in hang_up if signal.getsignal(number) is not signal.SIG_IGN]
    return (signal.SIGINT, signal.SIGTERM, *heeded)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals]
) -> Iterator[None]:
    """Let signals call `handler`, and afterwards what they called before. A thread leaves them alone."""
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
    """From now on Ctrl-C changes nothing, nor do other signals where something was to be done at them."""
    with suppress(ValueError):
        for number in ending_signals():
            if number is signal.SIGINT or signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: object) -> NoReturn:
    ignore_interrupts()
    raise KeyboardInterrupt
