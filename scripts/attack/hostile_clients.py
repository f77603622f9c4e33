"""Hostile clients and pages of the web against a real `prge serve`: what they send, and what a server says.

Every call sends a handful of requests to a server that goes on from call to call, and asks it afterwards
what a normal client would. An answer is a valid one, or an error in OpenAI's form with a status of 4xx; what
is no request at all may be hung up on.
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

from outcome import Case, Found, Verdict
from service import Service, serving
from tables import TABLES
from workshop import Bench

KEY = "an-api-key-of-the-attack"
_CASES = 20
_SECONDS, _PROMPT_SECONDS = 15.0, 5.0
# Beyond what the server has after its first answers.
_MOST_GROWTH = 64 << 20
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FEEDBACK = "/v1/feedback"
_ASKED: dict[str, dict[str, Any]] = {
    _CHAT: {"model": "base", "messages": [{"role": "user", "content": "aa"}], "max_tokens": 2},
    _COMPLETIONS: {"model": "base", "prompt": "aa", "max_tokens": 2},
}
_BEYOND: list[dict[str, Any]] = [
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
Told = tuple[Verdict, str]


@dataclass
class _Server:
    """A running server, and what it took after its first answers."""

    service: Service
    key: str
    port: int
    resident: int = 0

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_SECONDS)

    def head(self, method: str, path: str, **headers: str) -> bytes:
        """A request's head; an empty value leaves a header out."""
        given = {"Host": "localhost", "Content-Type": "application/json", **headers}
        if self.key:
            given.setdefault("Authorization", f"Bearer {self.key}")
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def request(self, path: str, body: bytes, **headers: str) -> bytes:
        """A whole request with a body."""
        return self.head("POST", path, **{"Content-Length": str(len(body)), **headers}) + body


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Args:
        content: bytes of it.
        needs: what it must be refused for; empty if it may be answered.
        method: by which its answer is read.
        is_last: the client says that nothing follows; it may be hung up on.
        in_halves: there is a pause in its middle.
        judged: instead of sending it once and reading the answer.
    """

    content: bytes
    needs: str = ""
    method: str = "POST"
    is_last: bool = False
    in_halves: bool = False
    judged: Callable[[], Told] | None = None


def attack_clients(bench: Bench, random: Random, folder: Path) -> Found:
    """Send a handful of hostile requests to a server, then ask as everybody does."""
    kind = "server with a key" if random.random() < 0.25 else "server"
    server = bench.once(kind, partial(_started, bench, KEY if "key" in kind else ""))
    begun, cases = server.service.log.stat().st_size, []
    for _ in range(_CASES):
        name = random.choice(list(_ATTACKS))
        request = _ATTACKS[name](server, random)
        try:
            verdict, told = request.judged() if request.judged else _judged(server, request)
        except TimeoutError:
            verdict, told = Verdict.HUNG, f"no answer within {_SECONDS:.0f} s"
        except ConnectionRefusedError:
            verdict, told = Verdict.CRASHED, "nobody listens"
        except (OSError, http.client.HTTPException) as error:
            is_refusal = isinstance(error, OSError) and name in _MAY_BE_HUNG_UP_ON
            verdict, told = Verdict.REFUSED if is_refusal else Verdict.UNEXPLAINED, repr(error)
        cases.append(Case(name, verdict, repr(request.content[:2000]), told))
    cases.append(_afterwards(server, begun))
    if cases[-1].verdict.is_failure:
        (folder / "server.log").write_text(server.service.told())
        server.service.end()
        bench.results.pop(kind)
    return cases, Counter({"server requests": len(cases)})


def _started(bench: Bench, key: str) -> _Server:
    log = bench.folder / f"server-{len(bench.closers)}.log"
    kept = bench.folder / f"feedback-{len(bench.closers)}.jsonl"
    runs = bench.folder / f"runs-{len(bench.closers)}"
    (runs / "run").mkdir(parents=True)
    (runs / "run" / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 3.0}\n')
    words = ["serve", bench.workshop.bundle("decoder"), "--port", 0, "--threads", 1, "--feedback", kept]
    words += ["--runs", runs]
    service = serving(log, words, "Ctrl-C", **({"PRGE_API_KEY": key} if key else {}))
    bench.closers.append(service.end)
    server = _Server(service, key, int(service.told().split("/v1;")[0].rpartition(":")[2]))
    for path in [*_ASKED] * 3:
        _asked_by_all(server, path)
    server.resident = service.memory("VmHWM")
    return server


def _asked_by_all(server: _Server, path: str = _COMPLETIONS) -> Told:
    """What a normal client asks."""
    return _judged(server, Request(server.request(path, json.dumps(_ASKED[path]).encode())))


def _afterwards(server: _Server, begun: int) -> Case:
    """Whether the server is as it was: it lives, answers at once, told of no mistake, and is no larger."""
    start = time.monotonic()
    try:
        found = [_asked_by_all(server, path) for path in _ASKED]
    except OSError as error:
        found = [(Verdict.HUNG if server.service.is_alive else Verdict.CRASHED, repr(error))]
    seconds, growth = time.monotonic() - start, server.service.memory("VmHWM") - server.resident
    verdict, told = next((each for each in found if each[0] is not Verdict.ACCEPTED), found[0])
    if verdict is Verdict.REFUSED:
        verdict = Verdict.UNEXPLAINED
    elif verdict is Verdict.ACCEPTED and (log := server.service.told(begun)).strip():
        verdict, told = Verdict.TRACEBACK, log[-3000:]
    elif verdict is Verdict.ACCEPTED and seconds > _PROMPT_SECONDS:
        verdict, told = Verdict.HUNG, f"it took {seconds:.1f} s"
    elif verdict is Verdict.ACCEPTED and growth > _MOST_GROWTH:
        verdict, told = Verdict.GREEDY, f"{growth / 1e6:.0f} MB more than at first"
    return Case("a normal request afterwards", verdict, "", told, memory=max(growth, 0))


class _Bytes:
    """What `http.client` reads an answer from."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.makefile = lambda *_: stream


