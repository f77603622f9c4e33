"""Run a server and three devices as processes of this machine, with TLS and keys (scripts/fleet_demo.sh).

Each device has a third of the demo's rows. The device `killed` is killed after some rounds and restarted; the
device `liar` sends 1e30 in some rounds. At the end every device has the server's bits, and so has a replay of
the server's journal. `--liars` then trains simulated fleets of four, of which one tells each lie of
fleet_liars.py, and compares them with the three honest devices alone. This takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fleet_liars import LIES, RESULT_TYPES, study

from device_runner.fleet.coordinator import read_agreement
from device_runner.fleet.device import FLEETS, STATE, DeviceSettings, answer, make_device
from device_runner.fleet.messages import RoundResult, RoundTask, parse_reply
from device_runner.fleet.network.client import join
from device_runner.fleet.network.keys import DeviceKeys
from device_runner.fleet.state import unpack_state
from device_runner.session.replay import replay
from prge.cli.subprocesses import output_of, read_json, verb_command
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal
from prge.formats.run_folder import FINAL, JOURNAL

DATA = Path(__file__).resolve().parent.parent / "server_export" / "demo_data"
HONEST, KILLED, LIAR = "honest", "killed", "liar"
LYING_ROUNDS = (2, 5)
ROUNDS, STEPS = 12, 40
PLAN = {"rounds": ROUNDS, "local_steps": STEPS, "queries": 8, "learning_rate": 0.01, "seed": 42}
PATIENCE = 300.0


def main() -> None:
    """Parse the flags, run the fleet and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--out", type=Path, help="folder to keep; default: a temporary folder")
    parser.add_argument(
        "--liars", action="store_true", help="also simulate one liar among four devices, for each lie"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        demo = FleetDemo(arguments.out or Path(scratch))
        figures = demo.run()
        if arguments.liars:
            figures |= demo.with_liars()
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


class FleetDemo:
    """The fleet with its folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.console = folder, folder / "server.txt"
        self.bundle, self.fleet = folder / "bundle", folder / "fleet"
        self.same = {"bundle": self.bundle, "task": DATA / "task.yaml"}

    def run(self) -> dict[str, Any]:
        """Run everything from the export to the figures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        prge("export", model=DATA / "model", out=self.bundle, roles="jvp")
        prge("fleet", "keys", self.folder / "keys", "--devices", HONEST, KILLED, LIAR)
        lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        for index, name in enumerate((HONEST, KILLED, LIAR)):
            (self.folder / f"{name}.jsonl").write_text("".join(lines[index::3]), encoding="utf-8")
        before = self._score("before")
        begin = time.perf_counter()
        self._train()
        seconds = time.perf_counter() - begin
        after = self._score("after", adapter=self.fleet)
        status = json.loads(prge("fleet", "status", self.fleet, "--json"))
        answers = sum(device["answered"] for device in status["devices"].values())
        refused = status["devices"][LIAR]["refused"]
        return {
            "accuracy_before": before,
            "accuracy_after": after,
            "bytes_up_per_device_step": status["bytes_up"] / (answers * STEPS),
            "same_bits": self._has_the_same_bits(),
            "liar_refused": len(refused) == len(LYING_ROUNDS)
            and all("1e+30" in reason for reason in refused),
            "rounds": status["rounds"],
            "bytes_up": status["bytes_up"],
            "bytes_down": status["bytes_down"],
            "seconds": round(seconds, 1),
        }

    def with_liars(self) -> dict[str, Any]:
        """Return accuracies with each lie, and the largest loss of accuracy against honest devices alone."""
        bundle = self.folder / "bundle-of-liars"
        prge("export", "--roles", "jvp", "backward", model=DATA / "model", out=bundle)
        plans = {result_type: {**plan, "combine": "trimmed"} for result_type, plan in RESULT_TYPES.items()}
        figures = study(bundle, 4, 1, plans, LIES)
        costs = [
            table["honest ones alone"]["accuracy"] - row["accuracy"]
            for table in figures.values()
            for row in table.values()
        ]
        return {"liars": figures, "a_liar_costs_at_most": max(costs)}

    def _train(self) -> None:
        """Run all rounds; one device is killed after the third and restarted after the next."""
        address = f"127.0.0.1:{_free_port()}"
        plan = flags({**self.same, **PLAN, "out": self.fleet, "port": address.rpartition(":")[2]})
        server_flags = ["--keys", self.folder / "keys" / "server", "--wait-for", 3, "--seconds", 20]
        with ExitStack() as stack:
            server = stack.enter_context(
                start_process(self.console, *verb_command("fleet", "serve", *plan, *server_flags))
            )
            self._until("listening at", 1)
            stack.enter_context(start_process(self._log(HONEST), *self._join(address, HONEST)))
            stack.enter_context(
                start_process(self._log(LIAR), sys.executable, __file__, LIAR, self.folder, address)
            )
            with start_process(self._log(KILLED), *self._join(address, KILLED)):
                self._until("\nround ", 3)
            self._until("\nround ", 4)
            stack.enter_context(start_process(self._log(KILLED), *self._join(address, KILLED)))
            self._until("\nround ", ROUNDS)
            server.wait(PATIENCE)
        print(self.console.read_text(encoding="utf-8"), file=sys.stderr)

    def _join(self, address: str, name: str) -> list[str]:
        rows, keys = self.folder / f"{name}.jsonl", self.folder / "keys" / "devices" / name
        device_folder = {**self.same, "train": rows, "folder": self.folder / name, "threads": 1}
        return verb_command("fleet", "join", *flags({**device_folder, "server": address, "keys": keys}))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def _until(self, text: str, times: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.console.read_text(encoding="utf-8").count(text) < times:
            if time.monotonic() > deadline:
                sys.exit(f"the server made no progress:\n{self.console.read_text(encoding='utf-8')}")
            time.sleep(0.2)

    def _score(self, name: str, **adapter: Path) -> float:
        path = self.folder / f"{name}.json"
        prge("eval", **self.same, data=DATA / "test.jsonl", json=path, **adapter)
        return float(read_json(path)["accuracy"])

    def _has_the_same_bits(self) -> bool:
        """Compare the devices' states, the server's adapter, and the replayed journal."""
        agreement, bundle = read_agreement(self.fleet), open_bundle(self.bundle)
        with Journal(self.fleet / JOURNAL, writable=False) as journal:
            for name in (HONEST, KILLED, LIAR):
                content = (self.folder / name / FLEETS / agreement.sha256.hex() / STATE).read_bytes()
                state = unpack_state(content, agreement.plan, bundle.chain.modules, bundle.chain.width, 0)
                expected = replay(journal, state.step).adapter.values
                if not state.step or not np.array_equal(state.adapter.values, expected):
                    return False
        reply = prge("replay", self.fleet, "--out", self.folder / "replayed")
        return "the same bits" in reply and (self.fleet / FINAL).is_dir()


def lie(folder: Path, address: str) -> None:
    """Act as a device that sends an absurd number in some rounds."""
    device_folder = folder / LIAR
    settings = DeviceSettings(
        folder / "bundle", folder / f"{LIAR}.jsonl", task=str(DATA / "task.yaml"), threads=1
    )
    make_device(device_folder, settings)

    def answer_with_lies(content: bytes) -> bytes:
        reply = parse_reply(honest := answer(device_folder, content))
        if not isinstance(reply, RoundResult) or RoundTask.parse(content).number not in LYING_ROUNDS:
            return honest
        return replace(reply, values=np.full_like(reply.values, 1e30)).to_bytes()

    keys = DeviceKeys.open(folder / "keys" / "devices" / LIAR)
    join(device_folder, address, keys, answer_with_lies)


def prge(*arguments: object, **settings: Any) -> str:
    """Call a verb and return its output."""
    return output_of(*arguments, *flags(settings))


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as command-line arguments."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def start_process(console: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a background process and kill it at the end of the context."""
    with console.open("ab") as stream:
        process = subprocess.Popen([*map(str, arguments)], stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == [LIAR]:
        lie(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
