"""A real fleet server over TLS against hostile devices and strangers, many cases each.

One device is honest, two have keys and lie, and the strangers have no key. After every batch the round must
still end with the honest result, the process must live within its memory, and its logs must hold no
unexpected error.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from outcome import Case, Findings, Verdict
from service import Service, start_service
from tables import TABLES
from workshop import Bench

from device_runner.fleet.agreement import Agreement
from device_runner.fleet.messages import RoundResult, RoundTask, TaskRefusal
from device_runner.fleet.network.keys import make_keys
from tests.device_runner.fleet.network.enemy import HostileDevice, PulledTask, garbage, object_of

HONEST, LIARS = "honest", ("liar1", "liar2")
# Maximum growth of the server's resident memory during the attack.
MAX_GROWTH = 96 << 20
_ROUND_SECONDS, _PATIENCE = 6.0, 60.0
_CASES = 96
_PATHS = ("/", "/docs", "/openapi.json", "/health", "/v1/control/start-run", "/v1/runtime/acquire-task")
_FLEET = "/v1/fleet/"
_VERBS = ("push-object", "push-messages", "pull-messages", "activate-node", "register-node", "get-fab")
_LENGTHS = (10**6, 10**7, 10**12, 10**30, -1)
_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
_CALLS = ("PushMessages", "PullMessages", "PushObject", "PullObject", "GetRun", "GetFab", "ActivateNode")


def attack_a_fleets_server(bench: Bench, random: Random, folder: Path) -> Findings:
    """Attack a fleet's server; every message is one case."""
    cases: list[Case] = []
    with _start_server(bench, folder) as server:
        scene = Scene(server, random, folder)
        scene.run_round([])
        scene.run_round([])
        before = server.service.memory()
        while len(cases) < _CASES:
            names = [scene.pester(*random.choice(list(STRANGERS.items()))) for _ in range(10)]
            lies = [random.choice(list(LIES.items())) for _ in scene.liars]
            problem = scene.run_round([lie for _, lie in lies])
            names += [f"a device: {name}" for name, _ in lies]
            output = server.output()
            if not server.service.is_alive:
                problem = Verdict.CRASHED
            elif "Traceback" in output or "Exception" in output:
                problem = Verdict.TRACEBACK
            elif server.service.memory() - before > MAX_GROWTH:
                problem = Verdict.GREEDY
            tail = output[-3000:] if problem else ""
            cases += [Case(name, problem or Verdict.REFUSED, "prge fleet serve", tail) for name in names]
            if problem:
                break
        grown = max(0, server.service.memory() - before) >> 20
        scene.close()
    return cases, Counter({"server_rounds": scene.rounds, f"server_grew_by_{grown // 16 * 16}_mb": 1})


@dataclass(frozen=True)
class Server:
    """A running `prge fleet serve` with its folder and keys."""

    service: Service
    folder: Path
    keys: Path
    address: str

    def output(self) -> str:
        """Return Flower's log and the printed output."""
        log = self.folder / "fleet" / "flower" / "superlink.log"
        return (log.read_text(errors="replace") if log.exists() else "") + "\n" + self.service.output()


@contextmanager
def _start_server(bench: Bench, folder: Path) -> Iterator[Server]:
    keys = folder / "keys"
    make_keys(keys, [], [HONEST, *LIARS])
    arguments = ["--bundle", bench.workshop.bundle(bench.workshop.bundle_types[0]), "--out", folder / "fleet"]
    arguments += ["--keys", keys / "server", "--port", 0, "--rounds", 100_000, "--local-steps", 1]
    arguments += ["--seconds", _ROUND_SECONDS, "--wait-for", 1, "--combine", "trimmed"]
    service = start_service(folder / "server.txt", ["fleet", "serve", *arguments], "listening at")
    try:
        yield Server(service, folder, keys, service.output().partition("listening at ")[2].partition(" ")[0])
    finally:
        service.end()


