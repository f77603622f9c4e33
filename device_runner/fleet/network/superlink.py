"""Flower's SuperLink within this process: the server that devices connect to, and one run on it.

Flower's own command `flower-superlink` is not used, because it lets anyone who reaches its port start apps:
it would run a stranger's code on the server, and let strangers register devices. Here devices reach only the
Fleet API, through an `Admission`, and the run has no app: this process is its server.
"""

from __future__ import annotations

import resource
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from device_runner.fleet.network.admission import Admission, Listener, make_connection_class
from device_runner.fleet.network.flower import FleetState, encode_keys, fleet_application
from device_runner.fleet.network.flower_files import flower_home, last_lines, log_to
from device_runner.fleet.network.keys import ServerKeys
from device_runner.fleet.network.post import Mailbox
from device_runner.serving.uvicorn_server import format_address, listening
from prge.errors import RunError

_SECONDS_TO_START = 60.0
_SECONDS_TO_END = 5.0
_MAX_HEAD_BYTES = 1 << 14
# Open files and sockets of this process; at most half of them are connections.
_MAX_FILES = 1 << 13


class SuperLink:
    """A listening SuperLink; `superlink` opens one."""

    def __init__(self, address: str, state: FleetState, mailbox: Mailbox) -> None:
        self.address = address
        self._state, self._mailbox = state, mailbox

    def names(self) -> dict[int, str]:
        """Return the names of registered devices, by node id."""
        return self._state.names()

    @contextmanager
    def run(self) -> Iterator[Mailbox]:
        """Start a run, and yield what carries messages to the devices' nodes.

        Raises:
            RunError: Flower does not start the run.
        """
        with self._state.running():
            yield self._mailbox


@contextmanager
def superlink(
    folder: Path, host: str, port: int, keys: ServerKeys | None, max_bytes: int = 1 << 20
) -> Iterator[SuperLink]:
    """Listen at an address until the block ends; nodes and runs are stored in `folder`.

    Args:
        folder: the folder of the fleet.
        host, port: address for the devices; port 0 is a free one.
        keys: the keys of the server and its devices; None: no encryption, and anyone may join.
        max_bytes: the size of the largest reply of a device.

    Raises:
        RunError: the address can't be listened at, or Flower does not start.
    """
    home = flower_home(folder)
    log_to(home / "superlink.log")
    with listening(host, port) as plain:
        state = FleetState(home / "superlink.db")
        mailbox, listener = Mailbox(state), Listener(plain, _max_connections())
        state.delete_runs()
        with closing(sqlite3.connect(home / "superlink.db")) as database:
            database.execute("VACUUM")
        known = None
        if keys is not None:
            state.register(keys.devices)
            known = encode_keys(keys.devices.values())
        application = fleet_application(state, keys is not None, mailbox.allows)
        admission = Admission(application, listener, known, max_bytes)
        with listener, _serving(admission, listener, keys, max_bytes, home / "superlink.log"):
            yield SuperLink(format_address(listener), state, mailbox)


def _max_connections() -> int:
    """Return how many connections devices may have, so that files remain for the fleet itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted // 2


@contextmanager
def _serving(
    app: Admission, listener: Listener, keys: ServerKeys | None, max_bytes: int, log: Path
) -> Iterator[None]:
    """Serve in a thread of this process, so that both end together."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=make_connection_class(max_bytes),
            loop="asyncio",  # it accepts connections through Python's socket class, which Listener extends
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
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
                raise RunError(
                    "Flower's SuperLink did not start:\n  " + "\n  ".join(last_lines(log)),
                    code="flower-not-started",
                )
            time.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        thread.join(_SECONDS_TO_END + 5)
