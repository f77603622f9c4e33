"""Tests of the server against its own devices and strangers: no message stops it or fills its storage."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node

from device_runner.fleet.network.admission import (
    MAX_CONNECTIONS_OF_A_KEY,
    MAX_STRANGERS,
    SMALL_BYTES,
    Listener,
)
from device_runner.fleet.network.keys import ServerKeys, make_keys
from device_runner.fleet.network.superlink import SuperLink, superlink
from tests.device_runner.fleet.network.enemy import HostileDevice, PulledTask, garbage, object_of
from tests.device_runner.fleet.network.nodes import RoundNumberCoordinator, run_all_rounds

pytestmark = pytest.mark.whole
MAX_BYTES = 1 << 20
SECONDS = 8.0


@dataclass
class Scene:
    """A server, its keys, an honest and a hostile device, and rounds in progress."""

    link: SuperLink
    keys: Path
    honest: HostileDevice
    enemy: HostileDevice
    rounds: RoundNumberCoordinator

    def task(self) -> PulledTask:
        """Return the hostile device's next task."""
        return _task(self.enemy)

    def check_next_round(self) -> None:
        """Assert that the round completes with the honest device's reply."""
        task = _task(self.honest)
        before = self.rounds.round
        self.honest.push(self.honest.reply(task, task.content))
        _wait(lambda: self.rounds.round > before)
        assert self.rounds.received[-1][self.honest.node.node_id] == task.content


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Yield one server for all tests, each of which attacks it differently."""
    folder = tmp_path_factory.mktemp("hostile")
    keys = folder / "keys"
    make_keys(keys, [], ["honest", "enemy"])
    server = ServerKeys.open(keys / "server")
    with superlink(folder / "server", "127.0.0.1", 0, server, MAX_BYTES) as link:
        honest, enemy = (HostileDevice(link.address, keys / "devices" / name) for name in ("honest", "enemy"))
        rounds = RoundNumberCoordinator(200)
        thread = threading.Thread(target=lambda: run_all_rounds(link, rounds, 2, SECONDS))
        thread.start()
        with honest, enemy:
            yield Scene(link, keys, honest, enemy, rounds)
            rounds.rounds = 0
            thread.join(2 * SECONDS)
            assert not thread.is_alive()


def _task(device: HostileDevice) -> PulledTask:
    deadline = time.monotonic() + 20
    while (task := device.pull()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return task


_RECORD = RecordDict({"fleet": ConfigRecord({"content": b"x"})})
ANSWERS: dict[str, Callable[[HostileDevice, PulledTask], object]] = {
    "a garbage body": lambda enemy, task: enemy.push_objects(task, garbage()),
    "a body of another type": lambda enemy, task: enemy.push_objects(task, garbage("ArrayRecord")),
    "a record instead of a message": lambda enemy, task: enemy.push_objects(
        task, [object_of("ConfigRecord", b"\xff" * 9)]
    ),
    "children that aren't there": lambda enemy, task: enemy.push_objects(
        task, [object_of("Message", b"", [b"nobody"])]
    ),
    "no records": lambda enemy, task: enemy.push(enemy.reply(task, RecordDict())),
    "a number instead of bytes": lambda enemy, task: enemy.push(
        enemy.reply(task, RecordDict({"fleet": ConfigRecord({"content": 1.0})}))
    ),
    "a record of metrics": lambda enemy, task: enemy.push(
        enemy.reply(task, RecordDict({"fleet": MetricRecord({"content": 1})}))
    ),
    "a very long error": lambda enemy, task: enemy.push(
        enemy.reply(task, Error(-(2**31), "\x1b[2J\n" * 5000))
    ),
    "an incomplete reply": lambda enemy, task: enemy.client.PushMessages(
        PushMessagesRequest(
            node=enemy.node,
            messages_list=[_bare(enemy, task)],
            message_object_trees=[_tree(enemy, task)],
        )
    ),
}
REFUSED: dict[str, Callable[[Scene, PulledTask], object]] = {
    "a reply to a foreign task": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD, reply_to_message_id="0" * 64)
    ),
    "a reply in the name of another device": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD, src_node_id=scene.honest.node.node_id)
    ),
    "a reply sent by another node": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD), node=scene.honest.node
    ),
    "a time that is NaN": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD, created_at=float("nan"))
    ),
    "a time to live that is NaN": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD, ttl=float("nan"))
    ),
    "a request without a message": lambda scene, task: scene.enemy.client.PushMessages(
        PushMessagesRequest(node=scene.enemy.node)
    ),
    "a tree of 800 objects": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, _RECORD),
        tree=ObjectTree(
            object_id="a" * 64, children=[ObjectTree(object_id=f"{index:064x}") for index in range(800)]
        ),
    ),
    "many records": lambda scene, task: scene.enemy.push(
        scene.enemy.reply(task, RecordDict({"a": ArrayRecord([np.zeros(1)])}))
    ),
    "an object that is too large": lambda scene, task: scene.enemy.client.PushObject(
        PushObjectRequest(node=scene.enemy.node, object_content=bytes(MAX_BYTES + SMALL_BYTES))
    ),
    "the receipt of a foreign message": lambda scene, task: scene.enemy.client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=scene.enemy.node, message_object_id="0" * 64)
    ),
    "deactivation of another device": lambda scene, task: HostileDevice.leave(
        _Named(scene.enemy, Node(node_id=scene.honest.node.node_id))  # type: ignore[arg-type]
    ),
}


@dataclass
class _Named:
    enemy: HostileDevice
    node: Node

    @property
    def client(self) -> object:
        return self.enemy.client


def _bare(enemy: HostileDevice, task: PulledTask) -> object:
    from flwr.app.message.message import remove_content_from_message
    from flwr.common.serde import message_to_proto

    message = enemy.reply(task, b"late")
    bare = remove_content_from_message(message)
    bare.metadata.__dict__["_message_id"] = _tree(enemy, task).object_id
    return message_to_proto(bare)


def _tree(enemy: HostileDevice, task: PulledTask) -> ObjectTree:
    return ObjectTree(object_id="b" * 64)


@pytest.mark.parametrize("name", ANSWERS)
def test_invalid_replies_are_ignored(scene: Scene, name: str) -> None:
    ANSWERS[name](scene.enemy, scene.task())
    scene.check_next_round()
    assert not scene.rounds.received[-1].get(scene.enemy.node.node_id)


@pytest.mark.parametrize("name", REFUSED)
def test_forbidden_requests_of_a_device_are_refused(scene: Scene, name: str) -> None:
    task = scene.task()
    with pytest.raises(httpx.HTTPStatusError, match=r"40[13]|413"):
        REFUSED[name](scene, task)
    scene.enemy.push(scene.enemy.reply(task, b"x"))
    scene.check_next_round()
    assert scene.rounds.received[-1][scene.enemy.node.node_id] == b"x"


def test_messages_that_flower_fails_on_only_affect_their_sender(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a refusal, these messages would lead to times that are NaN."""
    monkeypatch.setattr("device_runner.fleet.network.flower.math.isfinite", lambda value: True)
    task = scene.task()
    scene.enemy.push(scene.enemy.reply(task, b"x", created_at=float("nan")))
    scene.check_next_round()
    assert scene.enemy.node.node_id not in scene.rounds.received[-1]


