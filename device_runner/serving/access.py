"""Which requests are accepted: those to one of the server's host names, not sent by a foreign web page,
with an API key, in JSON.

A page that a browser shows may send requests to any address, this machine's too, but not choose their `Host`
and `Origin`, nor call a text JSON without being asked about it first. Whoever owns a name of the web can let
it lead to this machine (DNS rebinding), so that the name's pages and this server are one origin to a browser:
`Host` must be a name that the server knows, or an address, which nobody can let lead elsewhere. The server's
own page is told to load and ask nothing from elsewhere, and to be shown in no other.
"""

from __future__ import annotations

import hmac
import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from device_runner.serving.protocol import RequestError
from prge.errors import shown

# Answered without a key: a browser can't send one before it has the page.
HEALTH = "/health"
# The code of requests that come while the server pauses, and seconds after which they may come again.
PAUSED, PAUSED_SECONDS = "paused", 30
PAGES, FILES = ("/", "/training"), "/page/"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?", re.IGNORECASE)


ANY_NAME = "*"


def names_of_machine() -> frozenset[str]:
    """What a machine is called in its own network: its host name, whole and without a domain, and by mDNS."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local"} - {"", ".local"})


def is_address(name: str) -> bool:
    """Whether a host is an address of one machine, as numbers."""
    try:
        address = ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)


def is_local(name: str) -> bool:
    """Whether a host is this machine by a name or an address that no page of the web can have."""
    try:
        return name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """What a request must have to be answered."""

    keys: tuple[str, ...] = ()
    """One of them is sent as `Authorization: Bearer KEY`; without any, no key is needed."""
    names: frozenset[str] = frozenset()
    """Names in lower case that requests may call the server by, beside loopback names and addresses; `*`: any
    name."""
    by_address: bool = False
    """Whether they may call it by any other address too: where other machines may ask."""

    def check(self, scope: Scope) -> None:
        """Let a request pass, before its body is read; raises RequestError."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1 or not self.is_called(_name(host)):
            raise RequestError(
                403,
                f"this server isn't called {shown(host)}: if it is, give it the name with --allowed-hosts",
                code="wrong_host",
            )
        for origin in headers.getlist("origin"):
            of_page = origin.partition("://")[2]
            if not is_local(_name(of_page)) and (not of_page or of_page.lower() != host.lower()):
                raise RequestError(403, f"pages of {shown(origin)} may not ask", code="foreign_origin")
        path = scope["path"]
        # Of a picture, a script or a frame that a page has from here a browser tells no origin, but this.
        is_foreign = headers.get("sec-fetch-site") == "cross-site" and "origin" not in headers
        if is_foreign and path not in PAGES:
            raise RequestError(403, "pages of other sites may not ask", code="foreign_origin")
        is_open = path in (HEALTH, *PAGES) or path.startswith(FILES)
        if self.keys and not is_open and self.key_of(headers) is None:
            raise RequestError(401, "wrong or no API key", code="invalid_api_key")
        if scope["method"] == "POST":
            kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                given = shown(kinds[0]) if kinds else "missing"
                raise RequestError(415, f"Content-Type is {given}, must be application/json")

    def is_called(self, name: str) -> bool:
        """Whether requests may call the server by a name or an address, in lower case."""
        return (
            is_local(name)
            or name in self.names
            or (self.by_address and is_address(name))
            or ANY_NAME in self.names
        )

    def key_of(self, headers: Headers) -> str | None:
        """Which of the keys a request has; None: none of them."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = None
        for key in self.keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(given.strip(" ").encode(), key.encode()):
                known = key
        return known if scheme.lower() == "bearer" else None


def _name(authority: str) -> str:
    """The host of `host:port`, lower; empty where it is something else."""
    match = _AUTHORITY.fullmatch(authority)
    return match[1].lower() if match else ""


class AccessControl:
    """An ASGI application that answers what an `Access` lets pass."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        try:
            self._access.check(scope)
        except RequestError as error:
            await refusal(error)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)


def refusal(error: RequestError) -> JSONResponse:
    """The answer to a request that is refused."""
    headers = {429: {"Retry-After": str(error.retry_after)}, 401: {"WWW-Authenticate": "Bearer"}}.get(
        error.status
    )
    if error.code == PAUSED:
        headers = {"Retry-After": str(PAUSED_SECONDS)}
    return JSONResponse(error.body, error.status, headers)
