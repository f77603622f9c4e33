"""A limit on time interrupts code of the main thread, and leaves timers of others as they were."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from prge.system.time_limit import time_limit


@pytest.fixture(autouse=True)
def timer() -> Iterator[None]:
    """Stop the timer of the test itself, and continue it at the end."""
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_code_that_takes_longer_is_interrupted() -> None:
    with pytest.raises(TimeoutError), time_limit(0.05):
        time.sleep(60)
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_timer_that_was_set_before_continues() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with time_limit(60):
        time.sleep(0.01)
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
    time.sleep(0.3)
    assert calls == [signal.SIGALRM]


def test_other_threads_have_no_limit() -> None:
    done: list[bool] = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
