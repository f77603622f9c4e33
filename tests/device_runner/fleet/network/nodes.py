"""Devices of a fleet as processes, and a server within the test process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device_runner.fleet.coordinator import RoundsFlags
from device_runner.fleet.network.keys import ServerKeys
from device_runner.fleet.network.rounds import run_rounds
from device_runner.fleet.network.superlink import SuperLink, superlink

SECONDS = 60.0


class RoundNumberCoordinator:
    """A stand-in for a coordinator whose tasks are the round numbers; records the replies."""

    def __init__(self, rounds: int, max_nodes: int = 100) -> None:
        self.round, self.rounds, self.max_nodes = 0, rounds, max_nodes
        self.received: list[dict[int, bytes]] = []

    @staticmethod
    def task(number: int) -> bytes:
        return bytes([number, *range(256)])

    @property
    def finished(self) -> bool:
        return self.round >= self.rounds

    def tasks(self, nodes: Sequence[int]) -> dict[int, bytes]:
        return dict.fromkeys(sorted(nodes)[: self.max_nodes], self.task(self.round))

    def receive(self, answers: Mapping[int, bytes]) -> str:
        self.received.append(dict(answers))
        self.round += 1
        return f"round {self.round} of {self.rounds}: {len(answers)} answers"


@contextmanager
def device(folder: Path, server: str, keys: Path | None = None, code: str = "task") -> Iterator[Device]:
    """Start a device in a process of its own, which answers `task` with the value of `code`."""
    script = f"""
import os, sys, time
from pathlib import Path
from device_runner.fleet.network.client import join
from device_runner.fleet.network.keys import DeviceKeys
folder, server, keys = sys.argv[1:]
known = DeviceKeys.open(Path(keys)) if keys else None
join(Path(folder), server, known, lambda task: {code}, lambda line: print(line, flush=True))
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
        """Return the process's output."""
        return (self.folder / "console.txt").read_text()


@contextmanager
def serving(folder: Path, keys: Path | None = None, port: int = 0) -> Iterator[SuperLink]:
    """Open a server that listens on loopback."""
    with superlink(folder, "127.0.0.1", port, ServerKeys.open(keys) if keys else None) as link:
        yield link


def run_all_rounds(link: SuperLink, rounds: Any, devices: int, seconds: float = SECONDS) -> list[str]:
    """Run all rounds, and return the logged lines."""
    lines: list[str] = []
    rounds.flags = RoundsFlags(seconds=seconds)
    with link.run() as mailbox:
        run_rounds(mailbox, rounds, devices, lines.append)
    return lines


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
