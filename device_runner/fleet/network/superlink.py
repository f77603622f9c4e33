"""Flower's SuperLink within this process: the server that devices reach, and one run on it.

Flower's own command `flower-superlink` is not used, because it gives everyone who reaches its port the right
to start apps: it would run a stranger's code on the server and let strangers register devices. Here the
Control API answers nobody, the Runtime API knows only this process's secret, and devices reach nothing but
the Fleet API. So no app is uploaded either: the run's app is this process.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import socket

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL as HEARTBEAT_SECONDS
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, Status, SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.server.superlink.linkstate import LinkState
from flwr.serverapp.grid import Grid
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.superlink.servicer.control import control_handlers

from device_runner.fleet.network.home import flower_home, last_lines, log_to
from device_runner.fleet.network.keys import ServerKeys
from device_runner.serving.listening import address_of, listening
from prge import __version__
from prge.errors import RunError

_SECONDS_TO_START = 60.0
_SECONDS_TO_END = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# What Flower calls an app, and devices of ours never open: it has no code, and its components don't exist.
_APP = f"""\
[project]
name = "prge-fleet"
version = "{__version__}"
[tool.flwr.app]
publisher = "prge"
[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"
"""


class Nobody(NoOpControlAuthnPlugin):
    """No account may use the Control API."""

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Refuse."""
        return False, None

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """Refuse."""
        return None, None


class SuperLink:
    """A SuperLink that listens; `superlink` opens one."""

    def __init__(self, address: str, keys: ServerKeys | None, state: LinkState) -> None:
        self.address = address
        self._keys = keys
        self._state = state

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

    def stop_runs(self) -> None:
        """End the runs of a server that was killed, with their messages."""
        for run in self._state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
            self._state.stop_run(run.run_id)

    @contextmanager
    def run(self) -> Iterator[Grid]:
        """Start a run, and give what sends messages to the devices' nodes.

        Raises:
            RunError: Flower has given the run up, as it does when this machine sleeps for a minute.
        """
        content = _app()
        request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
        account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
        run_id = control_handlers.start_run(request, account, self._state, None).run_id
        (task,) = self._state.get_tasks(run_ids=[run_id])
        token = self._state.claim_task(task.task_id)
        if token is None or not self._state.activate_task(task.task_id):
            raise RunError("Flower doesn't start the run")
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, run_id
        TaskIdentity.node_id = self._state.get_node_id()
        authority = self._keys.authority.read_bytes() if self._keys else None
        grid = HttpGrid(_reachable(self.address), self._keys is None, authority, token=token)
        grid.set_run(self._state.get_run_info(run_ids=[run_id])[0])
        heartbeat = HeartbeatSender(lambda: self._state.acknowledge_task_heartbeat(task.task_id))
        heartbeat.start()
        try:
            yield grid
        except RunNotRunningException:
            raise RunError(
                "Flower has given the run up, as it does when this machine sleeps",
                remedy="go on with it: prge fleet serve --resume FOLDER",
            ) from None
        finally:
            heartbeat.stop()
            grid.close()
            self._state.finish_task(task.task_id, SubStatus.COMPLETED, "")


@contextmanager
def superlink(folder: Path, host: str, port: int, keys: ServerKeys | None) -> Iterator[SuperLink]:
    """Listen at an address until the block ends; nodes and runs are kept within `folder`.

    Args:
        folder: the fleet's.
        host, port: where devices reach it; port 0 is a free one.
        keys: the server's; devices prove by theirs who they are. None: no encryption, and anyone may join.

    Raises:
        RunError: the address can't be listened at, or Flower doesn't start.
    """
    home = flower_home(folder)
    log_to(home / "superlink.log")
    with listening(host, port) as listener:
        address = address_of(listener)
        config = _config(address, home / "superlink.db", keys)
        app = create_app(config, SuperLinkLifespan)
        link = SuperLink(address, keys, app.state.linkstate_factory.state())
        link.stop_runs()
        if keys is not None:
            link.register(keys.devices)
        with _serving(app, listener, keys, home / "superlink.log"):
            yield link


def _config(address: str, database: Path, keys: ServerKeys | None) -> SuperLinkLifespanConfig:
    host, _, port = address.rpartition(":")
    return SuperLinkLifespanConfig(
        control_address=address,
        health_server_address=None,
        host=host,
        port=int(port),
        insecure=keys is None,
        certificates=None,
        superexec_auth_secret=secrets.token_bytes(32),
        authn_plugin=Nobody(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=keys is not None,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=str(database),
        isolation="process",
        runtime_dependency_install=False,
    )


@contextmanager
def _serving(app: object, listener: socket, keys: ServerKeys | None, log: Path) -> Iterator[None]:
    """Serve in a thread of this process, so that both end together."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            ws="none",
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


def _reachable(address: str) -> str:
    """Where this machine reaches an address that it listens at."""
    host, _, port = address.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


def _app() -> bytes:
    """A Flower App Bundle without code, the same bytes each time."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), _APP)
    return content.getvalue()
