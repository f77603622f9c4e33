"""Who may ask: requests by a name of this machine, not from pages of the web, with the key, in JSON.

A page that a browser shows may send requests to any address, this machine's too, but not choose their `Host`
and `Origin`, nor call a text JSON without being asked about it first. The server's own page is told to load
and ask nothing from elsewhere, and to be shown in no other.
"""

from __future__ import annotations

import hmac
import re
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


def is_local(name: str) -> bool:
    """Whether a host is this machine by a name or an address that no page of the web can have."""
    try:
        return name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """What a request must have to be answered."""

    key: str | None = None
    """Sent as `Authorization: Bearer KEY`; None: no key is needed."""
    host: str | None = None
    """Where only this machine may ask, the name that it listens by: requests must call it so, or by a
    loopback name or address. None: any name."""

    def check(self, scope: Scope) -> None:
        """Let a request pass, before its body is read; raises RequestError."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _name(host)
        if self.host is not None and not is_local(name) and name != self.host.lower():
            raise RequestError(403, f"this server isn't called {shown(host)}", code="wrong_host")
        for origin in headers.getlist("origin"):
            of_page = origin.partition("://")[2]
            if not is_local(_name(of_page)) and (not of_page or of_page.lower() != host.lower()):
                raise RequestError(403, f"pages of {shown(origin)} may not ask", code="foreign_origin")
        path = scope["path"]
        # Of a picture, a script or a frame that a page has from here a browser tells no origin, but this.
        is_foreign = headers.get("sec-fetch-site") == "cross-site" and "origin" not in headers
        if is_foreign and path not in PAGES:
            raise RequestError(403, "pages of other sites may not ask", code="foreign_origin")
        if self.key is not None and path not in (HEALTH, *PAGES) and not path.startswith(FILES):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip(" ").encode(), self.key.encode())
            if not right or scheme.lower() != "bearer":
                raise RequestError(401, "wrong or no API key", code="invalid_api_key")
        if scope["method"] == "POST":
            kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                given = shown(kinds[0]) if kinds else "missing"
                raise RequestError(415, f"Content-Type is {given}, must be application/json")


def _name(authority: str) -> str:
    """The host of `host:port`, lower; empty where it is something else."""
    match = _AUTHORITY.fullmatch(authority)
    return match[1].lower() if match else ""


class Door:
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
