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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from device_runner.fleet.network.door import Door, Listener, connections_for
from device_runner.fleet.network.flower import FleetState, encode_keys, fleet_application
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

    def __init__(self, address: str, state: FleetState, post: Post) -> None:
        self.address = address
        self._state, self._post = state, post

    def names(self) -> dict[int, str]:
        """What registered devices are called, by the ids of their nodes."""
        return self._state.names()

    @contextmanager
    def run(self) -> Iterator[Post]:
        """Start a run, and give what carries messages to the devices' nodes.

        Raises:
            RunError: Flower doesn't start it.
        """
        with self._state.running():
            yield self._post


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
        state = FleetState(home / "superlink.db")
        post, listener = Post(state), Listener(plain, _most_connections())
        state.forget_runs()
        with closing(sqlite3.connect(home / "superlink.db")) as database:
            database.execute("VACUUM")
        known = None
        if keys is not None:
            state.register(keys.devices)
            known = encode_keys(keys.devices.values())
        application = fleet_application(state, keys is not None, post.allows)
        door = Door(application, listener, known, most_bytes)
        with listener, _serving(door, listener, keys, most_bytes, home / "superlink.log"):
            yield SuperLink(address_of(listener), state, post)


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
                raise RunError(
                    "Flower's SuperLink doesn't start:\n  " + "\n  ".join(last_lines(log)),
                    code="flower-not-started",
                )
            time.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        thread.join(_SECONDS_TO_END + 5)
