"""Measure how much lying devices reduce a fleet's accuracy, compared with its honest devices alone.

    python scripts/fleet_liars.py --bundle BUNDLE --json liars.json [--devices 4 --liars 1]

The demo's rows are distributed to simulated devices, of which the last ones lie in every round. Tasks and
results are the bytes of a real network, and the server is the one of `prge fleet serve`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.fleet.coordinator import Coordinator, RoundReport
from device_runner.fleet.messages import RoundResult, TaskRefusal, parse_reply
from device_runner.fleet.server import open_fleet
from device_runner.fleet.simulate import SimulateSettings, Simulation
from prge.engine import FloatArray

DATA = Path(__file__).resolve().parent.parent / "server_export" / "demo_data"
# Returns a reply from the liar's honest result and those of all honest devices.
Lie = Callable[[RoundResult, Sequence[RoundResult]], bytes | None]


def _values(make: Callable[[FloatArray, FloatArray], Any]) -> Lie:
    """Return a lie about values, from the liar's own [n] and the others' [devices, n]."""

    def lie(own: RoundResult, others: Sequence[RoundResult]) -> bytes:
        values = make(own.values, np.array([other.values for other in others]))
        return replace(own, values=np.asarray(values, np.float32)).to_bytes()

    return lie


def _noise(own: FloatArray, others: FloatArray) -> FloatArray:
    random = np.random.default_rng(len(own) + int(abs(own[0]) * 1e6))
    return np.asarray(random.normal(size=own.shape) * 4 * np.abs(own).mean(), np.float32)


LIES: dict[str, Lie] = {
    "1e30": _values(lambda own, others: np.full_like(own, 1e30)),
    "not a number": _values(lambda own, others: np.full_like(own, np.nan)),
    "999,999 everywhere": _values(lambda own, others: np.full_like(own, 999_999)),
    "1 everywhere": _values(lambda own, others: np.ones_like(own)),
    "zeros": _values(lambda own, others: np.zeros_like(own)),
    "a thousandfold": _values(lambda own, others: 1000 * own),
    "the opposite": _values(lambda own, others: -own),
    "fourfold opposite of the others' mean": _values(lambda own, others: -4 * others.mean(0)),
    "noise": _values(_noise),
    "a copy of another's": _values(lambda own, others: others[0]),
    "the lowest of the others'": _values(lambda own, others: others.min(0)),
    "1.5 deviations from the others' mean": _values(lambda own, others: others.mean(0) - 1.5 * others.std(0)),
    "its values in other places": _values(lambda own, others: own[::-1]),
    "4 billion examples": lambda own, others: replace(own, examples=2**32 - 1).to_bytes(),
    "a loss of 9,999": lambda own, others: replace(own, losses=np.full_like(own.losses, 9999)).to_bytes(),
    "a loss of -9,999": lambda own, others: replace(own, losses=np.full_like(own.losses, -9999)).to_bytes(),
    "too few values": lambda own, others: replace(own, values=own.values[:-1]).to_bytes(),
    "another round": lambda own, others: replace(own, number=own.number + 1).to_bytes(),
    "garbage": lambda own, others: b"\x01\x01garbage",
    "no privacy left": lambda own, others: TaskRefusal("privacy_epsilon would be 9").to_bytes(),
}
SILENT: Lie = lambda own, others: None  # noqa: E731


class Fleet(Simulation):
    """A simulated fleet whose last devices lie."""

    def __init__(self, settings: SimulateSettings, liars: int, lie: Lie) -> None:
        super().__init__(settings)
        self.liars, self.lie = range(settings.devices - liars, settings.devices), lie

    def run_round(self, fleet: Coordinator) -> RoundReport:
        """Let honest devices reply, then liars, who know all other results."""
        tasks = fleet.tasks(range(len(self.seeds)))
        replies = {device: self._answer(fleet, device) for device in tasks}
        parsed = {device: parse_reply(content) for device, content in replies.items() if content}
        results = {device: each for device, each in parsed.items() if isinstance(each, RoundResult)}
        others = [each for device, each in results.items() if device not in self.liars]
        answers = {
            device: self.lie(results[device], others) if device in self.liars else replies[device]
            for device in results
        }
        return fleet.receive({device: each for device, each in answers.items() if each is not None})


def train_fleet(settings: SimulateSettings, liars: int, lie: Lie) -> dict[str, Any]:
    """Train a fleet; return its figures and its last reported problems."""
    simulation = Fleet(settings, liars, lie)
    with open_fleet(settings, simulation.opened) as fleet:
        simulation.resume(fleet)
        while not fleet.finished:
            report = simulation.run_round(fleet)
        after = simulation.test(fleet.best_state())
    return {
        "accuracy": after["accuracy"],
        "loss": after["loss"],
        "rounds": fleet.round,
        "refused": next(iter(report.refused.values()), ""),
        "problem": report.problem,
    }


def study(
    bundle: Path, devices: int, liars: int, plans: Mapping[str, Mapping[str, Any]], lies: Mapping[str, Lie]
) -> dict[str, Any]:
    """Train with every plan: honest devices alone, all of them honest, and with each lie."""
    figures: dict[str, Any] = {}
    for name, plan in plans.items():
        figures[name] = {}
        honest = {"honest ones alone": (liars, SILENT), **({"all honest": (0, SILENT)} if liars else {})}
        for lie, (count, make) in {**honest, **{lie: (liars, make) for lie, make in lies.items()}}.items():
            with tempfile.TemporaryDirectory() as scratch:
                settings = SimulateSettings(
                    bundle=bundle,
                    out=Path(scratch) / "fleet",
                    task=str(DATA / "task.yaml"),
                    train=DATA / "train.jsonl",
                    test=DATA / "test.jsonl",
                    devices=devices,
                    per_round=devices,
                    threads=1,
                    **plan,
                )
                figures[name][lie] = train_fleet(settings, count, make)
            print(f"{name}, {lie}: {figures[name][lie]}", file=sys.stderr, flush=True)
    return figures


# The first plan is that of the demo's fleet of processes.
RESULT_TYPES: dict[str, dict[str, Any]] = {
    "scalars": {"rounds": 12, "local_steps": 40, "queries": 8, "learning_rate": 0.01},
    "changes": {"rounds": 12, "local_steps": 10, "estimator": "exact", "learning_rate": 0.01},
}


def main() -> None:
    """Parse the flags, run the fleets and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        required=True,
        help="bundle of the demo's model with the roles jvp and backward",
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--combine", nargs="+", default=["trimmed"])
    parser.add_argument("--partition", default="even")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--kinds", nargs="+", default=list(RESULT_TYPES), choices=list(RESULT_TYPES))
    parser.add_argument("--lies", nargs="*", default=list(LIES), choices=list(LIES))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    common = {"partition": options.partition}
    plans = {
        f"{result_type}, {combine}, seed {seed}": {
            **RESULT_TYPES[result_type],
            **common,
            "combine": combine,
            "seed": seed,
        }
        for result_type in options.kinds
        for combine in options.combine
        for seed in options.seeds
    }
    figures = study(
        options.bundle, options.devices, options.liars, plans, {lie: LIES[lie] for lie in options.lies}
    )
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