@dataclass
class Scene:
    """The devices and strangers that talk to a server."""

    server: Server
    random: Random
    folder: Path
    rounds: int = 0
    held: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = self.server.keys / "devices"
        self.honest, *self.liars = (
            HostileDevice(self.server.address, keys / name) for name in (HONEST, *LIARS)
        )
        self.agreements: dict[bytes, Agreement] = {}

    def close(self) -> None:
        """Close all connections."""
        for each in (*self.held, self.honest.client, *(liar.client for liar in self.liars)):
            each.close()

    def pester(self, name: str, stranger: Callable[[Scene], None]) -> str:
        """Send hostile bytes as a stranger; return the name of the case."""
        with contextlib.suppress(OSError):
            stranger(self)
        while len(self.held) > 300:
            self.held.pop(0).close()
        return f"a stranger: {name}"

    def run_round(self, lies: Sequence[Lie]) -> Verdict | None:
        """Let liars lie and the honest device reply; return the verdict if the round doesn't end."""
        before, deadline, has_replied = self._count_rounds(), time.monotonic() + _PATIENCE, False
        waiting = list(zip(self.liars, lies, strict=False))
        while time.monotonic() < deadline:
            for liar, lie in list(waiting):
                with contextlib.suppress(httpx.HTTPError, OSError):
                    if (task := liar.pull()) is not None:
                        waiting.remove((liar, lie))
                        lie(self, liar, task)
            try:
                if (task := self.honest.pull()) is not None:
                    self.honest.push(self.honest.reply(task, self.honest_result(task).to_bytes()))
                    has_replied = True
            except httpx.HTTPStatusError:
                continue  # the round's time is over
            except (httpx.TransportError, OSError):
                if not self.server.service.is_alive:
                    return Verdict.CRASHED
            if has_replied and self._count_rounds() > before:
                self.rounds += 1
                return None
            time.sleep(0.05)
        return Verdict.HUNG

    def _count_rounds(self) -> int:
        lines = self.server.service.output().splitlines()
        return sum(line.startswith("round ") and " 0 answers" not in line for line in lines)

    def honest_result(self, pulled: PulledTask) -> RoundResult:
        """Return the result that an honest device could send."""
        task = RoundTask.parse(pulled.content)
        if task.agreement:
            self.agreements[task.sha256] = Agreement.parse(task.agreement)
        plan = self.agreements[task.sha256].plan
        count = plan.local_steps * int(np.prod(plan.shape))
        values = np.array([self.random.gauss(0, 0.1) for _ in range(count)], np.float32)
        losses = np.full(plan.local_steps, 0.7, np.float32)
        examples = plan.examples * plan.local_steps
        return RoundResult(task.sha256, task.number, task.step, examples, 0.0, losses, values)

    def open(self) -> socket.socket:
        """Open a connection without TLS."""
        host, port = self.server.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), 5)

    def secure(self) -> ssl.SSLSocket:
        """Open a connection with TLS."""
        context = ssl.create_default_context(cafile=str(self.server.keys / "server" / "ca.pem"))
        return context.wrap_socket(self.open(), server_hostname="127.0.0.1")

    def send(self, content: bytes) -> None:
        """Send bytes over TLS, and read a little."""
        with self.secure() as connection:
            connection.settimeout(2)
            connection.sendall(content)
            connection.recv(100)

    def head(self, verb: str = "", method: str = "POST", path: str = "", **headers: object) -> bytes:
        """Return the head of a request to a verb, by default to a random one."""
        path = path or _FLEET + (verb or self.random.choice(_VERBS))
        lines = [f"{method} {path} HTTP/1.1", "host: x"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def hold(self, connection: socket.socket, content: bytes) -> None:
        """Send bytes on a connection and keep it open."""
        connection.sendall(content)
        self.held.append(connection)

    def noise(self, max_size: int = 4000) -> bytes:
        """Return random bytes."""
        return self.random.randbytes(self.random.randint(0, max_size))


Lie = Callable[[Scene, HostileDevice, PulledTask], None]
Stranger = Callable[[Scene], None]


def _change_result(change: Callable[[Scene, RoundResult], bytes | RoundResult | TaskRefusal]) -> Lie:
    """Return a lie that changes a result."""

    def lie(scene: Scene, liar: HostileDevice, task: PulledTask) -> None:
        reply = change(scene, scene.honest_result(task))
        liar.push(liar.reply(task, reply if isinstance(reply, bytes) else reply.to_bytes()))

    return lie


def _change_fields(**changes: Callable[[Random], Any]) -> Lie:
    """Return a lie that changes fields of a result."""
    return _change_result(
        lambda scene, answer: replace(answer, **{name: make(scene.random) for name, make in changes.items()})
    )


def _change_values(make: Callable[[Random, np.ndarray], object]) -> Lie:
    def change(scene: Scene, answer: RoundResult) -> RoundResult:
        with np.errstate(over="ignore"):
            return replace(answer, values=np.asarray(make(scene.random, answer.values), np.float32))

    return _change_result(change)


def _damaged(scene: Scene, answer: RoundResult) -> bytes:
    content = bytearray(answer.to_bytes())
    for _ in range(scene.random.randint(1, 8)):
        content[scene.random.randrange(len(content))] = scene.random.randrange(256)
    return bytes(content[: scene.random.choice([len(content), scene.random.randint(0, len(content))])])


def _objects(make: Callable[[Scene], Sequence[bytes]]) -> Lie:
    return lambda scene, liar, task: liar.push_objects(task, make(scene))


def _call(scene: Scene, liar: HostileDevice, task: PulledTask) -> None:
    """Send garbage to one of Flower's handlers."""
    name = scene.random.choice(_CALLS)
    path = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).strip("-")
    client, headers = liar.client._client, {"content-type": "application/x-protobuf"}
    address = f"https://{scene.server.address}{_FLEET}{path}"
    request = client.build_request("POST", address, content=scene.noise(), headers=headers)
    for interceptor in liar.client._interceptors:
        context = type("Context", (), {"request": request, "rpc_method": f"/flwr.proto.Fleet/{name}"})
        interceptor.intercept(context, lambda _: httpx.Response(200))
    client.send(request)
    liar.push(liar.reply(task, b""))


def _repeat_result(scene: Scene, liar: HostileDevice, task: PulledTask) -> None:
    message = liar.reply(task, scene.honest_result(task).to_bytes())
    for _ in range(12):
        liar.push(message)


