"""A limit on CPU time interrupts code of the main thread."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from prge.system.time_limit import time_limit


def test_code_that_takes_longer_is_interrupted() -> None:
    handler = signal.getsignal(signal.SIGPROF)
    with pytest.raises(TimeoutError), time_limit(0.05):
        while True:
            pass
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0) and signal.getsignal(signal.SIGPROF) == handler


def test_time_in_which_the_process_does_not_compute_has_no_limit() -> None:
    with time_limit(0.05):
        time.sleep(0.3)


def test_other_threads_have_no_limit() -> None:
    done: list[bool] = []

    def work() -> None:
        end = time.process_time() + 0.05
        with time_limit(0.01):
            while time.process_time() < end:
                pass
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
