"""Who may ask a server: by which names, from which pages, with which key, in which form."""

from __future__ import annotations

import pytest

from device_runner.serving.access import Access
from device_runner.serving.protocol import RequestError

HERE = Access(host="127.0.0.1")


def status(access: Access = HERE, method: str = "POST", path: str = "/v1/completions", **headers: str) -> int:
    """What a request with such headers is answered; 0 where it may ask."""
    given = {"host": "localhost:8000", "content_type": "application/json", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in given.items()]
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
def test_every_name_of_this_machine_is_its_name(host: str) -> None:
    for listens in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert status(Access(host=listens), host=host) == 0


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "[::2]:8000", "[::1", "::1]:", "evil@localhost", "localhost@evil", "localhost, evil",
        "localhost/evil", "10.0.0.1",
        "2130706433", "0x7f.1", "localhost:8000:8000", "[localhost]evil", "0.0.0.0", "[::ffff:8.8.8.8]",
    ],
)  # fmt: skip
def test_other_names_are_refused_where_this_machine_alone_may_ask(host: str) -> None:
    assert status(host=host) == 403
    assert status(Access(), host=host) == 0


def test_the_name_that_a_server_listens_by_is_its_name() -> None:
    assert status(Access(host="My-Phone"), host="my-phone:8000") == 0
    assert status(Access(host="My-Phone"), host="other") == 403


@pytest.mark.parametrize(
    ("origin", "found"),
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
def test_pages_of_other_origins_may_not_ask(origin: str, found: int) -> None:
    for access in (Access(), Access(host="my-phone")):
        assert status(access, host="my-phone:8000", origin=origin) == found
    assert status(Access(), "GET", "/health", host="my-phone:8000", origin=origin) == found


def test_what_a_page_of_another_site_has_from_here_is_refused_and_a_link_is_not() -> None:
    for path in ("/v1/models", "/v1/runs/events", "/page/app.js"):
        assert status(HERE, "GET", path, sec_fetch_site="cross-site") == 403
        for site in ("same-origin", "same-site", "none"):
            assert status(HERE, "GET", path, sec_fetch_site=site) == 0
    assert status(HERE, "GET", "/training", sec_fetch_site="cross-site") == 0
    # A page of this machine says who it is.
    assert status(sec_fetch_site="cross-site", origin="http://localhost:3000") == 0


def test_the_page_and_its_files_need_no_key() -> None:
    access = Access(key="secret", host="localhost")
    for path in ("/", "/training", "/page/app.js"):
        assert status(access, "GET", path) == 0
    for path in ("/page", "/training/", "//", "/v1/about"):
        assert status(access, "GET", path) == 401


@pytest.mark.parametrize(
    ("kind", "found"),
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
def test_what_a_page_can_send_unasked_is_no_json(kind: str, found: int) -> None:
    assert status(content_type=kind) == found
    assert status(method="GET", content_type=kind) == 0


@pytest.mark.parametrize(
    ("given", "found"),
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
def test_a_key(given: str, found: int) -> None:
    access = Access(key="secret", host="localhost")
    assert status(access, authorization=given) == found
    assert status(access) == 401 and status(access, path="/nothing") == 401
    assert status(access, "GET", "/health") == 0
    assert status(Access(), authorization=given) == 0
