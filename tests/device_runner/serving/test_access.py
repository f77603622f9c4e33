"""Tests of access control: host names, foreign pages, API keys and content types."""

from __future__ import annotations

import pytest

from device_runner.serving.access import Access
from device_runner.serving.listen_settings import ListenFlags
from device_runner.serving.protocol import RequestError
from prge.errors import ConfigError
from tests.refusals import raises

LOCAL = ListenFlags().access((), False)
REMOTE = ListenFlags(host="0.0.0.0", insecure=True).access((), True)


def status(
    access: Access = LOCAL, method: str = "POST", path: str = "/v1/completions", **headers: str
) -> int:
    """Return the status for a request with these headers; 0 if it is accepted."""
    all_headers = {"host": "localhost:8000", "content_type": "application/json", **headers}
    pairs = [
        (name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in all_headers.items()
    ]
    try:
        access.check({"type": "http", "method": method, "path": path, "headers": pairs})
    except RequestError as error:
        assert error.body["error"]["message"]
        return error.status
    return 0


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.0.0.2", "127.255.0.9:80", "[::1]", "[::1]:8000"],
)
def test_every_name_of_this_machine_is_accepted(host: str) -> None:
    for listens in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert status(ListenFlags(host=listens).access((), False), host=host) == 0
    assert status(REMOTE, host=host) == 0


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "[::2]:8000", "[::1", "::1]:", "evil@localhost", "localhost@evil", "localhost, evil",
        "localhost/evil", "10.0.0.1",
        "2130706433", "0x7f.1", "localhost:8000:8000", "[localhost]evil", "0.0.0.0", "[::ffff:8.8.8.8]",
    ],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    """Other names are refused even if other machines may connect: their owner can point them here."""
    assert status(host=host) == 403
    # Numeric addresses can't be rebound by DNS.
    is_address = host in ("[::2]:8000", "10.0.0.1", "[::ffff:8.8.8.8]")
    for path in ("/", "/health", "/page/app.js", "/v1/runs/events", "/v1/completions"):
        assert status(REMOTE, path=path, host=host) == (0 if is_address else 403)
        assert status(REMOTE, "GET", path, host=host) == (0 if is_address else 403)
    key = ListenFlags(host="0.0.0.0").access(("secret",), True)
    assert status(key, host=host, authorization="Bearer secret") == (0 if is_address else 403)


def test_a_server_accepts_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server accepts --host, --allowed-hosts, and the machine's own names if others may connect."""
    monkeypatch.setattr("socket.gethostname", lambda: "Desk.Example.org")
    named = ListenFlags(host="My-Phone").access((), False)
    assert status(named, host="my-phone:8000") == 0 and status(named, host="other") == 403
    own = ["desk", "DESK:8000", "desk.local", "desk.example.org"]
    assert [status(others_of_desk(), host=host) for host in own] == [0] * 4
    assert [status(LOCAL, host=host) for host in own] == [403] * 4
    flags = ListenFlags(host="0.0.0.0", insecure=True, allowed_hosts=["AI.example.com", "[fe80::1]"])
    assert status(flags.access((), True), host="ai.example.com") == 0
    for host in ("x.ai.example.com", "example.com", "ai.example.com.evil.example"):
        assert status(flags.access((), True), host=host) == 403
    assert status(ListenFlags(allowed_hosts=["ai"]).access((), False), host="ai:8000") == 0
    everything = ListenFlags(allowed_hosts=["*"]).access((), False)
    assert status(everything, host="evil.example") == 0 and status(everything, host="") == 0
    for wrong in ("http://a", "a:8000", "", "*.example.com", "a b"):
        with raises(ConfigError, "settings-unusable", containing="--allowed-hosts"):
            ListenFlags(allowed_hosts=[wrong]).access((), False)


def others_of_desk() -> Access:
    return ListenFlags(host="0.0.0.0", insecure=True).access((), True)


def test_two_names_at_once_are_refused() -> None:
    pairs = [(b"host", b"localhost"), (b"host", b"evil.example"), (b"content-type", b"application/json")]
    with pytest.raises(RequestError):
        REMOTE.check({"type": "http", "method": "POST", "path": "/v1/completions", "headers": pairs})


def test_dns_rebinding_is_refused() -> None:
    evil = {
        "host": "evil.example:8000",
        "origin": "http://evil.example:8000",
        "sec_fetch_site": "same-origin",
    }
    for access in (LOCAL, REMOTE):
        assert status(access, **evil) == 403
        assert status(access, "GET", "/v1/models", **evil) == 403


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:3000", 0),
        ("http://127.0.0.3", 0),
        ("https://[::1]:8443", 0),
        ("http://my-phone:8000", 0),
        ("https://MY-PHONE:8000", 0),
        ("http://my-phone:8001", 403),
        ("http://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost@evil.example", 403),
        ("null", 403),
        ("", 403),
        ("localhost", 403),
        ("http://", 403),
        ("file://", 403),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str, expected: int) -> None:
    access = ListenFlags(host="my-phone").access((), False)
    assert status(access, host="my-phone:8000", origin=origin) == expected
    assert status(access, "GET", "/health", host="my-phone:8000", origin=origin) == expected


def test_foreign_embeds_are_refused_and_links_are_not() -> None:
    for path in ("/v1/models", "/v1/runs/events", "/page/app.js"):
        assert status(LOCAL, "GET", path, sec_fetch_site="cross-site") == 403
        for site in ("same-origin", "same-site", "none"):
            assert status(LOCAL, "GET", path, sec_fetch_site=site) == 0
    assert status(LOCAL, "GET", "/training", sec_fetch_site="cross-site") == 0
    # A page on this machine sends its origin.
    assert status(sec_fetch_site="cross-site", origin="http://localhost:3000") == 0


def test_the_page_and_its_files_need_no_key() -> None:
    access = Access(("secret",))
    for path in ("/", "/training", "/page/app.js"):
        assert status(access, "GET", path) == 0
    for path in ("/page", "/training/", "//", "/v1/about"):
        assert status(access, "GET", path) == 401


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", 0),
        ("Application/JSON; charset=utf-8", 0),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=application/json", 415),
        ("application/json, text/plain", 415),
        ("", 415),
    ],
)
def test_content_types_that_need_no_preflight_are_refused(content_type: str, expected: int) -> None:
    assert status(content_type=content_type) == expected
    assert status(method="GET", content_type=content_type) == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Bearer secret", 0),
        ("bearer secret", 0),
        ("secret", 401),
        ("Basic secret", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer secret2", 401),
        ("Bearer secre", 401),
        ("Bearer Secret", 401),
        ("Bearer secr\xe9t", 401),
        ("Bearer secret\xa0", 401),
        ("Bearer " + "secret" * 10_000, 401),
    ],
)
def test_requests_need_the_key(given: str, expected: int) -> None:
    access = Access(("secret",))
    assert status(access, authorization=given) == expected
    assert status(access) == 401 and status(access, path="/nothing") == 401
    assert status(access, "GET", "/health") == 0
    assert status(Access(), authorization=given) == 0
