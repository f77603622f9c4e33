"""Hostile clients and web pages against a real `prge serve`: their requests and the server's responses.

Every call sends a few requests to a server that keeps running from call to call, and then a normal request.
A valid response is a result, or an error in OpenAI's form with a status of 4xx. The server may close the
connection if the bytes aren't a request at all.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from outcome import Case, Findings, Verdict
from service import Service, start_service
from tables import TABLES
from workshop import Bench

KEY = "an-api-key-of-the-attack"
_CASES = 20
_SECONDS, _PROMPT_SECONDS = 15.0, 5.0
# Maximum growth after the first responses.
_MAX_GROWTH = 64 << 20
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FEEDBACK = "/v1/feedback"
_NORMAL_REQUESTS: dict[str, dict[str, Any]] = {
    _CHAT: {"model": "base", "messages": [{"role": "user", "content": "aa"}], "max_tokens": 2},
    _COMPLETIONS: {"model": "base", "prompt": "aa", "max_tokens": 2},
}
_EXTREME_VALUES: list[dict[str, Any]] = [
    *TABLES["beyond"],
    *({"seed": -(10**99)}, {"tools": [{"type": "function"}] * 100}),
    {"logit_bias": {str(n): 100 for n in range(1000)}},
]
_METHODS = [b"GET", b"HEAD", b"PUT", b"OPTIONS", b"TRACE", b"CONNECT", b"\xff"]
_LENGTHS = ["-5", "1e3", "0x10", "9" * 30, "abc"]
_CHUNKS = [
    b"zz\r\n", b"-1\r\n\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nab", b"\0" * 50,
    b"2;" + b"a" * 5000 + b"\r\naa\r\n",
]  # fmt: skip
Judgement = tuple[Verdict, str]


@dataclass
class _Server:
    """A running server, and its resident memory after the first responses."""

    service: Service
    key: str
    port: int
    resident: int = 0

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_SECONDS)

    def head(self, method: str, path: str, **headers: str) -> bytes:
        """Return a request's head; an empty value removes a header."""
        all_headers = {"Host": "localhost", "Content-Type": "application/json", **headers}
        if self.key:
            all_headers.setdefault("Authorization", f"Bearer {self.key}")
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in all_headers.items() if value]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def request(self, path: str, body: bytes, **headers: str) -> bytes:
        """Return a complete request with a body."""
        return self.head("POST", path, **{"Content-Length": str(len(body)), **headers}) + body


@dataclass(frozen=True)
class Request:
    """A request of a client.

    Args:
        content: bytes of the request.
        needs: the reason for which it must be refused; empty if it may succeed.
        method: method that determines how the response is parsed.
        is_last: the client says that nothing follows; the server may close the connection.
        in_halves: there is a pause in the middle.
        judge: function that replaces sending the request once and reading the response.
    """

    content: bytes
    needs: str = ""
    method: str = "POST"
    is_last: bool = False
    in_halves: bool = False
    judge: Callable[[], Judgement] | None = None


def attack_clients(bench: Bench, random: Random, folder: Path) -> Findings:
    """Send a few hostile requests to a server, then a normal one."""
    server_name = "server with a key" if random.random() < 0.25 else "server"
    server = bench.once(server_name, partial(_start_server, bench, KEY if "key" in server_name else ""))
    log_start, cases = server.service.log.stat().st_size, []
    for _ in range(_CASES):
        name = random.choice(list(_ATTACKS))
        request = _ATTACKS[name](server, random)
        try:
            verdict, detail = request.judge() if request.judge else _send_and_judge(server, request)
        except TimeoutError:
            verdict, detail = Verdict.HUNG, f"no answer within {_SECONDS:.0f} s"
        except ConnectionRefusedError:
            verdict, detail = Verdict.CRASHED, "nobody listens"
        except (OSError, http.client.HTTPException) as error:
            is_refusal = isinstance(error, OSError) and name in _MAY_BE_HUNG_UP_ON
            verdict, detail = Verdict.REFUSED if is_refusal else Verdict.UNEXPLAINED, repr(error)
        cases.append(Case(name, verdict, repr(request.content[:2000]), detail))
    cases.append(_check_afterwards(server, log_start))
    if cases[-1].verdict.is_failure:
        (folder / "server.log").write_text(server.service.output())
        server.service.end()
        bench.results.pop(server_name)
    return cases, Counter({"server requests": len(cases)})


