"""`prge fleet simulate`: a fleet in one process, on one engine; what is sent is made, checked and counted.

Devices differ in their rows, seeds and how far they are; all else of a device is one and the same here. That
devices which replay a journal end in the server's bits is not assumed but tested (tests/device_runner/fleet).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.fleet.agreement import Plan
from device_runner.fleet.coordinator import Coordinator, RoundReport
from device_runner.fleet.local import by_row, open_local, told
from device_runner.fleet.messages import Refusal
from device_runner.fleet.opening import ServerRows, ServerSettings, open_fleet
from device_runner.fleet.partition import parts
from device_runner.fleet.privacy.reported import COUNTED, exposure, spent
from device_runner.session.memory import watched_memory
from prge.errors import DivergenceError, RunError
from prge.files.bundle import open_bundle
from prge.files.documents import read_json
from prge.files.journal import Journal, Record
from prge.files.run_folder import JOURNAL, write_json
from prge.host.atomic import write_file
from prge.host.terminal import best_effort
from prge.learning.accounting import epsilon_of
from prge.learning.checkpoint import TrainingState
from prge.learning.estimators.directions import philox
from prge.learning.examples import tokens_sha256
from prge.rows.own_heads import task_of
from prge.verbs.inputs import TestRows, TrainRows
from prge.verbs.outputs import OutputFile
from prge.verbs.settings import parse_settings, part_of

_SEED_STREAM = 2**64 - 3
# What a line of the curve has of a round's record.
_TOLD = (
    *("answered", "refused", "shortened", "loss", "problem", "privacy_epsilon"),
    *("bytes_up", "bytes_down"),
)
_IDENTITY = "simulation.json"


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(ServerSettings):
    """Train a fleet of simulated devices in this process, and count what it sends."""

    train: TrainRows
    """Rows that are dealt out to the devices."""
    test: TestRows | None = None
    """Rows that score the start and the result, once each."""
    train_start: int = 0
    """Training rows to leave out at the file's beginning."""
    train_limit: int | None = None
    """Most training rows."""
    test_limit: int | None = None
    """Most test rows."""
    devices: int = 100
    """Simulated devices."""
    partition: str = "even"
    """How rows are dealt out: even, or dirichlet:0.3, by classes and unevenly."""
    json: OutputFile | None = None
    """File to write the figures to."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge fleet simulate --help`."""
    settings = parse_settings(SimulateSettings, argv, "prge fleet simulate")
    with best_effort(sys.stdout), watched_memory(settings.memory, print):
        figures = simulate(settings, lambda report: print(report, flush=True))
        print("\n".join(_lines(figures)), flush=True)
    if settings.json:
        write_json(settings.json, figures)
    return 0


def simulate(settings: SimulateSettings, tell: Callable[[RoundReport], None]) -> dict[str, Any]:
    """Train, or go on where a simulation in the same folder was killed; returns what it took.

    Raises:
        PrgeError: settings, rows or bundle can't be used, or the folder is of another simulation.
    """
    simulation = Simulation(settings)
    with open_fleet(simulation.settings, simulation.opened) as fleet:
        simulation.go_on(fleet)
        before = simulation.test(fleet.first_state())
        while not fleet.finished:
            tell(simulation.take_round(fleet))
        fleet.write_final()
        after = simulation.test(fleet.best_state())
        return {**simulation.figures(fleet), "before": before, "after": after}


def _dated(settings: SimulateSettings) -> SimulateSettings:
    """The settings with the date that the simulation of their folder began with, or with today's."""
    path = settings.out / _IDENTITY
    stored = read_json(path).get("date") if path.is_file() else None
    return replace(settings, date=settings.date or stored).dated()


