"""A fleet with a server on the computer and one device, the phone at the other end of the cable."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from device_runner.fleet.network.keys import make_keys
from tests.device_runner.android.daemons import REPOSITORY, Daemon

DEMO = REPOSITORY / "server_export" / "demo_data"
PORT = 9092


def train_fleet_of_one(daemon: Daemon, phone: str, bundle: Path, work: Path, seconds: float = 120) -> str:
    """Run two rounds, and return the output of the server.

    The server listens on the computer's loopback, which the phone reaches only through the cable.

    Args:
        daemon: the phone and the computer.
        phone: prge's folder on the phone, with a runtime that has Flower.
        bundle: bundle for forward passes of copies.
        work: folder for keys, the fleet and the output of the server.
        seconds: time limit of a round.
    """
    keys, console = work / "keys", work / "server.txt"
    make_keys(keys, [], ["one"])
    same = ["--bundle", bundle, "--task", DEMO / "task.yaml"]
    plan = ["--estimator", "antithetic", "--rounds", 2, "--local-steps", 3, "--queries", 2]
    devices = ["--wait-for", 1, "--least-answers", 1, "--seconds", int(seconds)]
    served = ["--out", work / "fleet", "--keys", keys / "server", "--port", PORT, *plan, *devices]
    with console.open("ab") as stream:
        server = daemon.network.start(
            [sys.executable, "-m", "prge.cli.main", "fleet", "serve", *same, *served],
            stdout=stream, stderr=stream, env=daemon.environment,
        )  # fmt: skip
    try:
        _until(console, "listening at")
        to = ["--folder", phone, "--server", f"127.0.0.1:{PORT}", "--keys", keys / "devices" / "one"]
        daemon.prge("fleet", "join", *to, *same, "--train", DEMO / "train.jsonl", "--name", "mine")
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(3 * seconds)
        output = daemon.prge("logs", "mine", "--console", "--folder", phone).stdout
        daemon.prge("stop", "mine", "--now", "--folder", phone)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0, console.read_text() + output
    return console.read_text()


def _until(console: Path, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while text not in console.read_text():
        assert time.monotonic() < deadline, console.read_text()
        time.sleep(0.2)