def _start_server(bench: Bench, key: str) -> _Server:
    log = bench.folder / f"server-{len(bench.closers)}.log"
    feedback = bench.folder / f"feedback-{len(bench.closers)}.jsonl"
    runs = bench.folder / f"runs-{len(bench.closers)}"
    (runs / "run").mkdir(parents=True)
    (runs / "run" / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 3.0}\n')
    arguments = [
        "serve",
        bench.workshop.bundle("decoder"),
        "--port",
        0,
        "--threads",
        1,
        "--feedback",
        feedback,
    ]
    arguments += ["--runs", runs]
    service = start_service(log, arguments, "Ctrl-C", **({"PRGE_API_KEY": key} if key else {}))
    bench.closers.append(service.end)
    server = _Server(service, key, int(service.output().split("/v1;")[0].rpartition(":")[2]))
    for path in [*_NORMAL_REQUESTS] * 3:
        _send_normal_request(server, path)
    server.resident = service.memory("VmHWM")
    return server


def _send_normal_request(server: _Server, path: str = _COMPLETIONS) -> Judgement:
    """Send a normal client's request."""
    return _send_and_judge(server, Request(server.request(path, json.dumps(_NORMAL_REQUESTS[path]).encode())))


def _check_afterwards(server: _Server, log_start: int) -> Case:
    """Check that the server is alive, responds at once, has logged no error and hasn't grown."""
    start = time.monotonic()
    try:
        judgements = [_send_normal_request(server, path) for path in _NORMAL_REQUESTS]
    except OSError as error:
        judgements = [(Verdict.HUNG if server.service.is_alive else Verdict.CRASHED, repr(error))]
    seconds, growth = time.monotonic() - start, server.service.memory("VmHWM") - server.resident
    verdict, detail = next((each for each in judgements if each[0] is not Verdict.ACCEPTED), judgements[0])
    if verdict is Verdict.REFUSED:
        verdict = Verdict.UNEXPLAINED
    elif verdict is Verdict.ACCEPTED and (log := server.service.output(log_start)).strip():
        verdict, detail = Verdict.TRACEBACK, log[-3000:]
    elif verdict is Verdict.ACCEPTED and seconds > _PROMPT_SECONDS:
        verdict, detail = Verdict.HUNG, f"it took {seconds:.1f} s"
    elif verdict is Verdict.ACCEPTED and growth > _MAX_GROWTH:
        verdict, detail = Verdict.GREEDY, f"{growth / 1e6:.0f} MB more than at first"
    return Case("a normal request afterwards", verdict, "", detail, memory=max(growth, 0))


class _Bytes:
    """The minimal socket that `http.client` reads a response from."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.makefile = lambda *_: stream


def _send_and_judge(server: _Server, request: Request) -> Judgement:
    """Send a request and judge the response."""
    middle = len(request.content) // 2 if request.in_halves else 0
    with contextlib.closing(server.open()) as connection:
        if middle:
            connection.sendall(request.content[:middle])
            time.sleep(0.01)
        connection.sendall(request.content[middle:])
        stream = connection.makefile("rb")
        if request.is_last:
            connection.shutdown(socket.SHUT_WR)
            if not stream.peek(1):
                return Verdict.REFUSED, "hung up"
        response = http.client.HTTPResponse(_Bytes(stream), method=request.method)  # type: ignore[arg-type]
        response.begin()
        content = response.read()
    return _judge_response(response.status, content, request.needs, request.method)


def _judge_response(status: int, content: bytes, needs: str, method: str) -> Judgement:
    detail = f"{status} {content[:500]!r}"
    if status == 200:
        if needs:
            return Verdict.SILENT, f"{needs}: {detail}"
        return (Verdict.ACCEPTED if method == "HEAD" or _is_result(content) else Verdict.UNEXPLAINED), detail
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if 400 <= status < 500 and (method == "HEAD" or json.loads(content)["error"]["message"]):
            return Verdict.REFUSED, detail
    return Verdict.UNEXPLAINED, detail


def _is_result(content: bytes) -> bool:
    if content.startswith(b"data: "):
        events = content.decode().removesuffix("\n\n").split("\n\n")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        return events[-1] == "data: [DONE]" and all("choices" in each for each in parsed)
    if content.startswith(b"<!doctype html>"):
        return True
    fields = json.loads(content)
    return any(name in fields for name in ("choices", "data", "id", "status", "object"))


def _make_request(random: Random, **changes: Any) -> tuple[str, bytes]:
    path = random.choice(list(_NORMAL_REQUESTS))
    return path, json.dumps({**_NORMAL_REQUESTS[path], **changes}).encode()


def _page(server: _Server, random: Random) -> Request:
    """Send what a web page can, which doesn't choose Host and Origin, nor sends JSON without permission."""
    path, body = _make_request(random)
    local, foreign = random.choice(TABLES["local_hosts"]), random.choice(TABLES["foreign_hosts"])
    scheme, content_type = random.choice(["http://", "https://"]), random.choice(TABLES["content_types"])
    headers, needs = random.choice(
        [
            ({"Host": foreign}, foreign or "no host"),
            ({"Origin": scheme + foreign if foreign else "null"}, foreign or "null"),
            ({"Origin": scheme + local}, ""),
            ({"Content-Type": content_type}, content_type or "no content type"),
            ({"Origin": "http://localhost", "origin": "http://evil.example"}, "two origins"),
        ]
    )
    return Request(server.request(path, body, **{"Host": local, **headers}), needs)


