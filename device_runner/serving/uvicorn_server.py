"""Uvicorn with prge's timeouts and connection limits, which stops without raising signals again."""

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
from prge.system.interrupts import ending_signals, handle_signals

# Seconds for a client to send a request's head, and to continue reading a response.
SECONDS_TO_BEGIN = 20
SECONDS_TO_READ = 60
MAX_CONNECTIONS = 256
# Connections that are accepted at once, before they are counted.
_BACKLOG = 64
# Seconds for responses that are in progress when the server is asked to stop.
SECONDS_TO_END = 3


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket that listens at an address; port 0 is a free one.

    Raises:
        RunError: the address is in use, is not one of this machine, or does not exist.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise RunError(
            f"Cannot listen at {host}:{port}: {error.strerror}",
            remedy="Give another --host or --port.",
            code="address-not-available",
        ) from None
    with listener:
        yield listener


def format_address(listener: socket.socket) -> str:
    """Return host and port as in a URL on this machine."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:  # means all addresses of this machine, but clients need one
        host = "localhost"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application until a signal, or until its worker has failed.

    Args:
        app: the application.
        worker: generates its completions; None: the application needs none.
        on_listening: called once the server listens.
        on_stopping: called before the server waits for responses that are being sent.
        on_each_tick: called ten times a second.
    """

    def __init__(
        self,
        app: ASGIApp,
        worker: Worker | None,
        on_listening: Callable[[], object] = lambda: None,
        on_stopping: Callable[[], object] = lambda: None,
        on_each_tick: Callable[[], object] = lambda: None,
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
        self._on_listening = on_listening
        self._on_stopping = on_stopping
        self._on_each_tick = on_each_tick

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening; from here on, signals stop the server, not the process."""
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop now; called ten times a second."""
        self._on_each_tick()
        failed = self._worker is not None and not self._worker.alive
        return await super().on_tick(counter) or failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and finish the responses that are being sent."""
        self._on_stopping()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT, SIGTERM and SIGHUP; uvicorn's own version would raise them again afterwards."""
        with handle_signals(self.handle_exit, ending_signals()):
            yield


class _Protocol(H11Protocol):
    """A connection that closes if its client is idle, earlier if others need its place."""

    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > MAX_CONNECTIONS:
            every = [each for each in self.connections if isinstance(each, _Protocol)]
            longest = min((each for each in every if each._waits_for_client), key=lambda each: each._since)
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_timer(None)

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()  # may begin the next request, if it has already arrived

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(self.loop.call_later(SECONDS_TO_READ, self.transport.abort))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        if not self._is_idle:  # the request that is being read has no end and gets no response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has begun
            self.transport.abort()
            return
        body = json.dumps(RequestError(400, "this is not an HTTP request").body).encode()
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
