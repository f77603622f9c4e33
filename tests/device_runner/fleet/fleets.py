"""A fleet whose devices compute with a numpy model: real folders, tasks and replies, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.fleet import local_round as local
from device_runner.fleet import server as opening
from device_runner.fleet.agreement import Agreement
from device_runner.fleet.coordinator import Coordinator, RoundReport
from device_runner.fleet.device import FLEETS, LEDGER, SEED_FILE, STATE, DeviceSettings, answer, make_device
from device_runner.fleet.messages import RoundTask
from device_runner.fleet.server import ServerSettings, open_fleet
from device_runner.fleet.state import unpack_state
from prge.engine import FloatArray
from prge.formats.bundle import open_bundle
from prge.training.checkpoint import TrainingState
from tests.device_runner.numpy_device import Device, write_films

NODES = (11, 22, 33)
# Maps a device's task to its message; None stands for silence.
Network = Callable[[int, bytes], bytes | None]


class Fleet:
    """Three devices with a third of the rows each, and the settings of their server."""

    def __init__(
        self, folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch, policy: str = ""
    ) -> None:
        device.replaces(monkeypatch, local, opening)
        self.folder = folder
        self.numpy = device
        self.bundle = device.write_bundle(folder / "bundle")
        write_films(folder)
        self.task = str(folder / "task.yaml")
        self.replies: dict[tuple[int, int], bytes] = {}
        rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        for index, node in enumerate(NODES):
            (folder / f"{node}.jsonl").write_text("".join(rows[index :: len(NODES)]))
            self.join(node, policy)

    def join(self, node: int, policy: str = "", **changes: Any) -> None:
        """Create a device's folder, or change its policy."""
        path = self.folder / f"{node}.yaml"
        path.write_text(policy)
        fields: dict[str, Any] = {
            "bundle": self.bundle,
            "task": self.task,
            "train": self.folder / f"{node}.jsonl",
            "policy": path if policy else None,
        }
        make_device(self.folder / str(node), DeviceSettings(**fields | changes))
        (self.folder / str(node) / SEED_FILE).write_text(json.dumps({"rows_seed": node + 1}))

    def settings(self, **changes: Any) -> ServerSettings:
        """Return the settings of a server of this fleet, in `fleet/`."""
        fields: dict[str, Any] = {
            "bundle": self.bundle,
            "out": self.folder / "fleet",
            "task": self.task,
            "name": "films",
            "dev": self.folder / "dev.jsonl",
            "head_rows": self.folder / "dev.jsonl" if self.numpy.encoder else None,
            "rounds": 4,
            "local_steps": 3,
            "learning_rate": 0.02,
        }
        return ServerSettings(**{**fields, **changes})

    def direct(self, node: int, task: bytes) -> bytes:
        """Deliver a task to its device, and return and remember the device's message."""
        reply = answer(self.folder / str(node), task)
        self.replies[node, RoundTask.parse(task).number] = reply
        return reply

    def again(self, node: int, task: bytes) -> bytes:
        """Return the message that the device sent to an earlier server of the same plan."""
        return self.replies[node, RoundTask.parse(task).number]

    def state(self, node: int, agreement: Agreement) -> TrainingState:
        """Return the global state that a device has."""
        chain = open_bundle(self.bundle).chain
        content = (self.folder / str(node) / FLEETS / agreement.sha256.hex() / STATE).read_bytes()
        return unpack_state(content, agreement.plan, chain.modules, chain.width, 2 * self.numpy.encoder)

    def run(
        self,
        settings: ServerSettings,
        network: Network | None = None,
        nodes: Iterable[int] = NODES,
        rounds: int | None = None,
    ) -> tuple[FloatArray, list[RoundReport]]:
        """Run some or all remaining rounds; returns the global adapter and the rounds' reports."""
        reports = []
        with open_fleet(settings) as server:
            while not server.finished and (rounds is None or len(reports) < rounds):
                reports.append(play(server, network or self.direct, nodes))
            server.write_final()
            return server.state.adapter.values.copy(), reports


def play(server: Coordinator, network: Network, nodes: Iterable[int] = NODES) -> RoundReport:
    """Run one round."""
    replies = {node: network(node, task) for node, task in server.tasks(list(nodes)).items()}
    return server.receive({node: content for node, content in replies.items() if content is not None})


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a device's ledger."""
    lines = (folder / LEDGER).read_text().splitlines()
    return [json.loads(line)["record"] for line in lines]


def record_types(folder: Path) -> list[str]:
    """Return the types of the lines in a device's ledger."""
    return [record["type"] for record in ledger(folder)]


def same(left: FloatArray, right: FloatArray) -> bool:
    """Return whether two arrays have the same bits."""
    return bool(np.array_equal(left.view(np.uint32), right.view(np.uint32)))
