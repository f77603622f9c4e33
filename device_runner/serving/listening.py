"""Uvicorn, told how to listen, when to close what nobody uses, and to end where it was called from."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from device_runner.serving.worker import Worker
from prge.errors import RunError

# For a new connection to send its first request's head.
SECONDS_TO_BEGIN = 60
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
            f"{host}:{port} can't be listened at: {error.strerror}", remedy="give another --host or --port"
        ) from None
    with listener:
        yield listener


def address_of(listener: socket.socket) -> str:
    """Host and port as a URL has them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application until a signal, or until its worker has failed."""

    def __init__(self, app: ASGIApp, worker: Worker) -> None:
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
                timeout_graceful_shutdown=SECONDS_TO_END,
            )
        )
        self._worker = worker

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now; asked ten times a second."""
        return await super().on_tick(counter) or not self._worker.alive

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT and SIGTERM; uvicorn's own would raise them again afterwards."""
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """A connection, closed if no request comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(SECONDS_TO_BEGIN, self._close_unused)

    def _close_unused(self) -> None:
        if getattr(self, "cycle", None) is None:  # no request has begun
            self.transport.close()