class Simulation:
    """The devices of a fleet: their rows and seeds, and one engine for all."""

    def __init__(self, settings: SimulateSettings) -> None:
        self.settings = settings = _dated(settings)
        self.plan = plan = part_of(Plan, settings)
        bundle = open_bundle(settings.bundle)
        steps = replace(
            plan.run_settings(settings.bundle, settings.train, settings.out),
            task=settings.task,
            columns=settings.columns,
            date=settings.date,
            control_tokens=settings.control_tokens,
            append_eos=settings.append_eos,
            train_start=settings.train_start,
            train_limit=settings.train_limit,
            engine=settings.engine,
            threads=settings.threads,
            memory=settings.memory,
        )
        self.local, self.opened = open_local(plan, bundle, steps)
        self.dealt = parts(self.local.examples, settings.devices, settings.partition, settings.seed)
        names = ("devices", "partition", "train_start", "train_limit", "control_tokens", "append_eos", "date")
        self.identity = {
            **{name: getattr(settings, name) for name in names},
            "train": self.local.data,
            "tokens": tokens_sha256(self.local.examples),
        }
        task = task_of(bundle, settings.task)
        self.rows = ServerRows(bundle, task, self.opened)
        seeds = philox(plan.seed, 0, _SEED_STREAM, settings.devices) >> np.uint64(1)
        self.seeds = [int(seed) for seed in seeds]
        self.taken = [0] * settings.devices
        self.seconds: dict[int, Record] = {}

    def go_on(self, fleet: Coordinator) -> None:
        """Bring the devices to where the fleet's rounds have left them.

        Raises:
            RunError: the folder is of a fleet with other devices.
        """
        path = fleet.folder / _IDENTITY
        if fleet.round == 0:
            write_file(path, json.dumps(self.identity).encode())
        elif not path.is_file() or read_json(path) != self.identity:
            raise RunError(
                f"{fleet.folder} is a fleet with other devices or rows",
                remedy="give another folder with --out",
                code="rows-differ",
            )
        for record in fleet.over:
            for device in {*record["answered"], *record["silent"], *map(int, record["refused"])}:
                self.taken[device] += self.plan.local_steps

    def take_round(self, fleet: Coordinator) -> RoundReport:
        """Ask the round's devices, and hand their answers to the server."""
        begin = time.perf_counter()
        tasks = fleet.tasks(range(len(self.seeds)))
        middle, number = time.perf_counter(), fleet.round
        answers = {device: said for device in tasks if (said := self._answer(fleet, device)) is not None}
        after = time.perf_counter()
        report = fleet.receive(answers)
        self.seconds[number] = {
            "device_seconds": (after - middle) / len(tasks),
            "server_seconds": time.perf_counter() - after + middle - begin,
        }
        return report

    def _answer(self, fleet: Coordinator, device: int) -> bytes | None:
        """What a device says; None from one whose steps diverge."""
        examples, plan, before = self.dealt[device], self.plan, self.taken[device]
        taken = self.taken[device] = before + plan.local_steps
        privacy_epsilon = 0.0
        if plan.noise:
            rows = len(by_row(examples))
            times = taken if plan.unit == "owner" else exposure(taken, min(plan.examples, rows), rows)
            privacy_epsilon = epsilon_of([(COUNTED * plan.noise, times)], plan.delta)
        if reason := spent(privacy_epsilon, plan.most_privacy_epsilon):
            return Refusal(reason).to_bytes()
        with tempfile.TemporaryDirectory() as scratch, Journal(Path(scratch) / JOURNAL) as journal:
            try:
                local = replace(self.local, examples=examples)
                learnt = local.steps(fleet.state, journal, self.seeds[device], before)
            except DivergenceError:
                return None
        if learnt is None:
            return None
        return told(fleet.agreement, fleet.round, fleet.state.step, privacy_epsilon, learnt)

    def test(self, state: TrainingState) -> Record:
        """Scores of the test rows; none without any."""
        settings = self.settings
        if settings.test is None:
            return {}
        return self.rows.scorer(self.rows.examples(settings, settings.test, "test", settings.test_limit))(
            state
        )

    def figures(self, fleet: Coordinator) -> dict[str, Any]:
        """A line for every round, by the journal, and totals; seconds are of this process's rounds."""
        curve = [
            {
                "number": number,
                **{name: record[name] for name in _TOLD},
                "evaluation": fleet.evaluation_after(record) or {},
                **self.seconds.get(number, {}),
            }
            for number, record in enumerate(fleet.over)
        ]
        up, down = (sum(entry[name] for entry in curve) for name in ("bytes_up", "bytes_down"))
        answered = sum(len(entry["answered"]) for entry in curve)
        return {
            "plan": asdict(self.plan),
            **self.identity,
            "rows": {"fewest": min(map(len, self.dealt)), "most": max(map(len, self.dealt))},
            "bytes_up": up,
            "bytes_down": down,
            "bytes_up_per_device_step": up / max(answered * self.plan.local_steps, 1),
            **{
                f"{name}_per_round": float(np.mean([each[name] for each in self.seconds.values()] or [0.0]))
                for name in ("device_seconds", "server_seconds")
            },
            "privacy_epsilon": max((entry["privacy_epsilon"] for entry in curve), default=0.0),
            "curve": curve,
        }


def _lines(figures: Record) -> list[str]:
    """The figures as a user reads them."""
    lines = [
        f"{name:<6} "
        + "  ".join(f"{key} {value:.4g}" for key, value in figures[name].items() if key != "value")
        for name in ("before", "after")
        if figures[name]
    ]
    return [
        *lines,
        f"up     {figures['bytes_up']:,} bytes, {figures['bytes_up_per_device_step']:.4g} a device and step",
        f"down   {figures['bytes_down']:,} bytes",
        f"a round takes a device {figures['device_seconds_per_round']:.3g} s, "
        f"the server {figures['server_seconds_per_round']:.3g} s",
    ]