def test_a_reply_counts_once(scene: Scene) -> None:
    task = scene.task()
    for content in (b"first", b"second"):
        with contextlib.suppress(httpx.HTTPStatusError):
            scene.enemy.push(scene.enemy.reply(task, content))
    for _ in range(20):
        with contextlib.suppress(httpx.HTTPStatusError):
            scene.enemy.push(scene.enemy.reply(task, os.urandom(8)))
    scene.check_next_round()
    assert scene.rounds.received[-1][scene.enemy.node.node_id] == b"first"


class TestStranger:
    """Requests without a key are refused."""

    def _connect(self, scene: Scene) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(scene.keys / "server" / "ca.pem"))
        host, port = scene.link.address.split(":")
        plain = socket.create_connection((host, int(port)), 5)
        return context.wrap_socket(plain, server_hostname=host)

    def test_fills_no_memory(self, scene: Scene) -> None:
        path = "/v1/fleet/push-object"
        body = b"x" * 10_000_000  # the server is in this process too
        before = _resident()
        for _ in range(20):
            with self._connect(scene) as connection, contextlib.suppress(OSError):
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode())
                connection.sendall(body)
                assert b" 401 " in connection.recv(100)
        assert _resident() - before < 10 << 20
        scene.enemy.push(scene.enemy.reply(scene.task(), b"x"))
        scene.check_next_round()

    @pytest.mark.parametrize(
        ("request_", "status"),
        [
            ("GET / HTTP/1.1\r\nhost: x\r\n\r\n", 404),
            ("GET /docs HTTP/1.1\r\nhost: x\r\n\r\n", 404),
            ("POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\n\r\n", 404),
            ("POST /v1/runtime/acquire-task HTTP/1.1\r\nhost: x\r\n\r\n", 404),
            ("POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", 401),
            ("nonsense\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nhost: x\r\nx: " + "y" * 20_000, 400),
        ],
    )
    def test_gets_nothing(self, scene: Scene, request_: str, status: int) -> None:
        with self._connect(scene) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(request_.encode())
            assert f" {status} ".encode() in connection.recv(100)

    def test_gets_one_last_response(self, scene: Scene) -> None:
        """The requests are pipelined, followed by garbage, or have an invalid body."""
        request = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for content in (
            request.replace(b"POST", b"GET") * 500 + b"nonsense\r\n\r\n" * 5000,
            request + b"!\r\n",
        ):
            with self._connect(scene) as connection, contextlib.suppress(OSError):
                connection.sendall(content)
                while connection.recv(1 << 16):
                    continue
        log = scene.keys.parent / "server" / "flower" / "superlink.log"
        assert "Traceback" not in log.read_text()

    def test_keeps_nobody_out(self, scene: Scene) -> None:
        """If connections have incomplete heads, no heads or no handshakes, the oldest ones make room."""
        host, port = scene.link.address.split(":")
        with contextlib.ExitStack() as stack:
            for index in range(MAX_STRANGERS + 100):
                plain = socket.create_connection((host, int(port)), 5)
                stack.enter_context(plain)
                if index % 3 == 0:
                    plain.sendall(b"\x16\x03\x01\x02\x00\x01")
            scene.enemy.push(scene.enemy.reply(scene.task(), b"x"))
            scene.check_next_round()


