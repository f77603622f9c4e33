"""Tests of clients that send no request, or bodies that never end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from device_runner.serving import app
from device_runner.serving import uvicorn_server as listening
from device_runner.serving.access import Access
from device_runner.serving.models import Models
from device_runner.serving.worker import Worker
from prge.errors import RunError
from prge.generation.loop import Generator
from tests.device_runner.serving.child import SlowGenerationEngine, adapters, make_tokenizer
from tests.refusals import raises


def test_a_free_and_a_used_port() -> None:
    with listening.listening("127.0.0.1", 0) as listener:
        address = listening.format_address(listener)
        port = int(address.removeprefix("127.0.0.1:"))
        with raises(RunError, "address-not-available", containing=address):
            listening.listening("127.0.0.1", port).__enter__()
    with raises(RunError, "address-not-available", containing="no such host"):
        listening.listening("no such host", 0).__enter__()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


def served(*clients: Client) -> list[bytes]:
    """Return what each client receives from a server in this process; clients connect in turn, and stay."""

    async def serve() -> list[bytes]:
        worker = Worker(Generator(SlowGenerationEngine(0), make_tokenizer()), 2)
        with listening.listening("127.0.0.1", 0) as listener, worker:
            application = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
            server = listening.Server(application, worker)
            serving = asyncio.create_task(server.serve([listener]))
            address = listener.getsockname()[:2]
            opened = []
            for client in clients:
                reader, writer = await asyncio.open_connection(*address)
                opened.append(asyncio.create_task(client(reader, writer)))
                await asyncio.sleep(0.05)
            result = await asyncio.wait_for(asyncio.gather(*opened), 20)
            server.should_exit = True
            await serving
            return result

    return asyncio.run(serve())


def sends(*parts: bytes) -> Client:
    """Run a client that sends parts, one after the other, and reads to the end."""

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
    (result,) = served(sends(*before, begun))
    assert result == b"reset" or result.count(b"200 OK") == len(before)


def test_a_head_that_arrives_byte_by_byte_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.5)
    drip = [HEALTH[number : number + 1] for number in range(20)]
    assert b"200" not in served(sends(*drip))[0]


def test_an_unread_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.5)
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    (result,) = served(sends(head + b"Content-Length: 999\r\n\r\n", *[b"a"] * 6))
    assert result == b"reset" or b" 404 " in result


def test_the_longest_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 3)
    waiting = [sends(b"GET /health HTTP/1.1\r\n") for _ in range(5)]
    *idle, newest = served(*waiting, sends(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))
    assert b"200 OK" in newest and not any(b"200" in each for each in idle)


def test_an_unread_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_READ", 0.3)
    ended = asyncio.Event()

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def abort(self) -> None:
            ended.set()

    async def stall() -> None:
        worker = Worker(Generator(SlowGenerationEngine(0), make_tokenizer()), 2)
        application = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
        server = listening.Server(application, worker)
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
def test_invalid_http_gets_an_error_in_openais_form(garbage: bytes) -> None:
    (result,) = served(sends(garbage))
    head, _, body = result.partition(b"\r\n\r\n")
    assert b" 400 " in head and json.loads(body)["error"]["message"] == "this is not an HTTP request"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("path", [b"/nothing", b"/v1/completions"])
def test_garbage_in_a_body_closes_the_connection(
    caplog: pytest.LogCaptureFixture, path: bytes, is_late: bool
) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    (result,) = served(sends(head, b"zz\r\n") if is_late else sends(head + b"zz\r\n"))
    assert result == b"reset" or b" 400 " in result or b" 404 " in result
    assert not caplog.records


def test_a_body_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
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

    with Worker(Generator(SlowGenerationEngine(0), make_tokenizer()), 2) as worker:
        served = app.make_app(Models(adapters(), make_tokenizer()), worker, Access())
        asyncio.run(served(scope, receive, send))
    assert sent[0]["status"] == 408
    assert "did not arrive within" in json.loads(sent[1]["body"])["error"]["message"]


def need_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no address ::1")


def test_an_ipv6_address_is_printed_in_brackets() -> None:
    need_ipv6()
    with listening.listening("::1", 0) as listener:
        assert listening.format_address(listener).startswith("[::1]:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_printed_address_of_a_wildcard_is_accepted(host: str) -> None:
    if host == "::":
        need_ipv6()
    with listening.listening(host, 0) as listener:
        port = listener.getsockname()[1]
        assert listening.format_address(listener) == f"localhost:{port}"


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(RunError), listening.listening("", 0):
        pass