def _judged(server: _Server, request: Request) -> Told:
    """Send a request and judge the answer."""
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
        answer = http.client.HTTPResponse(_Bytes(stream), method=request.method)  # type: ignore[arg-type]
        answer.begin()
        content = answer.read()
    return _of_answer(answer.status, content, request.needs, request.method)


def _of_answer(status: int, content: bytes, needs: str, method: str) -> Told:
    told = f"{status} {content[:500]!r}"
    if status == 200:
        if needs:
            return Verdict.SILENT, f"{needs}: {told}"
        return (Verdict.ACCEPTED if method == "HEAD" or _is_answer(content) else Verdict.UNEXPLAINED), told
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if 400 <= status < 500 and (method == "HEAD" or json.loads(content)["error"]["message"]):
            return Verdict.REFUSED, told
    return Verdict.UNEXPLAINED, told


def _is_answer(content: bytes) -> bool:
    if content.startswith(b"data: "):
        events = content.decode().removesuffix("\n\n").split("\n\n")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        return events[-1] == "data: [DONE]" and all("choices" in each for each in parsed)
    if content.startswith(b"<!doctype html>"):
        return True
    found = json.loads(content)
    return any(name in found for name in ("choices", "data", "id", "status", "object"))


def _asked(random: Random, **changes: Any) -> tuple[str, bytes]:
    path = random.choice(list(_ASKED))
    return path, json.dumps({**_ASKED[path], **changes}).encode()


def _page(server: _Server, random: Random) -> Request:
    """A page of the web, which can't choose its Host and Origin, nor say JSON unasked."""
    path, body = _asked(random)
    local, foreign = random.choice(TABLES["local_hosts"]), random.choice(TABLES["foreign_hosts"])
    scheme, kind = random.choice(["http://", "https://"]), random.choice(TABLES["content_types"])
    headers, needs = random.choice(
        [
            ({"Host": foreign}, foreign or "no host"),
            ({"Origin": scheme + foreign if foreign else "null"}, foreign or "null"),
            ({"Origin": scheme + local}, ""),
            ({"Content-Type": kind}, kind or "no content type"),
            ({"Origin": "http://localhost", "origin": "http://evil.example"}, "two origins"),
        ]
    )
    return Request(server.request(path, body, **{"Host": local, **headers}), needs)