def test_an_incomplete_head_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the first request of a connection is slow, or a later one."""
    monkeypatch.setattr("device_runner.fleet.network.admission.SECONDS_TO_ASK", 1.0)
    with superlink(tmp_path / "server", "127.0.0.1", 0, None, max_bytes=0) as link:
        host, port = link.address.split(":")
        for first in (b"", b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"):
            with socket.create_connection((host, int(port)), 10) as connection:
                connection.sendall(first)
                assert not first or connection.recv(1000)
                connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
                try:
                    ended = connection.recv(10) == b""
                except ConnectionResetError:
                    ended = True
                assert ended


def test_the_store_holds_one_round(scene: Scene) -> None:
    for _ in range(3):
        scene.enemy.push(scene.enemy.reply(scene.task(), os.urandom(100_000)))
        scene.check_next_round()
    with contextlib.closing(
        sqlite3.connect(scene.keys.parent / "server" / "flower" / "superlink.db")
    ) as base:
        counts = {
            table: base.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in (
                "message_ins",
                "message_res",
                "objects",
                "run_objects",
                "object_push_sessions",
                "object_children",
            )
        }
    # At most two tasks and two replies, of three objects each.
    assert max(counts.values()) <= 12, counts


def test_a_key_has_its_share_of_connections() -> None:
    with Listener(socket.create_server(("127.0.0.1", 0)), 100) as listener:
        clients = []
        for _ in range(MAX_CONNECTIONS_OF_A_KEY + 4):
            clients.append(socket.create_connection(listener.getsockname(), 5))
            _, address = listener.accept()
            listener.mark_known(address, b"key")
        assert [client.recv(1) for client in clients[:4]] == [b""] * 4
        clients[4].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[4].recv(1)
        for client in clients:
            client.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
