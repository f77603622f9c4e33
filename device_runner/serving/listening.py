"""Uvicorn, told how to listen, how long and for how many clients to wait, and to end where it was called."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from device_runner.serving.protocol import RequestError
from device_runner.serving.worker import Worker
from prge.errors import RunError
from prge.host.interrupts import ending_signals, handled_by

# For a client to send a request's head, and to go on reading an answer.
SECONDS_TO_BEGIN = 20
SECONDS_TO_READ = 60
MOST_CONNECTIONS = 256
# Accepted at once, before any of them is counted.
_BACKLOG = 64
# For answers that are being made when the server is told to end.
SECONDS_TO_END = 3


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at an address; port 0 is a free one.

    Raises:
        RunError: the address is in use, not this machine's, or none.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise RunError(
            f"{host}:{port} can't be listened at: {error.strerror}",
            remedy="give another --host or --port",
            code="address-not-available",
        ) from None
    with listener:
        yield listener


def address_of(listener: socket.socket) -> str:
    """Host and port as a URL of this machine has them."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:  # all addresses of this machine, and none that a client should name
        host = "localhost"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application until a signal, or until its worker has failed.

    Args:
        app: the application.
        worker: whoever makes its answers; None: nobody, it answers by itself.
        begun: called once it listens.
        ending: called before it waits for answers that are being sent.
        ticking: called ten times a second.
    """

    def __init__(
        self,
        app: ASGIApp,
        worker: Worker | None,
        begun: Callable[[], object] = lambda: None,
        ending: Callable[[], object] = lambda: None,
        ticking: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=SECONDS_TO_END,
            )
        )
        self._worker = worker
        self._begun = begun
        self._ending = ending
        self._ticking = ticking

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; from here on signals end the server, not the process."""
        await super().startup(sockets)
        self._begun()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now; asked ten times a second."""
        self._ticking()
        failed = self._worker is not None and not self._worker.alive
        return await super().on_tick(counter) or failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and send what is being sent to its end."""
        self._ending()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT, SIGTERM and SIGHUP; uvicorn's own would raise them again afterwards."""
        with handled_by(self.handle_exit, ending_signals()):
            yield


class _Protocol(H11Protocol):
    """A connection, closed where its client neither asks nor reads, sooner where others want its place."""

    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > MOST_CONNECTIONS:
            every = [each for each in self.connections if isinstance(each, _Protocol)]
            longest = min((each for each in every if each._waits_for_client), key=lambda each: each._since)
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_timer(None)

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()  # where the next request may begin, which has come already

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(self.loop.call_later(SECONDS_TO_READ, self.transport.abort))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        if not self._is_idle:  # what is asked there has no end, and no answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.abort()
            return
        body = json.dumps(RequestError(400, "this is no HTTP request").body).encode()
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _waits_for_client(self) -> bool:
        return self._is_idle or self.cycle.more_body or self.flow.write_paused

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_request(self) -> None:
        self._since = self.loop.time()
        self._set_timer(self.loop.call_later(SECONDS_TO_BEGIN, self._close_without_request, self.cycle))

    def _close_without_request(self, answered: object) -> None:
        if self.cycle is answered and self._is_idle:
            self.transport.abort()

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
