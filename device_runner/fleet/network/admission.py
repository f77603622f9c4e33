"""Admission control of a fleet's server: who may connect and send how much, decided before bodies are read.

Flower's own servers, HTTP and gRPC, read a request to its end, gRPC up to 2 GB, before they ask who sent it.

Here the head of a request identifies the device by a signature, and says how long the request is. Bodies of
others are not read, and of the connections that have not shown a device's key, the oldest make room for new
ones.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from device_runner.fleet.network.flower import FLEET_PATHS, PUSH_OBJECT, authenticated_key, refusal

# Bodies of all requests except PushObject; and what PushObject adds to the object.
SMALL_BYTES = 1 << 16
# Each connection takes a third of a megabyte with TLS.
MAX_STRANGERS = 64
MAX_CONNECTIONS_OF_A_KEY = 8
_OBJECTS_AT_ONCE = 4
SECONDS_TO_ASK = 60.0
_SLOWEST = 20_000  # bytes per second
Client = tuple[str, int]


class Listener(socket):
    """A listening socket that limits the number of open connections, unauthenticated and per key."""

    def __init__(self, listener: socket, max_connections: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._max_connections = max_connections
        self._accepted = 0
        gc.freeze()  # existing objects stay alive; excluding them keeps collections fast
        self._strangers: dict[Client, socket] = {}
        self._known: defaultdict[bytes, dict[Client, socket]] = defaultdict(dict)

    def accept(self) -> tuple[socket, Any]:
        """Accept a connection; may close the oldest unauthenticated one."""
        connection, address = super().accept()
        # A closed connection is a reference cycle of a third of a megabyte, which the default thresholds
        # collect late.
        self._accepted += 1
        if self._accepted % (MAX_STRANGERS // 4) == 0:
            gc.collect()
        self._strangers = _bounded({**self._strangers, address[:2]: connection}, MAX_STRANGERS)
        if sum(map(len, self._known.values())) > self._max_connections:
            self._known = defaultdict(dict, {key: _bounded(mine) for key, mine in self._known.items()})
            if sum(map(len, self._known.values())) > self._max_connections:
                connection.close()
                raise ConnectionAbortedError
        return connection, address

    def mark_known(self, client: Client, key: bytes) -> None:
        """Count a connection as one of a key's, which stays open."""
        if (connection := self._strangers.pop(client, None)) is not None:
            self._known[key] = _bounded({**self._known[key], client: connection}, MAX_CONNECTIONS_OF_A_KEY)


def _bounded(connections: dict[Client, socket], limit: int | None = None) -> dict[Client, socket]:
    """Return the open connections; if there are more than `limit`, close the oldest ones."""
    alive = {client: connection for client, connection in connections.items() if connection.fileno() >= 0}
    while limit is not None and len(alive) > limit:
        with suppress(OSError):
            alive.pop(next(iter(alive))).shutdown(SHUT_RDWR)
    return alive


class Connection(H11Protocol):
    """A connection that closes if a request, its head or its body, takes too long to arrive."""

    seconds = SECONDS_TO_ASK

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self.seconds, transport.abort)

    def handle_events(self) -> None:
        """Stop the timeout once the request is complete: the response may take longer."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body:
            self._late.cancel()

    def send_400_response(self, msg: str) -> None:
        """Send status 400, unless a response has already ended the connection."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Start the timeout of the next request."""
        self._late.cancel()
        self._late = self.loop.call_later(self.seconds, self.transport.abort)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._late.cancel()
        super().connection_lost(exc)


def make_connection_class(max_bytes: int) -> type[Connection]:
    """Return a Connection class whose timeout allows bodies of this size over a slow network."""
    return type("Connection", (Connection,), {"seconds": SECONDS_TO_ASK + max_bytes / _SLOWEST})


class Admission:
    """ASGI middleware that passes only requests of admitted devices to an application.

    Args:
        app: the application.
        listener: the listener, which owns the connections.
        keys: public keys of the admitted devices; None: any key.
        max_bytes: the size of the largest object.
    """

    def __init__(
        self, app: ASGIApp, listener: Listener, keys: frozenset[bytes] | None, max_bytes: int
    ) -> None:
        self._app, self._listener, self._keys = app, listener, keys
        self._max_bytes = max_bytes
        self._reading: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it and close its connection."""
        # A request with an invalid HTTP body has already been answered.
        with suppress(h11.LocalProtocolError):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = authenticated_key(headers, self._keys)
        length = headers.get("content-length", "")
        max_bytes = self._max_bytes + SMALL_BYTES if scope["path"] == PUSH_OBJECT else SMALL_BYTES
        if scope["method"] != "POST" or scope["path"] not in FLEET_PATHS:
            refused = Response(status_code=404)
        elif key is None:
            refused = refusal(scope["path"])
        elif not (length.isascii() and length.isdigit()) or "transfer-encoding" in headers:
            refused = Response(status_code=411)
        elif len(length) > 12 or int(length) > max_bytes:
            refused = Response(status_code=413)
        elif self._reading[key] and self._reading[key] + int(length) > _OBJECTS_AT_ONCE * max_bytes:
            refused = Response(status_code=503)
        else:
            self._listener.mark_known(scope["client"], key)
            self._reading[key] += int(length)
            try:
                return await self._app(scope, receive, send)
            finally:
                self._reading[key] -= int(length)
                self._reading += Counter()  # removes zero entries
        refused.headers["connection"] = "close"
        await refused(scope, receive, send)
