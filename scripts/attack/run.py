"""Attack prge: kill runs, damage files, give it hostile inputs, and exhaust memory, disk and terminal.

    python scripts/attack/run.py --minutes 30 --json attack.json
    python scripts/attack/run.py --only files --minutes 5
    python scripts/attack/run.py --repeat files:123

Every case follows from the seed, its part and its number; `--repeat` runs one again. The folder of a failed
case is kept in `failures/` of the work folder. The instant at which a process is killed also depends on the
machine. The exit code is 0 if every part had cases and none failed. To leave out a part that this machine
can't run, such as transfers without adb, name the other parts with `--only`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

# torch's threads spin while they wait, and a forked process lacks them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from child import import_verbs
from damaged_files import attack_a_file, attack_a_gguf_file, attack_a_model
from hostile_clients import attack_clients
from hostile_feedback import attack_feedback
from hostile_inputs import attack_an_input
from hostile_server import attack_a_device
from hostile_settings import attack_with_settings
from kills import attack_a_run, attack_a_run_with_torch, attack_a_workstation
from outcome import Case, Findings, Report, Verdict
from transport import attack_a_transfer, unavailable_reason
from workshop import BUNDLE_TYPES, Bench, Workshop, open_workshop

Attack = Callable[[Bench, Random, Path], Findings]


@dataclass(frozen=True)
class Part:
    """An attack, its share of the time, and whether its processes need torch."""

    attack: Attack
    share: float
    needs_torch: bool = False


def attack_a_fleets_server(bench: Bench, random: Random, folder: Path) -> Findings:
    """Attack a fleet's server; its process imports Flower after setting its environment."""
    from device_runner.fleet.network.flower_files import flower_home

    flower_home(bench.folder)
    import hostile_devices

    return hostile_devices.attack_a_fleets_server(bench, random, folder)


PARTS = {
    "kills": Part(attack_a_run, 0.25),
    "files": Part(attack_a_file, 0.50),
    "inputs": Part(attack_an_input, 0.09),
    "transfers": Part(attack_a_transfer, 0.03),
    "network_clients": Part(attack_clients, 0.05),
    "network_devices": Part(attack_a_fleets_server, 0.09),
    "network_server": Part(attack_a_device, 0.05),
    "settings": Part(attack_with_settings, 0.03),
    "feedback": Part(attack_feedback, 0.15),
    "torch_kills": Part(attack_a_run_with_torch, 0.07, needs_torch=True),
    "workstation_kills": Part(attack_a_workstation, 0.03, needs_torch=True),
    "model_files": Part(attack_a_model, 0.03, needs_torch=True),
    "gguf_files": Part(attack_a_gguf_file, 0.03, needs_torch=True),
}
_SHARED_MEMORY = "/dev/shm"
_FORK = multiprocessing.get_context("fork")


def main(argv: Sequence[str]) -> int:
    """Run the attack; see --help."""
    parser = argparse.ArgumentParser("attack", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="time for cases; default 30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--cases", type=int, help="maximum number of cases per part; default: unlimited")
    parser.add_argument(
        "--kinds", nargs="+", choices=BUNDLE_TYPES, default=list(BUNDLE_TYPES), help="types of bundles"
    )
    parser.add_argument("--processes", type=int, default=max(1, min(2, os.cpu_count() or 1)))
    parser.add_argument("--work", type=Path, help="folder for models, bundles and failures; kept")
    parser.add_argument("--repeat", metavar="PART:NUMBER", help="repeat one case")
    options = parser.parse_args(argv)
    # Shared memory if there is some: a case waits for storage dozens of times.
    shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    work = (options.work or Path(tempfile.mkdtemp(prefix="prge-attack-", dir=shared))).resolve()
    # Sign settings with a key of the attack, not with this user's.
    os.environ["XDG_CONFIG_HOME"] = str(work / "config")
    print(f"models and bundles in {work}", flush=True)
    workshop = _prepare_workshop(work, options.kinds)
    import_verbs()
    if options.repeat:
        return _repeat(workshop, options.repeat, options.seed)
    report = Report(options.seed, options.minutes)
    parts = [part for part in PARTS if part in options.only]
    if "transfers" in parts and (reason := unavailable_reason(workshop)):
        parts.remove("transfers")
        report.left_out.append(f"transfers: {reason}")
    begin = time.monotonic()
    plan = Plan(parts, options.seed, begin, begin + 60 * options.minutes, options.processes, options.cases)
    _attack(workshop, plan, report)
    report.need_cases(options.only)
    summary = report.to_json()
    if options.json:
        report.write(options.json)
    shown = {name: findings for name, findings in summary.items() if isinstance(findings, int | str | list)}
    print(json.dumps(shown, indent=1)[:6000])
    if options.work is None and not report.failures:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if report.failures else 0


