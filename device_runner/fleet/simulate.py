"""`prge fleet simulate`: a fleet in one process, on one engine; messages are encoded, checked and counted.

Devices differ in their rows, seeds and progress; they share everything else. Tests check that devices which
replay a journal reach the server's bits (tests/device_runner/fleet).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from device_runner.fleet.agreement import Plan
from device_runner.fleet.coordinator import Coordinator, RoundReport
from device_runner.fleet.local_round import by_row, encode_result, open_local
from device_runner.fleet.messages import TaskRefusal
from device_runner.fleet.partition import partition_examples
from device_runner.fleet.privacy.reported import EFFECTIVE_NOISE, budget_refusal, max_participations
from device_runner.fleet.server import ServerRows, ServerSettings, open_fleet
from device_runner.session.memory import watched_memory
from prge.cli.inputs import TestRows, TrainRows
from prge.cli.outputs import OutputFile
from prge.cli.settings import parse_settings, select_settings
from prge.errors import DivergenceError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.documents import read_json
from prge.formats.journal import Journal, Record
from prge.formats.run_folder import JOURNAL, write_json
from prge.objectives.examples import tokens_sha256
from prge.system.atomic import write_file
from prge.system.terminal import best_effort
from prge.training.checkpoint import TrainingState
from prge.training.checkpoint_heads import load_bundle_task
from prge.training.estimators.directions import philox
from prge.training.privacy_accounting import epsilon_of

_SEED_STREAM = 2**64 - 3
# Fields of a round's record that an entry of the curve has.
_CURVE_FIELDS = (
    *("answered", "refused", "shortened", "loss", "problem", "privacy_epsilon"),
    *("bytes_up", "bytes_down"),
)
_IDENTITY = "simulation.json"


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(ServerSettings):
    """Train a fleet of simulated devices in this process, and count the bytes that it sends."""

    EXAMPLE: ClassVar = "--bundle bundle --train rows.jsonl --out fleet"

    train: TrainRows
    """Rows to partition among the devices."""
    test: TestRows | None = None
    """Rows that evaluate the initial and the final state, once each."""
    train_start: int = 0
    """Training rows to skip at the beginning of the file."""
    train_limit: int | None = None
    """Maximum number of training rows."""
    test_limit: int | None = None
    """Maximum number of test rows."""
    devices: int = 100
    """Number of simulated devices."""
    partition: str = "even"
    """How to partition the rows: even, or dirichlet:0.3 (unevenly, by class)."""
    json: OutputFile | None = None
    """File to write the figures to, as JSON."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge fleet simulate --help`."""
    settings = parse_settings(SimulateSettings, argv, "prge fleet simulate")
    with watched_memory(settings.memory, _print):
        figures = simulate(settings, _print)
        _print("\n".join(_lines(figures)))
    if settings.json:
        write_json(settings.json, figures)
    return 0


def _print(line: object) -> None:
    with best_effort(sys.stdout):
        print(line, flush=True)


def simulate(settings: SimulateSettings, on_round: Callable[[RoundReport], None]) -> dict[str, Any]:
    """Train a simulated fleet, or resume a simulation that was killed in the same folder.

    Args:
        settings: the settings of the simulation.
        on_round: called with the report of each round.

    Returns:
        The figures of the simulation.

    Raises:
        PrgeError: settings, rows or bundle can't be used, or the folder belongs to another simulation.
    """
    simulation = Simulation(settings)
    with open_fleet(simulation.settings, simulation.opened) as fleet:
        simulation.resume(fleet)
        before = simulation.test(fleet.first_state())
        while not fleet.finished:
            on_round(simulation.run_round(fleet))
        fleet.write_final()
        after = simulation.test(fleet.best_state())
        return {**simulation.figures(fleet), "before": before, "after": after}


def _dated(settings: SimulateSettings) -> SimulateSettings:
    """Return the settings with the date that the simulation of their folder began with, or with today's."""
    path = settings.out / _IDENTITY
    stored = read_json(path).get("date") if path.is_file() else None
    return replace(settings, date=settings.date or stored).with_date()


