"""What a fleet's server takes for a round, by the number of devices that answer it.

    python scripts/bench/fleet_server.py --bundle BUNDLE --devices 10 100 1000 --rounds 50 --json fleet.json

Every device answers every round; what it answers are random numbers, for only the server is measured: making
tasks, reading, checking and combining answers, the journal, the checkpoint. Prints JSON by kind of message
and devices: seconds of the median and of the last round, megabytes that the process grew by, of the journal,
and bytes of a task in the last round.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from reports import parser_of, report

from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.coordinator import Coordinator, RoundsFlags, begin_fleet
from device_runner.fleet.messages import RoundResult
from prge.formats.bundle import open_bundle
from prge.formats.peft import read_peft
from prge.formats.run_folder import JOURNAL
from prge.system.memory import resident_bytes

PLANS: Mapping[str, dict[str, Any]] = {
    "scalars": {"share_directions": True, "queries": 16},
    "changes of adapters": {"estimator": "exact"},
}
LOCAL_STEPS = 10


def rounds(source: Path, folder: Path, plan: Plan, devices: int) -> dict[str, float]:
    """Take a plan's rounds with so many devices."""
    bundle = open_bundle(source)
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    agreement = Agreement("bench", plan, bundle.sha256)
    begin_fleet(folder, bundle, agreement, adapter)
    size = LOCAL_STEPS * int(np.prod(plan.shape)) if plan.sends_projected_gradients else adapter.size
    random = np.random.default_rng(0)
    losses = np.full(LOCAL_STEPS, 0.7, np.float32)
    gc.collect()
    seconds, before, task = [], resident_bytes() or 0, 0
    with Coordinator(folder, bundle, RoundsFlags(per_round=devices)) as server:
        while not server.finished:
            said = random.normal(size=(devices, size)).astype(np.float32) * np.float32(1e-3)
            answers = {
                node: RoundResult(
                    *(agreement.sha256, server.round, server.state.step, plan.examples * LOCAL_STEPS, 0.0),
                    losses,
                    said[node],
                ).to_bytes()
                for node in range(devices)
            }
            begin = time.perf_counter()
            tasks = server.tasks(range(devices))
            report = server.receive(answers)
            seconds.append(time.perf_counter() - begin)
            if len(report.answered) != devices:
                raise ValueError(str(report))
            task = max(map(len, tasks.values()))
            del answers, tasks, said
        gc.collect()
        grown = (resident_bytes() or 0) - before
    return {
        "seconds_of_a_round": statistics.median(seconds),
        "seconds_of_the_last_round": seconds[-1],
        "grown_mb": grown / 1e6,
        "journal_mb": (folder / JOURNAL).stat().st_size / 1e6,
        "bytes_of_a_task": task,
    }


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__, devices=[10, 100, 1000], rounds=50)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.plans:
        plan = Plan(rounds=arguments.rounds, local_steps=LOCAL_STEPS, learning_rate=1e-5, **PLANS[name])
        for devices in arguments.devices:
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, {})[str(devices)] = rounds(
                    arguments.bundle, Path(folder, "fleet"), plan, devices
                )
    report({"fleets": found}, arguments)


if __name__ == "__main__":
    main()
