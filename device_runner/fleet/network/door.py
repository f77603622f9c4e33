"""Who may talk to a fleet's server, how much and for how long: decided before anything of it is read.

Flower's own servers, HTTP and gRPC, can't hold the promise that no body is read without a device's signature
in its head: they read a request to its end, gRPC up to 2 GB, before they ask who sent it.

Here a head says who a request is from, by a signature, and how long it is; nobody else's body is read, and of
the connections that haven't shown a device's key the oldest make room for new ones.
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

from device_runner.fleet.network.flower import FLEET_PATHS, PUSH_OBJECT, refusal, signer

# Every request but an object's; and an object beside what a device says in it.
SMALL_BYTES = 1 << 16
# With TLS each takes a third of a megabyte.
MOST_STRANGERS = 64
MOST_CONNECTIONS_OF_A_KEY = 8
_OBJECTS_AT_ONCE = 4
SECONDS_TO_ASK = 60.0
_SLOWEST = 20_000  # bytes a second
Client = tuple[str, int]


class Listener(socket):
    """A listening socket that bounds how many connections are open, strangers' and each key's."""

    def __init__(self, listener: socket, most: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._most = most
        self._accepted = 0
        gc.freeze()  # what serves stays; so looking for circles among connections is quick
        self._strangers: dict[Client, socket] = {}
        self._known: defaultdict[bytes, dict[Client, socket]] = defaultdict(dict)

    def accept(self) -> tuple[socket, Any]:
        """The next connection; it may cost the oldest stranger its own."""
        connection, address = super().accept()
        # An ended connection is a circle of a third of a megabyte; Python, counting objects, finds it late.
        self._accepted += 1
        if self._accepted % (MOST_STRANGERS // 4) == 0:
            gc.collect()
        self._strangers = _bounded({**self._strangers, address[:2]: connection}, MOST_STRANGERS)
        if sum(map(len, self._known.values())) > self._most:
            self._known = defaultdict(dict, {key: _bounded(mine) for key, mine in self._known.items()})
            if sum(map(len, self._known.values())) > self._most:
                connection.close()
                raise ConnectionAbortedError
        return connection, address

    def know(self, client: Client, key: bytes) -> None:
        """Take a connection for one of a key's, which lasts."""
        if (connection := self._strangers.pop(client, None)) is not None:
            self._known[key] = _bounded({**self._known[key], client: connection}, MOST_CONNECTIONS_OF_A_KEY)


def _bounded(connections: dict[Client, socket], most: int | None = None) -> dict[Client, socket]:
    """Those that are open; of more than `most` the oldest are ended."""
    alive = {client: connection for client, connection in connections.items() if connection.fileno() >= 0}
    while most is not None and len(alive) > most:
        with suppress(OSError):
            alive.pop(next(iter(alive))).shutdown(SHUT_RDWR)
    return alive


class Connection(H11Protocol):
    """A connection that ends where a request, its head or its body, takes too long to come."""

    seconds = SECONDS_TO_ASK

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self.seconds, transport.abort)

    def handle_events(self) -> None:
        """Answers may take longer."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body:
            self._late.cancel()

    def send_400_response(self, msg: str) -> None:
        """Say that it is no request, unless another answer was the last word."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._late.cancel()
        self._late = self.loop.call_later(self.seconds, self.transport.abort)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing."""
        self._late.cancel()
        super().connection_lost(exc)


def connections_for(most_bytes: int) -> type[Connection]:
    """Connections whose bodies may have so many bytes, over a slow network."""
    return type("Connection", (Connection,), {"seconds": SECONDS_TO_ASK + most_bytes / _SLOWEST})


class Door:
    """ASGI application that lets requests of devices through to another one.

    Args:
        app: what is behind.
        listener: has the connections.
        keys: public keys that may come in; None: anyone's.
        most_bytes: of an object.
    """

    def __init__(
        self, app: ASGIApp, listener: Listener, keys: frozenset[bytes] | None, most_bytes: int
    ) -> None:
        self._app, self._listener, self._keys = app, listener, keys
        self._most_bytes = most_bytes
        self._reading: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it and close its connection."""
        # One whose body was no HTTP has its answer already.
        with suppress(h11.LocalProtocolError):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = signer(headers, self._keys)
        length = headers.get("content-length", "")
        most = self._most_bytes + SMALL_BYTES if scope["path"] == PUSH_OBJECT else SMALL_BYTES
        if scope["method"] != "POST" or scope["path"] not in FLEET_PATHS:
            refused = Response(status_code=404)
        elif key is None:
            refused = refusal(scope["path"])
        elif not (length.isascii() and length.isdigit()) or "transfer-encoding" in headers:
            refused = Response(status_code=411)
        elif len(length) > 12 or int(length) > most:
            refused = Response(status_code=413)
        elif self._reading[key] and self._reading[key] + int(length) > _OBJECTS_AT_ONCE * most:
            refused = Response(status_code=503)
        else:
            self._listener.know(scope["client"], key)
            self._reading[key] += int(length)
            try:
                return await self._app(scope, receive, send)
            finally:
                self._reading[key] -= int(length)
                self._reading += Counter()  # forgets who has none
        refused.headers["connection"] = "close"
        await refused(scope, receive, send)