class Simulation:
    """The devices of a simulated fleet: their rows and seeds, and one engine for all."""

    def __init__(self, settings: SimulateSettings) -> None:
        self.settings = settings = _dated(settings)
        self.plan = plan = select_settings(Plan, settings)
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
        self.device_examples = partition_examples(
            self.local.examples, settings.devices, settings.partition, settings.seed
        )
        names = ("devices", "partition", "train_start", "train_limit", "control_tokens", "append_eos", "date")
        self.identity = {
            **{name: getattr(settings, name) for name in names},
            "train": self.local.data,
            "tokens": tokens_sha256(self.local.examples),
        }
        task = load_bundle_task(bundle, settings.task)
        self.rows = ServerRows(bundle, task, self.opened)
        seeds = philox(plan.seed, 0, _SEED_STREAM, settings.devices) >> np.uint64(1)
        self.seeds = [int(seed) for seed in seeds]
        self.steps_taken = [0] * settings.devices
        self.seconds: dict[int, Record] = {}

    def resume(self, fleet: Coordinator) -> None:
        """Advance the devices to where the fleet's finished rounds have left them.

        Raises:
            RunError: the folder belongs to a fleet with other devices.
        """
        path = fleet.folder / _IDENTITY
        if fleet.round == 0:
            write_file(path, json.dumps(self.identity).encode())
        elif not path.is_file() or read_json(path) != self.identity:
            raise RunError(
                f"{fleet.folder} is a fleet with other devices or rows.",
                remedy="Give another folder with --out.",
                code="rows-differ",
            )
        for record in fleet.finished_rounds:
            for device in {*record["answered"], *record["silent"], *map(int, record["refused"])}:
                self.steps_taken[device] += self.plan.local_steps

    def run_round(self, fleet: Coordinator) -> RoundReport:
        """Run one round: simulate its devices, and hand their results to the server."""
        begin = time.perf_counter()
        tasks = fleet.tasks(range(len(self.seeds)))
        tasks_at, number = time.perf_counter(), fleet.round
        answers = {
            device: message for device in tasks if (message := self._answer(fleet, device)) is not None
        }
        answers_at = time.perf_counter()
        report = fleet.receive(answers)
        self.seconds[number] = {
            "device_seconds": (answers_at - tasks_at) / len(tasks),
            "server_seconds": time.perf_counter() - answers_at + tasks_at - begin,
        }
        return report

    def _answer(self, fleet: Coordinator, device: int) -> bytes | None:
        """Return a device's message; None if its steps diverge."""
        examples, plan, steps_before = self.device_examples[device], self.plan, self.steps_taken[device]
        steps_taken = self.steps_taken[device] = steps_before + plan.local_steps
        privacy_epsilon = 0.0
        if plan.noise:
            rows = len(by_row(examples))
            participation_count = (
                steps_taken
                if plan.unit == "owner"
                else max_participations(steps_taken, min(plan.examples, rows), rows)
            )
            privacy_epsilon = epsilon_of([(EFFECTIVE_NOISE * plan.noise, participation_count)], plan.delta)
        if reason := budget_refusal(privacy_epsilon, plan.most_privacy_epsilon):
            return TaskRefusal(reason).to_bytes()
        with tempfile.TemporaryDirectory() as scratch, Journal(Path(scratch) / JOURNAL) as journal:
            try:
                local = replace(self.local, examples=examples)
                update = local.train(fleet.state, journal, self.seeds[device], steps_before)
            except DivergenceError:
                return None
        if update is None:
            return None
        return encode_result(fleet.agreement, fleet.round, fleet.state.step, privacy_epsilon, update)

    def test(self, state: TrainingState) -> Record:
        """Return the scores on the test rows; empty without test rows."""
        settings = self.settings
        if settings.test is None:
            return {}
        return self.rows.scorer(self.rows.examples(settings, settings.test, "test", settings.test_limit))(
            state
        )

    def figures(self, fleet: Coordinator) -> dict[str, Any]:
        """Return one entry per round of the journal, and totals; seconds cover only this process's rounds."""
        curve = [
            {
                "number": number,
                **{name: record[name] for name in _CURVE_FIELDS},
                "evaluation": fleet.evaluation_after(record) or {},
                **self.seconds.get(number, {}),
            }
            for number, record in enumerate(fleet.finished_rounds)
        ]
        up, down = (sum(entry[name] for entry in curve) for name in ("bytes_up", "bytes_down"))
        answered = sum(len(entry["answered"]) for entry in curve)
        return {
            "plan": asdict(self.plan),
            **self.identity,
            "rows": {
                "fewest": min(map(len, self.device_examples)),
                "most": max(map(len, self.device_examples)),
            },
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
    """Format the figures for the terminal."""
    lines = [
        f"{name:<6} "
        + "  ".join(f"{key} {value:.4g}" for key, value in figures[name].items() if key != "value")
        for name in ("before", "after")
        if figures[name]
    ]
    return [
        *lines,
        f"up     {figures['bytes_up']:,} bytes, {figures['bytes_up_per_device_step']:.4g} per device step",
        f"down   {figures['bytes_down']:,} bytes",
        f"seconds per round: {figures['device_seconds_per_round']:.3g} on a device, "
        f"{figures['server_seconds_per_round']:.3g} on the server",
    ]
