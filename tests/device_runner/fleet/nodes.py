"""Devices of a fleet as processes, and a server within this one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from device_runner.fleet.flower_server import Rounds, server_app
from device_runner.fleet.keys import ServerKeys
from device_runner.fleet.superlink import SuperLink, superlink

SECONDS = 60.0


class Echoes:
    """Rounds whose tasks are their numbers; keeps what devices answer."""

    def __init__(self, rounds: int, most: int = 100) -> None:
        self.round, self.rounds, self.most = 0, rounds, most
        self.received: list[dict[int, bytes]] = []

    @staticmethod
    def task(number: int) -> bytes:
        return bytes([number, *range(256)])

    @property
    def finished(self) -> bool:
        return self.round >= self.rounds

    def tasks(self, nodes: Sequence[int]) -> dict[int, dict[str, Any]]:
        return {
            node: {"round": self.round, "bytes": bytes(range(256))} for node in sorted(nodes)[: self.most]
        }

    def receive(self, answers: Mapping[int, Mapping[str, Any]]) -> str:
        self.received.append({node: dict(fields) for node, fields in answers.items()})
        self.round += 1
        return f"round {self.round} of {self.rounds}: {len(answers)} answers"


@contextmanager
def device(folder: Path, server: str, keys: Path | None = None, code: str = "task") -> Iterator[Device]:
    """A device in a process of its own, that answers `task` with `code`'s value."""
    script = f"""
import os, sys, time
from pathlib import Path
from device_runner.fleet.flower_client import client_app
from device_runner.fleet.keys import DeviceKeys
from device_runner.fleet.supernode import Connection, join
folder, server, keys = sys.argv[1:]
connection = Connection(server, DeviceKeys.open(Path(keys)) if keys else None)
join(Path(folder), connection, client_app(lambda task: {code}), lambda line: print(line, flush=True))
"""
    folder.mkdir(exist_ok=True)
    with (folder / "console.txt").open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), server, str(keys or "")],
            stdout=console,
            stderr=console,
        )
    try:
        yield Device(folder, process)
    finally:
        process.kill()
        process.wait()


class Device:
    """A device's process and folder."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process

    @property
    def console(self) -> str:
        """What it has printed."""
        return (self.folder / "console.txt").read_text()


@contextmanager
def serving(
    folder: Path,
    rounds: Rounds,
    devices: int,
    keys: Path | None = None,
    port: int = 0,
    seconds: float = SECONDS,
) -> Iterator[Serving]:
    """A server that listens; its rounds go when they are asked for."""
    with superlink(folder, "127.0.0.1", port, ServerKeys.open(keys) if keys else None) as link:
        yield Serving(link, server_app(rounds, devices, seconds, (lines := []).append), lines)


@dataclass(frozen=True)
class Serving:
    """A server and what it has told."""

    link: SuperLink
    app: ServerApp
    lines: list[str]

    @property
    def address(self) -> str:
        return self.link.address

    def finish(self) -> None:
        """Take all rounds."""
        with self.link.run() as grid:
            self.app(grid=grid, context=Context(0, 0, {}, RecordDict(), {}))


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
