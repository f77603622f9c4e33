"""A limit on the time of code that may never return, such as a bad regular expression."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the code inside after some seconds of CPU time, in the main thread; others have no limit.

    CPU time, unlike time of the clock, doesn't depend on other processes or on a phone that sleeps.

    Raises:
        TimeoutError: the code took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:g} seconds")

    handler = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
