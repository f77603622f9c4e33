"""Clients that don't say what they want: connections without a request, bodies that never come."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from device_runner.serving import app, listening
from device_runner.serving.models import Models
from device_runner.serving.worker import Worker
from prge.errors import RunError
from prge.generation.loop import Generator
from tests.device_runner.serving.child import SlowSpeaker, adapters, make_tokenizer


def test_a_free_port_and_one_that_is_taken() -> None:
    with listening.listening("127.0.0.1", 0) as listener:
        address = listening.address_of(listener)
        port = int(address.removeprefix("127.0.0.1:"))
        with pytest.raises(RunError, match=f"127.0.0.1:{port} can't be listened at: "):
            listening.listening("127.0.0.1", port).__enter__()
    with pytest.raises(RunError, match="no such host"):
        listening.listening("no such host", 0).__enter__()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTT"])
def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(listening, "SECONDS_TO_BEGIN", 0.2)

    async def connect() -> bytes:
        worker = Worker(Generator(SlowSpeaker(0), make_tokenizer()), 2)
        with listening.listening("127.0.0.1", 0) as listener, worker:
            server = listening.Server(app.make_app(Models(adapters(), make_tokenizer()), worker), worker)
            serving = asyncio.create_task(server.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(begun)
            content = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            server.should_exit = True
            await serving
            return content

    assert asyncio.run(connect()) == b""


def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECONDS", 0.1)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    async def send(message: Any) -> None:
        sent.append(message)

    with Worker(Generator(SlowSpeaker(0), make_tokenizer()), 2) as worker:
        served = app.make_app(Models(adapters(), make_tokenizer()), worker)
        asyncio.run(served(scope, receive, send))
    assert sent[0]["status"] == 408
    assert "didn't come within" in json.loads(sent[1]["body"])["error"]["message"]


def test_addresses_of_both_kinds() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no address ::1")
    with listening.listening("::1", 0) as listener:
        assert listening.address_of(listener).startswith("[::1]:")
