"""Flower's SuperLink within this process: the server that devices reach, and one run on it.

Flower's own command `flower-superlink` is not used, because it gives everyone who reaches its port the right
to start apps: it would run a stranger's code on the server and let strangers register devices. Here devices
reach nothing but the Fleet API, through a `Door`, and the run has no app: this process is its server.
"""

from __future__ import annotations

import resource
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL as HEARTBEAT_SECONDS
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, Status, SubStatus
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import http_error_translator
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from device_runner.fleet.network.door import Door, Listener, connections_for
from device_runner.fleet.network.home import flower_home, last_lines, log_to
from device_runner.fleet.network.keys import ServerKeys
from device_runner.fleet.network.post import Post
from device_runner.serving.listening import address_of, listening
from prge.errors import RunError

_SECONDS_TO_START = 60.0
_SECONDS_TO_END = 5.0
_MOST_HEAD_BYTES = 1 << 14
# Of files and sockets that this process may have open: half of them are connections at most.
_MOST_FILES = 1 << 13


class SuperLink:
    """A SuperLink that listens; `superlink` opens one."""

    def __init__(self, address: str, state: LinkState, post: Post) -> None:
        self.address = address
        self._state, self._post = state, post

    def register(self, keys: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
        """Let in the devices with these keys, by name, and no others."""
        wanted = {public_key_to_bytes(key): name for name, key in keys.items()}
        for node in self._state.get_node_info():
            if wanted.pop(node.public_key, None) is None:
                self._state.delete_node(NOOP_FLWR_AID, node.node_id)
        for key, name in wanted.items():
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_SECONDS, name=name)

    def names(self) -> dict[int, str]:
        """What registered devices are called, by the ids of their nodes."""
        return {node.node_id: node.name for node in self._state.get_node_info() if node.name}

    def forget_runs(self) -> None:
        """Remove the runs of earlier servers with their messages."""
        for run in self._state.get_run_info():
            if run.status.status != Status.FINISHED:
                self._state.stop_run(run.run_id)
            self._state.cleanup_run(run.run_id)

    @contextmanager
    def run(self) -> Iterator[Post]:
        """Start a run, and give what carries messages to the devices' nodes.

        Raises:
            RunError: Flower doesn't start it.
        """
        state = self._state
        state.federation_manager.ensure_default_federations_exist(flwr_aid=NOOP_FLWR_AID)
        run_id = state.create_run(
            fab_id=None,
            fab_version=None,
            fab_hash=None,
            override_config={},
            federation_id=NOOP_FEDERATION_ID,
            federation_config=None,
            flwr_aid=NOOP_FLWR_AID,
            primary_task_type=TaskType.SERVER_APP,
        )
        (task,) = state.get_tasks(run_ids=[run_id])
        if state.claim_task(task.task_id) is None or not state.activate_task(task.task_id):
            raise RunError("Flower doesn't start the run")
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, run_id
        TaskIdentity.node_id = state.get_node_id()
        self._post.run_id = run_id
        heartbeat = HeartbeatSender(lambda: state.acknowledge_task_heartbeat(task.task_id))
        heartbeat.start()
        try:
            yield self._post
        finally:
            heartbeat.stop()
            state.finish_task(task.task_id, SubStatus.COMPLETED, "")


@contextmanager
def superlink(
    folder: Path, host: str, port: int, keys: ServerKeys | None, most_bytes: int = 1 << 20
) -> Iterator[SuperLink]:
    """Listen at an address until the block ends; nodes and runs are kept within `folder`.

    Args:
        folder: the fleet's.
        host, port: where devices reach it; port 0 is a free one.
        keys: the server's; devices prove by theirs who they are. None: no encryption, and anyone may join.
        most_bytes: of a device's answer.

    Raises:
        RunError: the address can't be listened at, or Flower doesn't start.
    """
    home = flower_home(folder)
    log_to(home / "superlink.log")
    with listening(host, port) as plain:
        _, state_factory = get_objectstore_linkstate_factories(
            str(home / "superlink.db"), get_federation_manager()
        )
        state = state_factory.state()
        post, listener = Post(state), Listener(plain, _most_connections())
        app = FastAPI(
            openapi_url=None,
            middleware=[
                Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
                Middleware(ProtobufTranslationMiddleware),
                Middleware(NodeAuthMiddleware),
                Middleware(BaseHTTPMiddleware, dispatch=post.admit),
            ],
        )
        app.state.linkstate_factory = state_factory
        app.state.enable_supernode_auth = keys is not None
        app.include_router(fleet_router)
        link = SuperLink(address_of(listener), state, post)
        link.forget_runs()
        with closing(sqlite3.connect(home / "superlink.db")) as database:
            database.execute("VACUUM")
        if keys is not None:
            link.register(keys.devices)
        known = None if keys is None else frozenset(map(public_key_to_bytes, keys.devices.values()))
        door = Door(app, listener, known, most_bytes)
        with listener, _serving(door, listener, keys, most_bytes, home / "superlink.log"):
            yield link


def _most_connections() -> int:
    """How many connections of devices there may be, so that there is a file left for the fleet's own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted // 2


@contextmanager
def _serving(
    app: Door, listener: Listener, keys: ServerKeys | None, most_bytes: int, log: Path
) -> Iterator[None]:
    """Serve in a thread of this process, so that both end together."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=connections_for(most_bytes),
            loop="asyncio",  # whose listeners are sockets of Python's
            h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ssl_certfile=keys.certificate if keys else None,
            ssl_keyfile=str(keys.key) if keys else None,
            timeout_graceful_shutdown=int(_SECONDS_TO_END),
        )
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="superlink", daemon=True
    )
    thread.start()
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise RunError("Flower's SuperLink doesn't start:\n  " + "\n  ".join(last_lines(log)))
            time.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        thread.join(_SECONDS_TO_END + 5)
