"""Clients that don't say what they want: connections without a request, bodies that never come."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from device_runner.serving import app, listening
from device_runner.serving.access import Access
from device_runner.serving.models import Models
from device_runner.serving.worker import Worker
from prge.errors import RunError
from prge.text.loop import Generator
from tests.device_runner.serving.child import SlowSpeaker, adapters, make_tokenizer
from tests.refusals import raises


def test_a_free_port_and_one_that_is_taken() -> None:
    with listening.listening("127.0.0.1", 0) as listener:
        address = listening.address_of(listener)
        port = int(address.removeprefix("127.0.0.1:"))
        with raises(RunError, "address-not-available", saying=address):
            listening.listening("127.0.0.1", port).__enter__()
    with raises(RunError, "address-not-available", saying="no such host"):
        listening.listening("no such host", 0).__enter__()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


def served(*clients: Client) -> list[bytes]:
    """What each client gets of a server in this process; the clients come one after another, and stay."""

    async def serve() -> list[bytes]:
        worker = Worker(Generator(SlowSpeaker(0), make_tokenizer()), 2)
        with listening.listening("127.0.0.1", 0) as listener, worker:
            made = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
            server = listening.Server(made, worker)
            serving = asyncio.create_task(server.serve([listener]))
            address = listener.getsockname()[:2]
            opened = []
            for client in clients:
                reader, writer = await asyncio.open_connection(*address)
                opened.append(asyncio.create_task(client(reader, writer)))
                await asyncio.sleep(0.05)
            found = await asyncio.wait_for(asyncio.gather(*opened), 20)
            server.should_exit = True
            await serving
            return found

    return asyncio.run(serve())


def sends(*parts: bytes) -> Client:
    """A client that sends parts, one after the other, and reads to the end."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.3)
            return await reader.read()
        return b"reset"

    return client


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTT"])
@pytest.mark.parametrize("before", [(), (HEALTH,), (HEALTH, HEALTH)])
def test_a_connection_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, before: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.5)
    (found,) = served(sends(*before, begun))
    assert found == b"reset" or found.count(b"200 OK") == len(before)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.5)
    drip = [HEALTH[number : number + 1] for number in range(20)]
    assert b"200" not in served(sends(*drip))[0]


def test_a_body_that_nobody_reads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.5)
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    (found,) = served(sends(head + b"Content-Length: 999\r\n\r\n", *[b"a"] * 6))
    assert found == b"reset" or b" 404 " in found


def test_who_waits_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 3)
    waiting = [sends(b"GET /health HTTP/1.1\r\n") for _ in range(5)]
    *idle, asked = served(*waiting, sends(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))
    assert b"200 OK" in asked and not any(b"200" in each for each in idle)


def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_READ", 0.3)
    ended = asyncio.Event()

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def abort(self) -> None:
            ended.set()

    async def stall() -> None:
        worker = Worker(Generator(SlowSpeaker(0), make_tokenizer()), 2)
        made = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
        server = listening.Server(made, worker)
        connection: Any = server.config.http
        protocol = connection(server.config, server.server_state, {})
        protocol.connection_made(Transport())
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.5)
        assert not ended.is_set()
        protocol.pause_writing()
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(stall())


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\r\n\r\n", b"GET /health\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_http_is_told_so_as_openai_does(garbage: bytes) -> None:
    (found,) = served(sends(garbage))
    head, _, body = found.partition(b"\r\n\r\n")
    assert b" 400 " in head and json.loads(body)["error"]["message"] == "this is no HTTP request"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("path", [b"/nothing", b"/v1/completions"])
def test_garbage_in_a_body_is_the_end(caplog: pytest.LogCaptureFixture, path: bytes, is_late: bool) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    (found,) = served(sends(head, b"zz\r\n") if is_late else sends(head + b"zz\r\n"))
    assert found == b"reset" or b" 400 " in found or b" 404 " in found
    assert not caplog.records


def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECONDS", 0.1)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    async def send(message: Any) -> None:
        sent.append(message)

    with Worker(Generator(SlowSpeaker(0), make_tokenizer()), 2) as worker:
        served = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
        asyncio.run(served(scope, receive, send))
    assert sent[0]["status"] == 408
    assert "didn't come within" in json.loads(sent[1]["body"])["error"]["message"]


def need_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no address ::1")


def test_addresses_of_both_kinds() -> None:
    need_ipv6()
    with listening.listening("::1", 0) as listener:
        assert listening.address_of(listener).startswith("[::1]:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_where_it_listens_everywhere_the_address_that_is_told_is_one_that_it_answers_to(host: str) -> None:
    if host == "::":
        need_ipv6()
    with listening.listening(host, 0) as listener:
        port = listener.getsockname()[1]
        assert listening.address_of(listener) == f"localhost:{port}"


def test_an_empty_address_is_none() -> None:
    with pytest.raises(RunError), listening.listening("", 0):
        pass