def _garbage(server: _Server, random: Random) -> Request:
    """Send a body that is not JSON, or not a valid request."""
    path, body = _make_request(random)
    if random.random() < 0.125:
        changed = bytearray(body)
        for _ in range(random.randint(1, 8)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        return Request(server.request(path, bytes(changed)))  # the result may still be a valid request
    number = random.choice([b"NaN", b"Infinity", b"-Infinity", b"9" * 5000])
    garbage = [
        body[: random.randrange(len(body))],
        random.randbytes(random.randint(0, 2000)),
        random.choice([b"[", b'{"a":']) * random.randint(33, 12_000),
        body.decode().encode(random.choice(["utf-16", "utf-32"])),
        json.dumps(random.choice(TABLES["strange"])).encode(),
        body[:-1] + b',"temperature":' + number + b"}",
        body[:-1] + b',"stop":"\\ud800"}',
    ]
    return Request(server.request(path, random.choice(garbage)), "no request")


def _field(server: _Server, random: Random) -> Request:
    """Send a field with a strange value, often of a wrong type."""
    name = random.choice([*TABLES["types"], "stream", "metadata", "user", "logprobs", "colour"])
    value = random.choice(TABLES["strange"])
    path = {"messages": _CHAT, "prompt": _COMPLETIONS}.get(name) or random.choice([*_NORMAL_REQUESTS])
    body = json.dumps({**_NORMAL_REQUESTS[path], name: value}).encode()
    types = TABLES["types"].get(name, "").split()
    wrong = types and value is not None and type(value).__name__ not in types
    return Request(server.request(path, body), f"{name} is {value!r}" if wrong else "")


def _extreme_values(server: _Server, random: Random) -> Request:
    """Send numbers, lists and bodies that are far too large."""
    path, body = _make_request(random, **random.choice(_EXTREME_VALUES))
    if random.random() >= 0.3:
        return Request(server.request(path, body))
    count = random.choice([1000, 20_000, 200_000, 3_000_000])
    many: list[tuple[str, dict[str, Any]]] = [
        (_CHAT, {"messages": [{"role": "user", "content": "a" * count}]}),
        (_CHAT, {"messages": [{"role": "user", "content": "a"}] * (count // 30)}),
        (_COMPLETIONS, {"prompt": "a" * count}),
        (_COMPLETIONS, {"prompt": [5] * (count // 3)}),
        (_COMPLETIONS, {"prompt": ["a"] * (count // 5)}),
    ]
    path, long = random.choice(many)
    return Request(server.request(path, json.dumps({**_NORMAL_REQUESTS[path], **long}).encode()), "too long")


def _head(server: _Server, random: Random) -> Request:
    """Send an incomplete head, garbage, or contradictory headers."""
    path, body = _make_request(random)
    whole = server.request(path, body)
    version = random.choice([b"HTTP/9.9", b"HTTP/1.0", b"HTTP/2", b"", b"HTTP/1.1 x"])
    headers: list[dict[str, str]] = [
        {"X": "a" * random.choice([1000, 20_000, 200_000])},
        {f"X-{number}": "a" for number in range(2000)},
        {"Transfer_Encoding": "chunked"},
        {"content-length": "5"},
        {"Content-Length": random.choice(_LENGTHS)},
        {"Upgrade": "websocket", "Connection": "Upgrade"},
        {"Expect": random.choice(["100-continue", "a miracle"])},
        {"Content_Encoding": "gzip"},
    ]
    requests = [
        whole[: random.randrange(1, whole.index(b"\r\n\r\n"))],
        random.randbytes(random.randint(1, 500)) + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(32),
        whole.replace(b"HTTP/1.1", version),
        *(server.request(path, body, **more) for more in headers),
        whole.replace(b"Host: localhost\r\n", random.choice([b"", b"Host: localhost\r\nHost: evil\r\n"])),
        whole.replace(b"POST", random.choice(_METHODS)),
        whole.replace(b"\r\n", b"\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    request = random.choice(requests)
    return Request(request, method="HEAD" if request.startswith(b"HEAD") else "POST", is_last=True)


def _slow(server: _Server, random: Random) -> Request:
    """Send a body that stops in the middle, and check that other clients are served."""
    path, body = _make_request(random)
    request = server.request(path, body, **{"Content-Length": str(random.choice([len(body), 60_000]))})
    request = request[: random.randrange(len(request) - len(body), len(request) - 1)]
    return _hold_connections(server, request, random.choice([1, 5, 30]))


def _crowd(server: _Server, random: Random) -> Request:
    """Open more connections than the server accepts, all of which wait."""
    head = random.choice([b"", b"GET /health HTTP/1.1\r\n", server.head("POST", _CHAT, Content_Length="9")])
    return _hold_connections(server, head, random.choice([20, 300]), OSError)


def _hold_connections(server: _Server, content: bytes, count: int, *ignored: type[Exception]) -> Request:
    """Return a request that holds open connections while another client sends a request."""

    def judge() -> Judgement:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(contextlib.closing(server.open()))
                with contextlib.suppress(*ignored):
                    connection.sendall(content)
            return _check_other_client(server)

    return Request(content, judge=judge)


def _check_other_client(server: _Server) -> Judgement:
    """Check that another client gets a response soon, or that the server is busy."""
    start = time.monotonic()
    verdict, detail = _send_normal_request(server)
    if verdict is Verdict.REFUSED and detail.startswith("429"):
        return verdict, detail
    if time.monotonic() - start > _PROMPT_SECONDS:
        return Verdict.HUNG, detail
    return (verdict if verdict is Verdict.ACCEPTED else Verdict.UNEXPLAINED), detail


def _pipeline(server: _Server, random: Random) -> Request:
    """Send several requests at once on a connection, with garbage among them."""
    variants = [server.request(*_make_request(random)), server.head("GET", "/health"), b"\0\0\r\n\r\n"]
    requests = random.choices(variants, [6, 3, 1], k=random.randint(2, 12))
    request = b"".join(requests) + server.head("GET", "/health", Connection="close")

    def judge() -> Judgement:
        with contextlib.closing(server.open()) as connection:
            connection.sendall(request)
            content = connection.makefile("rb").read()
        statuses = [part[:3] for part in content.split(b"HTTP/1.1 ")[1:]]
        is_whole = statuses and all(status in (b"200", b"400", b"429") for status in statuses)
        return (Verdict.ACCEPTED if is_whole else Verdict.UNEXPLAINED), repr(statuses)

    return Request(request, judge=judge)


def _chunks(server: _Server, random: Random) -> Request:
    """Send a body in chunks, of which some are malformed."""
    path, body = _make_request(random)
    cut = random.randrange(len(body))
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part]
    if random.random() < 0.7:
        chunks.insert(random.randint(0, len(chunks)), random.choice(_CHUNKS))
    head = server.head("POST", random.choice([path, path, "/nothing"]), Transfer_Encoding="chunked")
    return Request(head + b"".join(chunks) + b"0\r\n\r\n", is_last=True, in_halves=True)


def _leaving(server: _Server, random: Random) -> Request:
    """Disconnect in the middle of a stream or before an answer."""
    path, body = _make_request(random, stream=random.random() < 0.7, max_tokens=1000, n=random.choice([1, 8]))
    request = server.request(path, body)

    def judge() -> Judgement:
        for _ in range(random.choice([1, 4, 20])):
            with contextlib.closing(server.open()) as connection:
                connection.sendall(request)
                if random.random() < 0.5:
                    connection.recv(random.choice([1, 100]))
                if random.random() < 0.5:  # a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return _check_other_client(server)

    return Request(request, judge=judge)


def _path(server: _Server, random: Random) -> Request:
    """Request paths outside the server's API."""
    method = random.choice(["GET", "GET", "POST", "HEAD", "DELETE"])
    request = server.head(
        method, random.choice(TABLES["paths"]), Content_Length="2" if method == "POST" else ""
    )
    return Request(request + (b"{}" if method == "POST" else b""), method=method)


def _runs(server: _Server, random: Random) -> Request:
    """Request invalid, missing or finished runs, also from a web page."""
    foreign = random.choice(TABLES["foreign_hosts"])
    pages = [{"Host": foreign}, {"Origin": f"http://{foreign}"}, {"Sec_Fetch_Site": "cross-site"}]
    path, headers = f"run={random.choice(TABLES['runs'])}", random.choice([{}, *pages])
    if random.random() < 0.5:
        return Request(server.head("GET", f"/v1/runs/events?{path}", **headers), "no run", "GET")
    stopped = random.choice([path, "run=run"])
    return Request(server.request(f"/v1/runs/stop?{stopped}", b"{}", **headers), "no run that goes on")


def _event_streams(server: _Server, random: Random) -> Request:
    """Open more event streams of a run than the server accepts, from clients that read nothing."""
    return _hold_connections(
        server, server.head("GET", "/v1/runs/events?run=run"), random.choice([1, 16, 40])
    )


def _feedback(server: _Server, random: Random) -> Request:
    """Send feedback on a completion: strange, far too long, or twice."""
    completion_request = server.request(_COMPLETIONS, json.dumps(_NORMAL_REQUESTS[_COMPLETIONS]).encode())
    name = random.choice(["id", "index", "rating", "correction", "file"])
    value = random.choice([*TABLES["strange"], "a" * random.choice([1, 100_000, 3_000_000]), "\0", "good"])

    def judge() -> Judgement:
        with contextlib.closing(server.open()) as connection:
            connection.sendall(completion_request)
            response = http.client.HTTPResponse(connection)
            response.begin()
            fields = {"id": json.loads(response.read())["id"], name: value}
        if name != "correction":
            fields.setdefault("rating", "good")
        request = Request(server.request(_FEEDBACK, json.dumps(fields).encode()))
        first, again = _send_and_judge(server, request), _send_and_judge(server, request)
        return again if again[0] is not Verdict.REFUSED else first

    return Request(f"{name}: {value!r}"[:2000].encode(errors="replace"), judge=judge)


def _key(server: _Server, random: Random) -> Request:
    """Send a missing, nearly correct, long or strange key."""
    authorization = random.choice([*TABLES["keys"], "Bearer {key}"]).format(key=KEY)
    path, body = _make_request(random)
    needs = f"the key {authorization!r}" if server.key and authorization != f"Bearer {KEY}" else ""
    return Request(server.request(path, body, Authorization=authorization), needs)


_ATTACKS: dict[str, Callable[[_Server, Random], Request]] = {
    "a page of the web": _page,
    "a body of garbage": _garbage,
    "a field of a wrong type": _field,
    "far too much": _extreme_values,
    "a strange head": _head,
    "bodies that stop": _slow,
    "feedback": _feedback,
    "a pipeline": _pipeline,
    "broken chunks": _chunks,
    "clients that leave": _leaving,
    "a crowd": _crowd,
    "a strange path": _path,
    "a run that is none": _runs,
    "a crowd that looks at a run": _event_streams,
    "a wrong key": _key,
}
# They are no requests, or go on while they are refused.
_MAY_BE_HUNG_UP_ON = ("far too much", "a strange head", "a pipeline", "broken chunks")
