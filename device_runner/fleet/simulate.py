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

from device_runner.engines.opening import Engines, open_engines
from device_runner.fleet.agreement import Plan, plan_of
from device_runner.fleet.coordinator import RoundReport
from device_runner.fleet.local import Learnt, Local, Own, sized
from device_runner.fleet.messages import Refusal
from device_runner.fleet.opening import ServerRows, ServerSettings, open_fleet
from device_runner.fleet.partition import parts
from device_runner.fleet.privacy import passes, spent
from device_runner.session.inputs import read_inputs
from device_runner.session.settings import bundle_for
from prge.accounting import epsilon_of
from prge.atomic import write_file
from prge.bundle import Bundle, open_bundle
from prge.checkpoint import TrainingState
from prge.directions import philox
from prge.errors import ConfigError, DivergenceError, RunError
from prge.journal import Journal, Record
from prge.rows.task import Task
from prge.run_folder import JOURNAL
from prge.settings import parse_settings
from prge.terminal import best_effort

DESCRIPTION = "Train a fleet of simulated devices in this process, and count what it sends."
PRESETS = Path(__file__).parent / "presets"
_SEED_STREAM = 2**64 - 3
_TOLD = (
    *("number", "answered", "refused", "shortened", "loss", "epsilon"),
    *("bytes_up", "bytes_down", "evaluation"),
)


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(ServerSettings):
    """Train a fleet of simulated devices."""

    train: Path
    """Rows that are dealt out to the devices."""
    test: Path | None = None
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
    json: Path | None = None
    """File to write the figures to."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge fleet simulate --help`."""
    settings = parse_settings(
        SimulateSettings, with_preset(argv), "prge fleet simulate", description=DESCRIPTION
    )
    with best_effort(sys.stdout):
        figures = simulate(settings, lambda report: print(report, flush=True))
        print("\n".join(_lines(figures)), flush=True)
    if settings.json:
        write_file(settings.json, (json.dumps(figures, indent=2) + "\n").encode())
    return 0


def with_preset(argv: Sequence[str]) -> list[str]:
    """The words with those of `--preset NAME` in its place: the settings of a file in presets/."""
    words = list(argv)
    if "--preset" not in words:
        return words
    at = words.index("--preset")
    name = words[at + 1] if at + 1 < len(words) else ""
    known = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            "these settings can't be used:",
            [f"--preset is {name!r}"],
            remedy=f"choose one of {', '.join(known)}",
        )
    return ["--config", str(PRESETS / f"{name}.yaml"), *words[:at], *words[at + 2 :]]


def simulate(settings: SimulateSettings, tell: Callable[[RoundReport], None]) -> dict[str, Any]:
    """Train, and return what it took: a line for every round, and totals.

    Raises:
        PrgeError: settings, rows or bundle can't be used.
    """
    plan = plan_of(settings)
    bundle = open_bundle(settings.bundle)
    steps = replace(
        plan.run_settings(settings.bundle, settings.train, settings.out),
        task=settings.task,
        columns=settings.columns,
        train_start=settings.train_start,
        train_limit=settings.train_limit,
    )
    inputs = read_inputs(bundle_for(steps, bundle), steps)
    dealt = parts(inputs.train, settings.devices, settings.partition, settings.seed)
    steps, bundle = sized(plan, steps, bundle, inputs.train, settings.memory)
    engines = open_engines(bundle, settings.threads, settings.engine, settings.memory)
    local = Local(plan, steps, bundle, engines.step, inputs.train, inputs.tokenizer.pad_id)
    seeds = philox(plan.seed, 0, _SEED_STREAM, 2 * settings.devices).reshape(-1, 2) >> np.uint64(1)
    own = [Own(int(seed), int(rows_seed), 0) for seed, rows_seed in seeds]
    curve: list[Record] = []
    with open_fleet(settings, engines) as fleet, tempfile.TemporaryDirectory() as scratch:
        if fleet.round:
            raise RunError(f"{settings.out} holds a fleet already", remedy="give another folder with --out")
        test = _scorer(settings, bundle, inputs.task, engines, inputs.tokenizer.pad_id)
        before = test(fleet.state)
        while not fleet.finished:
            begin = time.perf_counter()
            tasks = fleet.tasks(range(settings.devices))
            middle = time.perf_counter()
            answers = {}
            for device in tasks:
                one, mine = replace(local, examples=dealt[device]), own[device]
                learnt = _round(one, fleet.state, mine, Path(scratch) / JOURNAL)
                own[device] = replace(mine, taken=mine.taken + plan.local_steps)
                epsilon = _epsilon(plan, own[device].taken, len(one.examples))
                if reason := spent(epsilon, plan.most_epsilon):
                    answers[device] = Refusal(reason).to_bytes()
                elif learnt is not None:
                    said = learnt.told(fleet.agreement, fleet.round, fleet.state.step, mine, epsilon)
                    answers[device] = said.to_bytes()
            after = time.perf_counter()
            report = fleet.receive(answers)
            tell(report)
            curve.append(
                {
                    **{name: getattr(report, name) for name in _TOLD},
                    "device_seconds": (after - middle) / len(tasks),
                    "server_seconds": time.perf_counter() - after + middle - begin,
                }
            )
        fleet.write_final()
        result = test(fleet.best_state())
    up, down = (sum(entry[name] for entry in curve) for name in ("bytes_up", "bytes_down"))
    answered = sum(len(entry["answered"]) for entry in curve)
    return {
        "plan": asdict(plan),
        "devices": settings.devices,
        "partition": settings.partition,
        "rows": {"fewest": min(map(len, dealt)), "most": max(map(len, dealt))},
        "before": before,
        "after": result,
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_per_device_step": up / max(answered * plan.local_steps, 1),
        "device_seconds_per_round": float(np.mean([entry["device_seconds"] for entry in curve])),
        "server_seconds_per_round": float(np.mean([entry["server_seconds"] for entry in curve])),
        "epsilon": max(entry["epsilon"] for entry in curve),
        "curve": curve,
    }


def _round(local: Local, start: TrainingState, own: Own, scratch: Path) -> Learnt | None:
    """A device's part of a round; None from one whose steps diverge."""
    scratch.unlink(missing_ok=True)
    try:
        with Journal(scratch) as journal:
            return local.steps(start, journal, own)
    except DivergenceError:
        return None


def _epsilon(plan: Plan, steps: int, rows: int) -> float:
    return epsilon_of([(plan.noise, passes(steps, plan.examples, rows))], plan.delta) if plan.noise else 0.0


def _scorer(
    settings: SimulateSettings, bundle: Bundle, task: Task | None, engines: Engines, pad: int
) -> Callable[[TrainingState], Record]:
    """What scores a state on the test rows; says nothing without any."""
    if settings.test is None:
        return lambda state: {}
    rows = ServerRows(bundle, task, engines, pad)
    return rows.scorer(rows.examples(settings, settings.test, "test", settings.test_limit))


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
