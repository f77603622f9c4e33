"""The one thread that asks the engine: requests come from any thread, texts are told as they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, TypeVar

from prge.errors import EngineError
from prge.text.loop import Generator, Request, Ticket

Told = str | Ticket
"""A piece of an answer's text, or at last its ticket, with the answer or an error."""
Tell = Callable[[Told], object]


_Found = TypeVar("_Found")
# Between two looks at work that is done apart.
_SECONDS = 0.02


class BusyError(Exception):
    """There are as many requests as are taken."""


class LeavingError(Exception):
    """What is done beside answers ends with the server."""


class Beside(Protocol):
    """What the thread does while nothing is to be answered, and how often it looks if there is something."""

    seconds: float

    def work(self) -> bool:
        """Do something; False if there is nothing to do. It calls `Worker.give_way` as often as it can."""
        ...

    def check(self) -> None:
        """Called where it gave way; raises what is to end its work."""
        ...


class Worker:
    """Works for a generator while it is entered.

    Args:
        generator: used by this thread alone.
        most: answers that are made or wait at once.
        beside: what is done where there is nothing to answer.
    """

    def __init__(self, generator: Generator, most: int, beside: Beside | None = None) -> None:
        self._generator = generator
        self._most = most
        self._beside = beside
        self._is_beside = False
        self.storage = ThreadPoolExecutor(1, "storage")
        """The one thread that reads and writes files of feedback and of what is learnt, in turns."""
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()
        self.storage.shutdown(cancel_futures=True)
        # What nobody expected: what the generator and its sequences hold isn't known any more.
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._generator.speaker.context

    @property
    def alive(self) -> bool:
        """Whether requests are worked for."""
        return self._thread.is_alive() and not self._closing

    def submit(self, requests: Sequence[tuple[Request, Tell]]) -> list[Ticket]:
        """Begin answers, all or none; each is told to its own `tell`, by the thread that works.

        Raises:
            BusyError: there are too many.
            DataError: a prompt can't be taken.
        """
        with self._lock:
            if not self.alive or len(self._tickets) + len(requests) > self._most:
                raise BusyError(f"at most {self._most} answers are made at once: try again later")
            tickets: list[Ticket] = []
            try:
                for request, tell in requests:
                    tickets.append(self._generator.submit(request, tell, self._ended(tell)))
            except BaseException:
                self.cancel(tickets)
                raise
            finally:
                self._tickets.update(tickets)
        self._wake.set()
        return tickets

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """End answers that nobody waits for; nothing happens to those that have ended."""
        for ticket in tickets:
            self._generator.cancel(ticket)
        self._wake.set()

    def wake(self) -> None:
        """Look for something to do."""
        self._wake.set()

    def give_way(self) -> None:
        """Make all answers before what is done beside them goes on; nothing happens while they are made.

        Raises:
            LeavingError: the server ends.
        """
        if self._beside is None or not self._is_beside:
            return
        self._is_beside = False
        while not self._closing and self._generator.work():
            pass
        self._is_beside = True
        if self._closing:
            raise LeavingError
        self._beside.check()

    def apart(self, work: Callable[[], _Found]) -> _Found:
        """What `work` gives, done by another thread while this one makes answers: it waits for storage.

        Raises:
            LeavingError: the server ends; the work is done all the same.
        """
        doing = self.storage.submit(work)
        doing.add_done_callback(lambda done: self._wake.set())
        try:
            while not doing.done():
                self.give_way()
                self._wake.wait(_SECONDS)
                self._wake.clear()
        finally:
            wait([doing])
        return doing.result()

    def _ended(self, tell: Tell) -> Callable[[Ticket], None]:
        def end(ticket: Ticket) -> None:
            with self._lock:
                self._tickets.discard(ticket)
            tell(ticket)

        return end

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._generator.work() and not self._worked_beside():
                    self._wake.wait(None if self._beside is None else self._beside.seconds)
                    self._wake.clear()
        except LeavingError:
            pass
        except Exception as error:
            self._failure = error
        with self._lock:
            self._closing = True
            left = list(self._tickets)
        for ticket in left:
            ticket.error = EngineError("the server ends")
            ticket.end()

    def _worked_beside(self) -> bool:
        if self._beside is None:
            return False
        self._is_beside = True
        try:
            return self._beside.work()
        finally:
            self._is_beside = False
