"""Access control: which requests are accepted, by host name, origin, API key and content type.

A web page in a browser may send requests to any address, including this machine's. It can't choose their
`Host` and `Origin`, nor send JSON without a preflight request. The owner of a domain can point it at this
machine (DNS rebinding), so that the browser takes the domain's pages and this server for one origin. `Host`
must therefore be a name that the server knows, or an address, which nobody can point elsewhere. The server's
own page may load and request nothing from elsewhere, and must not be framed by other pages.
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
from prge.errors import format_value

# Answered without a key, because a browser can't send one before it has the page.
HEALTH = "/health"
# Error code while the server pauses, and the seconds after which a client may try again.
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


def machine_names() -> frozenset[str]:
    """Return the machine's names in its own network: the host name, with and without domain, and for mDNS."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local"} - {"", ".local"})


def is_address(name: str) -> bool:
    """Return whether a host is the numeric address of one machine."""
    try:
        address = ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)


def is_local(name: str) -> bool:
    """Return whether a host is this machine, by a name or address that no web page can have."""
    try:
        return name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The requirements that a request must meet to be answered."""

    keys: tuple[str, ...] = ()
    """One of them must be sent as `Authorization: Bearer KEY`; if empty, no key is needed."""
    names: frozenset[str] = frozenset()
    """Lower-case names by which requests may call the server, besides loopback names and addresses; `*`: any
    name."""
    by_address: bool = False
    """Whether any other numeric address is accepted too, because other machines may send requests."""

    def check(self, scope: Scope) -> None:
        """Accept a request before its body is read, or raise RequestError."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1 or not self.accepts_host(_name(host)):
            raise RequestError(
                403,
                f"unknown host name {format_value(host)}: allow it with --allowed-hosts if it is this server",
                code="wrong_host",
            )
        for origin in headers.getlist("origin"):
            page_host = origin.partition("://")[2]
            if not is_local(_name(page_host)) and (not page_host or page_host.lower() != host.lower()):
                raise RequestError(
                    403, f"pages from {format_value(origin)} are not allowed", code="foreign_origin"
                )
        path = scope["path"]
        # For images, scripts and frames that a page loads from here, browsers send no Origin, but this
        # header.
        is_foreign = headers.get("sec-fetch-site") == "cross-site" and "origin" not in headers
        if is_foreign and path not in PAGES:
            raise RequestError(403, "pages from other sites are not allowed", code="foreign_origin")
        is_open = path in (HEALTH, *PAGES) or path.startswith(FILES)
        if self.keys and not is_open and self.find_key(headers) is None:
            raise RequestError(401, "the API key is wrong or missing", code="invalid_api_key")
        if scope["method"] == "POST":
            content_types = [
                content_type.partition(";")[0].strip().lower()
                for content_type in headers.getlist("content-type")
            ]
            if content_types != ["application/json"]:
                description = format_value(content_types[0]) if content_types else "missing"
                raise RequestError(415, f"Content-Type is {description}, must be application/json")

    def accepts_host(self, name: str) -> bool:
        """Return whether requests may call the server by a lower-case name or address."""
        return (
            is_local(name)
            or name in self.names
            or (self.by_address and is_address(name))
            or ANY_NAME in self.names
        )

    def find_key(self, headers: Headers) -> str | None:
        """Return the key that a request has; None if it has none of them."""
        scheme, _, sent_key = headers.get("authorization", "").partition(" ")
        known = None
        for key in self.keys:  # compare all of them, so that the time reveals nothing
            if hmac.compare_digest(sent_key.strip(" ").encode(), key.encode()):
                known = key
        return known if scheme.lower() == "bearer" else None


def _name(authority: str) -> str:
    """Return the host of `host:port` in lower case; empty if it is malformed."""
    match = _AUTHORITY.fullmatch(authority)
    return match[1].lower() if match else ""


class AccessControl:
    """ASGI middleware that answers only requests that an `Access` accepts."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""

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
    """Return the response to a refused request."""
    headers = {429: {"Retry-After": str(error.retry_after)}, 401: {"WWW-Authenticate": "Bearer"}}.get(
        error.status
    )
    if error.code == PAUSED:
        headers = {"Retry-After": str(PAUSED_SECONDS)}
    return JSONResponse(error.body, error.status, headers)