def _garbage(server: _Server, random: Random) -> Request:
    """A body that is no JSON, or no request."""
    path, body = _asked(random)
    if random.random() < 0.125:
        changed = bytearray(body)
        for _ in range(random.randint(1, 8)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        return Request(server.request(path, bytes(changed)))  # it may still be a request
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
    """A field with a strange value, and often of a wrong type."""
    name = random.choice([*TABLES["types"], "stream", "metadata", "user", "logprobs", "colour"])
    value = random.choice(TABLES["strange"])
    path = {"messages": _CHAT, "prompt": _COMPLETIONS}.get(name) or random.choice([*_ASKED])
    body = json.dumps({**_ASKED[path], name: value}).encode()
    kinds = TABLES["types"].get(name, "").split()
    wrong = kinds and value is not None and type(value).__name__ not in kinds
    return Request(server.request(path, body), f"{name} is {value!r}" if wrong else "")


def _beyond(server: _Server, random: Random) -> Request:
    """Numbers, lists and bodies far beyond what anybody needs."""
    path, body = _asked(random, **random.choice(_BEYOND))
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
    return Request(server.request(path, json.dumps({**_ASKED[path], **long}).encode()), "too long")


def _head(server: _Server, random: Random) -> Request:
    """Half a head, a head of garbage, contradictions."""
    path, body = _asked(random)
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
    """A body that stops on its way; others are answered meanwhile."""
    path, body = _asked(random)
    request = server.request(path, body, **{"Content-Length": str(random.choice([len(body), 60_000]))})
    request = request[: random.randrange(len(request) - len(body), len(request) - 1)]
    return _held(server, request, random.choice([1, 5, 30]))


def _crowd(server: _Server, random: Random) -> Request:
    """More connections than there are places, all of which wait."""
    begun = random.choice([b"", b"GET /health HTTP/1.1\r\n", server.head("POST", _CHAT, Content_Length="9")])
    return _held(server, begun, random.choice([20, 300]), OSError)


def _held(server: _Server, content: bytes, count: int, *ignored: type[Exception]) -> Request:
    """Connections that begin a request and wait, while another client asks."""

    def judged() -> Told:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(contextlib.closing(server.open()))
                with contextlib.suppress(*ignored):
                    connection.sendall(content)
            return _meanwhile(server)

    return Request(content, judged=judged)


def _meanwhile(server: _Server) -> Told:
    """What another client gets: an answer soon, or that the server is busy."""
    begun = time.monotonic()
    verdict, told = _asked_by_all(server)
    if verdict is Verdict.REFUSED and told.startswith("429"):
        return verdict, told
    if time.monotonic() - begun > _PROMPT_SECONDS:
        return Verdict.HUNG, told
    return (verdict if verdict is Verdict.ACCEPTED else Verdict.UNEXPLAINED), told


def _pipeline(server: _Server, random: Random) -> Request:
    """Several requests at once on a connection, with garbage among them."""
    kinds = [server.request(*_asked(random)), server.head("GET", "/health"), b"\0\0\r\n\r\n"]
    requests = random.choices(kinds, [6, 3, 1], k=random.randint(2, 12))
    request = b"".join(requests) + server.head("GET", "/health", Connection="close")

    def judged() -> Told:
        with contextlib.closing(server.open()) as connection:
            connection.sendall(request)
            content = connection.makefile("rb").read()
        statuses = [part[:3] for part in content.split(b"HTTP/1.1 ")[1:]]
        is_whole = statuses and all(status in (b"200", b"400", b"429") for status in statuses)
        return (Verdict.ACCEPTED if is_whole else Verdict.UNEXPLAINED), repr(statuses)

    return Request(request, judged=judged)


def _chunks(server: _Server, random: Random) -> Request:
    """A body in chunks, of which some are none."""
    path, body = _asked(random)
    cut = random.randrange(len(body))
    pieces = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part]
    if random.random() < 0.7:
        pieces.insert(random.randint(0, len(pieces)), random.choice(_CHUNKS))
    head = server.head("POST", random.choice([path, path, "/nothing"]), Transfer_Encoding="chunked")
    return Request(head + b"".join(pieces) + b"0\r\n\r\n", is_last=True, in_halves=True)


