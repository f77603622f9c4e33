"""Ctrl-C ends the work once: while its end is told and files are closed, another one changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def one_interrupt(restored: bool) -> Iterator[None]:
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


def ignore_interrupts() -> None:
    """From now on Ctrl-C changes nothing, nor does SIGTERM where something was to be done at it."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _interrupt(number: int, frame: object) -> NoReturn:
    ignore_interrupts()
    raise KeyboardInterrupt
