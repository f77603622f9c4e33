"""The one thread that asks the engine: requests come from any thread, texts are told as they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from prge.errors import EngineError
from prge.text.loop import Generator, Request, Ticket

Told = str | Ticket
"""A piece of an answer's text, or at last its ticket, with the answer or an error."""
Tell = Callable[[Told], object]


class BusyError(Exception):
    """There are as many requests as are taken."""


class Worker:
    """Works for a generator while it is entered.

    Args:
        generator: used by this thread alone.
        most: answers that are made or wait at once.
        on_busy: called when the first of some answers begins, with True, and when the last one has ended.
    """

    def __init__(
        self, generator: Generator, most: int, on_busy: Callable[[bool], object] = lambda is_busy: None
    ) -> None:
        self._generator = generator
        self._most = most
        self._on_busy = on_busy
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
                was_busy = bool(self._tickets)
                self._tickets.update(tickets)
                if self._tickets and not was_busy:
                    self._on_busy(True)
        self._wake.set()
        return tickets

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """End answers that nobody waits for; nothing happens to those that have ended."""
        for ticket in tickets:
            self._generator.cancel(ticket)
        self._wake.set()

    def _ended(self, tell: Tell) -> Callable[[Ticket], None]:
        def end(ticket: Ticket) -> None:
            with self._lock:
                self._tickets.discard(ticket)
                if not self._tickets:
                    self._on_busy(False)
            tell(ticket)

        return end

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._generator.work():
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:
            self._failure = error
        with self._lock:
            self._closing = True
            left = list(self._tickets)
        for ticket in left:
            ticket.error = EngineError("the server ends", code="server-ends")
            ticket.end()