@dataclass(frozen=True)
class Plan:
    """The parts to run from `begin` to `end` and the number of processes; `cases` limits each part."""

    parts: Sequence[str]
    seed: int
    begin: float
    end: float
    processes: int
    cases: int | None = None

    def schedule(self) -> Iterator[tuple[str, float]]:
        """Yield each part with the time at which it ends; parts that need torch come last."""
        total, until = sum(PARTS[part].share for part in self.parts), self.begin
        for part in sorted(self.parts, key=lambda part: PARTS[part].needs_torch):
            until += (self.end - self.begin) * PARTS[part].share / total
            yield part, until


def _prepare_workshop(folder: Path, bundle_types: Sequence[str]) -> Workshop:
    """Create the workshop in another process, since this one must not use torch."""
    process = _FORK.Process(target=open_workshop, args=(folder, bundle_types))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the bundles can't be made")
    return Workshop(folder)


def _attack(workshop: Workshop, plan: Plan, report: Report) -> None:
    """Run the plan in several processes and collect their findings."""
    worker_folders = [workshop.folder / f"worker-{number}" for number in range(plan.processes)]
    workers = [
        _FORK.Process(target=_work, args=(workshop, plan, number, worker_folder))
        for number, worker_folder in enumerate(worker_folders)
    ]
    for worker in workers:
        worker.start()
    for worker, worker_folder in zip(workers, worker_folders, strict=True):
        worker.join()
        with (
            suppress(EOFError, OSError, pickle.UnpicklingError),
            worker_folder.with_suffix(".found").open("rb") as findings,
        ):
            while True:
                report.add(*pickle.load(findings))
        if worker.exitcode:
            log = worker_folder.with_suffix(".log").read_text()
            report.add([Case("harness", Verdict.UNEXPLAINED, "", log, "harness")], Counter())


def _work(workshop: Workshop, plan: Plan, worker: int, worker_folder: Path) -> None:
    """Run one process: each part for its share of the time, with a log and a file of findings."""
    terminal = os.fdopen(os.dup(1), "w")
    with (
        worker_folder.with_suffix(".log").open("wb") as log,
        worker_folder.with_suffix(".found").open("wb") as findings,
    ):
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        with _bench(workshop) as bench:
            for part, until in plan.schedule():
                tried = 0
                for number in count(worker, plan.processes):
                    # A busy machine still tries each part once.
                    if (number > 0 and time.monotonic() > until) or number >= (plan.cases or math.inf):
                        break
                    cases, counts = run_case(bench, part, number, plan.seed)
                    tried += 1
                    pickle.dump((cases, counts), findings)
                    findings.flush()
                    for case in (case for case in cases if case.verdict.is_failure):
                        print(f"{case.label} {case.verdict.value}: {case.name}", file=terminal, flush=True)
                print(f"process {worker} tried {part} {tried} times", file=terminal, flush=True)


@contextmanager
def _bench(workshop: Workshop) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(dir=workshop.folder, ignore_cleanup_errors=True) as name:
        bench = Bench(workshop, Path(name))
        try:
            yield bench
        finally:
            bench.close()


def run_case(bench: Bench, part: str, number: int, seed: int) -> Findings:
    """Run one case; the folder of a failed one is kept as `failures/<part>-<number>` of the workshop."""
    if PARTS[part].needs_torch:
        import_verbs(workstation=True)
    folder = Path(tempfile.mkdtemp(dir=bench.folder, prefix=f"{part}-"))
    cases, counts = PARTS[part].attack(bench, Random(f"{seed}/{part}/{number}"), folder)
    if any(case.verdict.is_failure for case in cases):
        failure_folder = bench.workshop.folder / "failures" / f"{part}-{number}"
        shutil.rmtree(failure_folder, ignore_errors=True)
        failure_folder.parent.mkdir(exist_ok=True)
        folder.rename(failure_folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return [dataclasses.replace(case, part=part, number=number) for case in cases], counts


def _repeat(workshop: Workshop, label: str, seed: int) -> int:
    part, number = label.split(":")
    with _bench(workshop) as bench:
        cases, counts = run_case(bench, part, int(number), seed)
    for case in cases:
        print(f"{case.verdict.value}: {case.name}\n$ {case.command}\n{case.tail}")
    print(dict(counts))
    return 1 if any(case.verdict.is_failure for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
