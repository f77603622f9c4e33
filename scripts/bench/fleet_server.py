"""Measure a fleet server's cost of a round, by the number of devices.

    python scripts/bench/fleet_server.py --bundle BUNDLE --devices 10 100 1000 --rounds 50 --json fleet.json

Every device answers every round with random numbers, since only the server is measured: making tasks,
reading, checking and combining results, the journal and the checkpoint. Prints JSON by type of result and
number of devices: seconds of the median round and of the last one, megabytes that the process grew by,
megabytes of the journal, and bytes of a task in the last round.
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
from reports import make_parser, report

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
    """Run the rounds of a plan with a number of devices."""
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
            values = random.normal(size=(devices, size)).astype(np.float32) * np.float32(1e-3)
            results = {
                node: RoundResult(
                    *(agreement.sha256, server.round, server.state.step, plan.examples * LOCAL_STEPS, 0.0),
                    losses,
                    values[node],
                ).to_bytes()
                for node in range(devices)
            }
            begin = time.perf_counter()
            tasks = server.tasks(range(devices))
            report = server.receive(results)
            seconds.append(time.perf_counter() - begin)
            if len(report.answered) != devices:
                raise ValueError(str(report))
            task = max(map(len, tasks.values()))
            del results, tasks, values
        gc.collect()
        growth = (resident_bytes() or 0) - before
    return {
        "seconds_of_a_round": statistics.median(seconds),
        "seconds_of_the_last_round": seconds[-1],
        "grown_mb": growth / 1e6,
        "journal_mb": (folder / JOURNAL).stat().st_size / 1e6,
        "bytes_of_a_task": task,
    }


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, devices=[10, 100, 1000], rounds=50)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    arguments = parser.parse_args()
    fleets: dict[str, Any] = {}
    for name in arguments.plans:
        plan = Plan(rounds=arguments.rounds, local_steps=LOCAL_STEPS, learning_rate=1e-5, **PLANS[name])
        for devices in arguments.devices:
            with tempfile.TemporaryDirectory() as folder:
                fleets.setdefault(name, {})[str(devices)] = rounds(
                    arguments.bundle, Path(folder, "fleet"), plan, devices
                )
    report({"fleets": fleets}, arguments)


if __name__ == "__main__":
    main()
