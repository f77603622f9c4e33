"""The thread that runs the engine: requests come from any thread, and text is passed on as generated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from prge.errors import EngineError
from prge.generation.loop import Generator, Request, Ticket

GenerationEvent = str | Ticket
"""A chunk of a completion's text, or finally the ticket, with the completion or an error."""
EventHandler = Callable[[GenerationEvent], object]


class BusyError(Exception):
    """The queue is full."""


class Worker:
    """Runs a generator in a thread of its own while the context is open.

    Args:
        generator: used by this thread only.
        max_requests: completions that are generated or wait at once.
        on_busy: called with True when the first of several completions begins, and with False when the last
            one has ended.
    """

    def __init__(
        self,
        generator: Generator,
        max_requests: int,
        on_busy: Callable[[bool], object] = lambda is_busy: None,
    ) -> None:
        self._generator = generator
        self._max_requests = max_requests
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
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()
        # An unexpected error: the state of the generator and its sequences is unknown.
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def context(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._generator.engine.context

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._closing

    def submit(self, requests: Sequence[tuple[Request, EventHandler]]) -> list[Ticket]:
        """Begin completions, all or none; each passes its text to its own callback, in the worker's thread.

        Raises:
            BusyError: the queue is full.
            DataError: a prompt can't be used.
        """
        with self._lock:
            if not self.alive or len(self._tickets) + len(requests) > self._max_requests:
                raise BusyError(
                    f"at most {self._max_requests} completions are generated at once: try again later"
                )
            tickets: list[Ticket] = []
            try:
                for request, handler in requests:
                    tickets.append(self._generator.submit(request, handler, self._ended(handler)))
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
        """End completions that nobody waits for; has no effect on those that have ended."""
        for ticket in tickets:
            self._generator.cancel(ticket)
        self._wake.set()

    def _ended(self, handler: EventHandler) -> Callable[[Ticket], None]:
        def end(ticket: Ticket) -> None:
            with self._lock:
                self._tickets.discard(ticket)
                if not self._tickets:
                    self._on_busy(False)
            handler(ticket)

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
            unfinished = list(self._tickets)
        for ticket in unfinished:
            ticket.error = EngineError("The server is shutting down.", code="server-ends")
            ticket.end()