def _leaving(server: _Server, random: Random) -> Request:
    """Clients that leave in the middle of a stream or before an answer."""
    path, body = _asked(random, stream=random.random() < 0.7, max_tokens=1000, n=random.choice([1, 8]))
    request = server.request(path, body)

    def judged() -> Told:
        for _ in range(random.choice([1, 4, 20])):
            with contextlib.closing(server.open()) as connection:
                connection.sendall(request)
                if random.random() < 0.5:
                    connection.recv(random.choice([1, 100]))
                if random.random() < 0.5:  # a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return _meanwhile(server)

    return Request(request, judged=judged)


def _path(server: _Server, random: Random) -> Request:
    """Paths that lead elsewhere."""
    method = random.choice(["GET", "GET", "POST", "HEAD", "DELETE"])
    request = server.head(
        method, random.choice(TABLES["paths"]), Content_Length="2" if method == "POST" else ""
    )
    return Request(request + (b"{}" if method == "POST" else b""), method=method)


def _runs(server: _Server, random: Random) -> Request:
    """Runs that are none, not here, or not running; pages of the web ask, too."""
    foreign = random.choice(TABLES["foreign_hosts"])
    pages = [{"Host": foreign}, {"Origin": f"http://{foreign}"}, {"Sec_Fetch_Site": "cross-site"}]
    path, headers = f"run={random.choice(TABLES['runs'])}", random.choice([{}, *pages])
    if random.random() < 0.5:
        return Request(server.head("GET", f"/v1/runs/events?{path}", **headers), "no run", "GET")
    stopped = random.choice([path, "run=run"])
    return Request(server.request(f"/v1/runs/stop?{stopped}", b"{}", **headers), "no run that goes on")


def _lookers(server: _Server, random: Random) -> Request:
    """More looks at a run than there are places, by who reads nothing."""
    return _held(server, server.head("GET", "/v1/runs/events?run=run"), random.choice([1, 16, 40]))


def _feedback(server: _Server, random: Random) -> Request:
    """What is said of an answer: strange, far too long, and twice."""
    asked = server.request(_COMPLETIONS, json.dumps(_ASKED[_COMPLETIONS]).encode())
    name = random.choice(["id", "index", "rating", "correction", "file"])
    value = random.choice([*TABLES["strange"], "a" * random.choice([1, 100_000, 3_000_000]), "\0", "good"])

    def judged() -> Told:
        with contextlib.closing(server.open()) as connection:
            connection.sendall(asked)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            fields = {"id": json.loads(answer.read())["id"], name: value}
        if name != "correction":
            fields.setdefault("rating", "good")
        request = Request(server.request(_FEEDBACK, json.dumps(fields).encode()))
        first, again = _judged(server, request), _judged(server, request)
        return again if again[0] is not Verdict.REFUSED else first

    return Request(f"{name}: {value!r}"[:2000].encode(errors="replace"), judged=judged)


def _key(server: _Server, random: Random) -> Request:
    """A key that is none, nearly right, long, or strange."""
    given = random.choice([*TABLES["keys"], "Bearer {key}"]).format(key=KEY)
    path, body = _asked(random)
    needs = f"the key {given!r}" if server.key and given != f"Bearer {KEY}" else ""
    return Request(server.request(path, body, Authorization=given), needs)


_ATTACKS: dict[str, Callable[[_Server, Random], Request]] = {
    "a page of the web": _page,
    "a body of garbage": _garbage,
    "a field of a wrong type": _field,
    "far too much": _beyond,
    "a strange head": _head,
    "bodies that stop": _slow,
    "feedback": _feedback,
    "a pipeline": _pipeline,
    "broken chunks": _chunks,
    "clients that leave": _leaving,
    "a crowd": _crowd,
    "a strange path": _path,
    "a run that is none": _runs,
    "a crowd that looks at a run": _lookers,
    "a wrong key": _key,
}
# They are no requests, or go on while they are refused.
_MAY_BE_HUNG_UP_ON = ("far too much", "a strange head", "a pipeline", "broken chunks")