def _forge_fields(**changes: object) -> Lie:
    def lie(scene: Scene, liar: HostileDevice, task: PulledTask) -> None:
        forged = {name: value(scene) if callable(value) else value for name, value in changes.items()}
        with contextlib.suppress(httpx.HTTPStatusError):
            liar.push(liar.reply(task, scene.honest_result(task).to_bytes(), **forged))
        liar.push(liar.reply(task, b""))

    return lie


LIES: dict[str, Lie] = {
    "huge values": _change_values(lambda random, values: values * 10.0 ** random.randint(1, 38)),
    "not numbers": _change_values(
        lambda random, values: np.full_like(values, random.choice([np.nan, np.inf, -np.inf]))
    ),
    "a constant": _change_values(lambda random, values: np.full_like(values, random.uniform(-1e6, 1e6))),
    "zeros": _change_values(lambda random, values: values * 0),
    "the opposite": _change_values(lambda random, values: -values),
    "another count of values": _change_values(lambda random, values: np.ones(random.randint(0, 5000))),
    "examples": _change_fields(examples=lambda random: random.getrandbits(32)),
    "a loss": _change_fields(
        losses=lambda random: np.full(1, random.choice([9999, -9999, np.nan, 1e38]), "f4")
    ),
    "an epsilon": _change_fields(privacy_epsilon=lambda random: random.choice([-1, np.inf, np.nan])),
    "another round": _change_fields(number=lambda random: random.getrandbits(32)),
    "another step": _change_fields(step=lambda random: random.getrandbits(32)),
    "another agreement": _change_fields(sha256=lambda random: random.randbytes(16)),
    "no privacy left": _change_result(
        lambda scene, answer: TaskRefusal("privacy_epsilon would be 9 after this round")
    ),
    "a refusal without end": _change_result(lambda scene, answer: TaskRefusal("\x1b[2J\r\n\0" * 1000)),
    "a damaged answer": _change_result(_damaged),
    "noise": _change_result(lambda scene, answer: scene.noise()),
    "nothing": _change_result(lambda scene, answer: b""),
    "a garbage protobuf": _objects(lambda scene: garbage(body=scene.noise(200))),
    "objects of another kind": _objects(
        lambda scene: garbage(scene.random.choice(["ArrayRecord", "MetricRecord", "Array", "Message", "x"]))
    ),
    "an object without a head": _objects(lambda scene: [scene.noise()]),
    "a wrong length": _objects(lambda scene: [object_of("Message", b"x") + b"y"]),
    "Flower's handlers": _call,
    "one answer twelve times": _repeat_result,
    "a foreign task": _forge_fields(reply_to_message_id=lambda scene: scene.random.randbytes(32).hex()),
    "another's name": _forge_fields(src_node_id=lambda scene: scene.honest.node.node_id),
    "another run": _forge_fields(run_id=lambda scene: scene.random.getrandbits(63)),
    "a time": _forge_fields(
        created_at=lambda scene: scene.random.choice([float("nan"), float("inf"), -1e300])
    ),
    "a time to live": _forge_fields(
        ttl=lambda scene: scene.random.choice([float("nan"), float("inf"), 1e300])
    ),
    "a group": _forge_fields(group_id="x" * 60_000),
}


def _open_connections(scene: Scene) -> None:
    for _ in range(scene.random.randint(1, 60)):
        scene.held.append(scene.open())


def _without_tls(scene: Scene) -> None:
    with scene.open() as connection:
        connection.settimeout(0.2)
        connection.sendall(scene.random.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b""]))
        connection.sendall(scene.noise())
        connection.recv(100)


def _wrong_key(scene: Scene) -> None:
    fields = {name: scene.random.choice(values) for name, values in TABLES["signatures"].items()}
    scene.send(scene.head(**fields, content_length=0))


def _wrong_path(scene: Scene) -> None:
    method, path = scene.random.choice(["GET", "POST", "PUT", "OPTIONS"]), scene.random.choice(_PATHS)
    scene.send(scene.head(method=method, path=path, content_length=0))


STRANGERS: dict[str, Stranger] = {
    "half a head": lambda scene: scene.hold(scene.secure(), scene.head("push-object")[:-2] + b"x"),
    "a slow body": lambda scene: scene.hold(
        scene.secure(), scene.head("push-messages", content_length=9) + b"a"
    ),
    "many connections": _open_connections,
    "a big body": lambda scene: scene.send(
        scene.head(content_length=scene.random.choice(_LENGTHS)) + bytes(2_000_000)
    ),
    "chunks without end": lambda scene: scene.send(
        scene.head(transfer_encoding="chunked") + b"ffff\r\n" + bytes(500_000)
    ),
    "a wrong key": _wrong_key,
    "a wrong path": _wrong_path,
    "no TLS, or garbage of it": _without_tls,
    "half a handshake": lambda scene: scene.hold(scene.open(), _HANDSHAKE),
    "noise": lambda scene: scene.send(scene.noise(100_000)),
    "a head without end": lambda scene: scene.send(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000),
    "requests in a row": lambda scene: scene.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 500),
}
