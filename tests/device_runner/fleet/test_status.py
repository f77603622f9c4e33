"""Tests of a fleet's status, read from the server's folder."""

from __future__ import annotations

import json

from device_runner.fleet.serve import NAMES
from device_runner.fleet.status import read_status
from prge.errors import RunError
from tests.device_runner.fleet.fleets import NODES, Fleet
from tests.refusals import raises


def test_the_status_of_a_fleet_that_stops_and_ends(fleet: Fleet) -> None:
    """One device sends garbage, another one is silent in the first round."""
    liar, shy, honest = NODES
    settings, folder = fleet.settings(), fleet.folder / "fleet"

    def network(node: int, task: bytes) -> bytes | None:
        return b"1e30" if node == liar else None if node == shy else fleet.direct(node, task)

    def better(node: int, task: bytes) -> bytes | None:
        return network(node, task) if node == liar else fleet.direct(node, task)

    fleet.run(settings, network, rounds=1)
    (folder / "final").rename(fleet.folder / "aside")
    (folder / NAMES).write_text(json.dumps({liar: "liar", shy: "shy"}))
    stopped = read_status(folder)
    assert (stopped.state, stopped.rounds, stopped.of, stopped.steps) == ("stopped", 1, 4, 3)

    _, reports = fleet.run(settings, better)
    status = read_status(folder)
    assert (status.state, status.rounds, status.steps) == ("done", 4, 12)
    assert status.bytes_up == stopped.bytes_up + sum(report.bytes_up for report in reports)
    assert status.loss == reports[-1].loss
    assert set(status.evaluation) >= {"loss", "accuracy"}
    replies = {name: device.answered for name, device in status.devices.items()}
    assert replies == {"liar": 0, "shy": 3, str(honest): 4}
    assert status.devices["shy"].silent == 1
    assert len(status.devices["liar"].refused) == 4
    lines = status.text().splitlines()
    assert lines[0] == f"{folder}: done, 4 of 4 rounds, 12 steps"
    assert "shy: 3 answers, 1 silent" in lines
    assert any(line.startswith("liar: 0 answers, 4 refused, last: a message of ") for line in lines)


def test_damaged_names_are_reported(fleet: Fleet) -> None:
    fleet.run(fleet.settings(), rounds=1)
    (fleet.folder / "fleet" / NAMES).write_text("[]")
    with raises(RunError, "file-unreadable", containing=NAMES):
        read_status(fleet.folder / "fleet")
