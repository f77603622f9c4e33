"""A fleet of real processes with TLS and keys: a device and the server are killed, another device lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from device_runner.fleet.coordinator import read_agreement
from device_runner.fleet.state import pack_state
from device_runner.session.replay import replay
from prge.formats.journal import Journal
from prge.formats.run_folder import FINAL, JOURNAL
from tests.device_runner.fleet.network.nodes import device, free_port
from tests.verbs import prge

ROUNDS, SECONDS = 7, 120.0


@contextmanager
def started(console: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start `prge` in the background and kill it at the end of the context."""
    with console.open("ab") as stream:
        command = [sys.executable, "-m", "prge.cli.main", "fleet", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], console: Path) -> None:
    """Wait until a process has reached a condition."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, console.read_text()
        time.sleep(0.2)


@pytest.mark.whole
def test_a_fleet_survives_kills_and_refuses_a_malicious_device(workshop: Path, tmp_path: Path) -> None:
    honest, keys, fleet, port = ("a", "b", "c"), tmp_path / "keys", tmp_path / "fleet", free_port()
    prge("fleet", "keys", keys, "--devices", *honest, "liar")
    lines = (workshop / "train.jsonl").read_text().splitlines(keepends=True)
    for index, name in enumerate(honest):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[index::3]))
    same = ["--bundle", workshop / "bundle", "--task", workshop / "task.yaml"]
    address, server, out = f"127.0.0.1:{port}", ["serve", *same, "--out", fleet], tmp_path / "server.txt"
    plan = ["--rounds", ROUNDS, "--local-steps", 3, "--queries", 2, "--dev", workshop / "dev.jsonl"]
    server += [*plan, "--wait-for", 4, "--least-answers", 2, "--seconds", 15]
    server += ["--port", port, "--keys", keys / "server"]

    def join(name: str, *own: object) -> list[object]:
        to = ["--server", address, "--keys", keys / "devices" / name, "--folder", tmp_path / name]
        return ["join", *to, *own]

    def rounds() -> int:
        return out.read_text().count("\nround ")

    with ExitStack() as stack:
        with started(out, *server) as first:
            until(lambda: "listening at" in out.read_text(), out)
            for name in honest[:2]:
                rows = ["--train", tmp_path / f"{name}.jsonl"]
                stack.enter_context(started(tmp_path / f"{name}.txt", *join(name, *same, *rows)))
            liar = device(tmp_path / "liar", address, keys / "devices" / "liar", "b'1e30'")
            stack.enter_context(liar)
            rows = ["--train", tmp_path / "c.jsonl"]
            with started(tmp_path / "c.txt", *join("c", *same, *rows)):
                until(lambda: rounds() >= 1, out)
            until(lambda: rounds() >= 2, out)
            first.kill()
        with started(out, "serve", "--resume", fleet) as second:
            until(lambda: out.read_text().count("listening at") == 2, out)
            stack.enter_context(started(tmp_path / "c.txt", *join("c")))
            until(lambda: second.poll() is not None, out)
        assert second.returncode == 0, out.read_text()

    status = json.loads(prge("fleet", "status", fleet, "--json").stdout)
    assert (status["state"], status["rounds"], status["steps"]) == ("done", ROUNDS, ROUNDS * 3)
    devices = status["devices"]
    assert devices["liar"]["answered"] == 0
    assert len(devices["liar"]["refused"]) >= 2
    assert devices["a"]["answered"] == devices["b"]["answered"] == ROUNDS
    assert 2 <= devices["c"]["answered"] < ROUNDS
    assert (fleet / FINAL / "adapter_model.safetensors").is_file()

    # The devices' states equal the state that one process computes from the journal.
    journal = Journal(fleet / JOURNAL, writable=False)
    steps = (ROUNDS - 1) * 3
    expected = replay(journal, steps)
    for name in ("a", "b"):
        state = tmp_path / name / "fleets" / read_agreement(fleet).sha256.hex() / "state.safetensors"
        assert arrays(state.read_bytes()) == arrays(pack_state(expected))


def test_eight_simulated_devices_end_with_the_bits_of_the_journal(workshop: Path, tmp_path: Path) -> None:
    arguments: dict[str, object] = {
        "bundle": workshop / "bundle",
        "task": workshop / "task.yaml",
        "train": workshop / "train.jsonl",
        "test": workshop / "dev.jsonl",
        "out": tmp_path / "fleet",
        "json": tmp_path / "figures.json",
        "partition": "dirichlet:0.3",
    }
    counts = {"devices": 8, "per-round": 4, "rounds": 3, "local-steps": 4, "queries": 2}
    flags = [word for name, value in {**arguments, **counts}.items() for word in (f"--{name}", value)]
    prge("fleet", "simulate", *flags)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["bytes_up_per_device_step"] < 60
    assert [len(entry["answered"]) for entry in figures["curve"]] == [4, 4, 4]
    output = prge("replay", tmp_path / "fleet", "--out", tmp_path / "replayed").stdout
    assert "the same bits" in output
    prge("eval", *flags[:4], "--data", workshop / "dev.jsonl", "--adapter", tmp_path / "fleet")


def arrays(content: bytes) -> bytes:
    """Return the part of a packed state's safetensors after the header."""
    content = zlib.decompress(content)
    return content[8 + int.from_bytes(content[:8], "little") :]
