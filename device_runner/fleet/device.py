"""A device of a fleet: its folder, and what it answers to a server's task.

    device.yaml     its owner's settings: bundle, rows, task, policy
    own.json        seeds that nobody else has
    ledger.jsonl    rounds begun: when, steps, noise; what its privacy has cost follows from it
    fleets/<hash>/  of one agreement: its text, the common state, the round it is in

A device that is killed goes on in the step where it was; one that is asked twice answers the same bytes.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from device_runner.fleet.agreement import Agreement, task_sha256
from device_runner.fleet.common import (
    first_state,
    pack_state,
    replay_steps,
    replayer,
    start_sha256,
    unpack_state,
)
from device_runner.fleet.local import Own, open_local
from device_runner.fleet.messages import Behind, MessageError, Refusal, RefusedError, Task
from device_runner.fleet.policy import Policy
from device_runner.fleet.privacy import exposure, spent
from device_runner.session.gates import Gates
from device_runner.session.settings import RunSettings
from prge.accounting import epsilon_of
from prge.atomic import write_file
from prge.bundle import open_bundle
from prge.checkpoint import TrainingState
from prge.documents import read_json
from prge.engine import EngineName
from prge.errors import ConfigError, DivergenceError, PrgeError, RunError
from prge.guide import guide_of
from prge.journal import Journal, Record
from prge.peft import read_peft
from prge.rows.sources import hub_names
from prge.rows.task import load_task
from prge.run_folder import JOURNAL, run_lock
from prge.settings import Bytes, read_settings, settings_to_yaml, with_whole_paths
from prge.terminal import best_effort

DEVICE, OWN, LEDGER, FLEETS = "device.yaml", "own.json", "ledger.jsonl", "fleets"
AGREEMENT, STATE, ANSWER, ROUND = "agreement.json", "state.safetensors", "answer.bin", "round"
# States that stay; a fleet that comes back after others sends its state again.
KEPT_FLEETS = 4
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class DeviceSettings:
    """What a device trains with; a server never sees it."""

    bundle: Path
    """Folder that `prge export` wrote; the fleet's, by its hash."""
    train: Path
    """The device's rows."""
    task: str | None = None
    """Task name or YAML file, as of `prge run`; the fleet's."""
    columns: list[str] = field(default_factory=list)
    """Names for columns of the rows: prompt=question completion=answer."""
    policy: Path | None = None
    """YAML file with what the device's owner allows; default: scalars only, in the usual bounds."""
    engine: EngineName = "auto"
    """See `prge run --help`."""
    threads: int | None = None
    """Threads that compute."""
    memory: Bytes | None = None
    """Weights that may stay loaded, such as 200MB."""


def make_device(folder: Path, settings: DeviceSettings) -> None:
    """Write what makes a folder a device's; its seeds and its ledger stay if it is one already.

    Raises:
        PrgeError: the bundle, the task or the policy can't be used, or the folder can't be written.
    """
    open_bundle(settings.bundle)
    if settings.task:
        load_task(settings.task)
    _policy(settings)
    whole = with_whole_paths(settings, leave=hub_names(settings, ["train"]))
    with run_lock(folder):
        write_file(folder / DEVICE, settings_to_yaml(whole).encode())
        if not (folder / OWN).exists():
            seeds = {"seed": secrets.randbits(63), "rows_seed": secrets.randbits(63)}
            write_file(folder / OWN, json.dumps(seeds).encode())


def answer(folder: Path, content: bytes) -> bytes:
    """A device's answer to a task; what it can't or mustn't do is an answer too.

    Errors of rows, files and settings name what is private: the server is told that there is one, no more.

    Raises:
        RunError: the folder is no device's, or can't be written.
    """
    with run_lock(folder):
        try:
            task = Task.parse(content)
            return _Round(folder, task).answer()
        except (RefusedError, MessageError) as error:
            return Refusal(str(error)).to_bytes()
        except DivergenceError:
            return Refusal("its steps diverge: the learning rate is too high").to_bytes()
        except RunError:
            raise
        except PrgeError as error:
            with best_effort(sys.stderr):
                print(f"{folder}: {error}", file=sys.stderr, flush=True)
            return Refusal("an error on the device, which tells it there").to_bytes()


class _Round:
    """One round on a device."""

    def __init__(self, folder: Path, task: Task) -> None:
        if not (folder / DEVICE).is_file():
            raise RunError(f"{folder} is no device's folder", remedy="make it one with `prge fleet join`")
        self.folder = folder
        self.task = task
        self.began = time.monotonic()
        self.settings = read_settings(DeviceSettings, folder / DEVICE, "prge fleet join")
        self.policy = _policy(self.settings)
        self.bundle = open_bundle(self.settings.bundle)
        self.fleet = folder / FLEETS / task.sha256.hex()
        self.agreement = self._agreed()
        self.plan = self.agreement.plan

    def answer(self) -> bytes:
        """See `answer`."""
        round_folder = self.fleet / f"{ROUND}-{self.task.number:06d}"
        said = round_folder / ANSWER
        if said.is_file():
            return said.read_bytes()
        ledger = Journal(self.folder / LEDGER)
        own = Own(**read_json(self.folder / OWN), taken=self._taken(ledger))
        self._check(ledger)
        start = self._common_state()
        if isinstance(start, Behind):
            return start.to_bytes()
        for older in self.fleet.glob(f"{ROUND}-*"):
            if older != round_folder:
                shutil.rmtree(older, ignore_errors=True)
        round_folder.mkdir(parents=True, exist_ok=True)
        local = open_local(
            self.plan,
            self.bundle,
            self._run_settings(round_folder),
            self.settings.engine,
            self.settings.threads,
            self.settings.memory,
        )
        epsilon = self._epsilon(ledger, len(local.examples), own.rows_seed)
        with Journal(round_folder / JOURNAL) as journal:
            learnt = local.steps(start, journal, own, self._stopper(local.settings))
        if learnt is None:
            raise RefusedError(f"out of time after {time.monotonic() - self.began:.0f} s")
        told = learnt.told(self.agreement, self.task.number, start.step, own, epsilon)
        content = told.to_bytes()
        # Counted before it is said: a kill between the two never spends privacy that isn't counted.
        if not self._is_counted(ledger):
            ledger.append(self._entry(len(ledger.records), len(local.examples), len(content)))
        ledger.sync()
        write_file(said, content)
        return content

    def _agreed(self) -> Agreement:
        """The agreement that the task names, from the task or from a round before."""
        path = self.fleet / AGREEMENT
        content = self.task.agreement
        if not content:
            if not path.is_file():
                raise RefusedError("an agreement that this device doesn't know; it needs its text")
            content = path.read_bytes()
        try:
            agreement = Agreement.parse(content)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        if agreement.sha256 != self.task.sha256:
            raise RefusedError("an agreement that doesn't have the hash that it is named by")
        task = load_task(self.settings.task) if self.settings.task else None
        if agreement.bundle != self.bundle.sha256:
            ours = self.bundle.sha256
            raise RefusedError(f"the fleet's bundle is {agreement.bundle[:12]}, mine {ours[:12]}")
        if agreement.task != task_sha256(task):
            raise RefusedError("the fleet's task is another one than mine")
        self.fleet.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            write_file(path, content)
            self._forget_old_fleets()
        return agreement

    def _forget_old_fleets(self) -> None:
        """Remove all but the newest fleets' states; the ledger keeps what they cost."""
        fleets = sorted(self.fleet.parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in fleets[:-KEPT_FLEETS]:
            shutil.rmtree(folder, ignore_errors=True)

    def _check(self, ledger: Journal) -> None:
        now = time.time()
        today = sum(record["time"] > now - _DAY for record in ledger.records)
        if objections := self.policy.objections(self.plan, now, today):
            raise RefusedError("; ".join(objections))

    def _epsilon(self, ledger: Journal, rows: int, seed: int) -> float:
        """What privacy will have cost after this round; raises RefusedError above a bound."""
        if not self.plan.noise:
            return 0.0
        rounds = [*ledger.records, *([] if self._is_counted(ledger) else [self._entry(0, rows, 0)])]
        # A round without noise is the owner's own will: no epsilon bounds what it said.
        fleets = {(record["agreement"], record["noise"], record["examples"]) for record in rounds}
        parts = []
        for name, noise, examples in fleets:
            of_fleet = [record for record in rounds if record["agreement"] == name]
            fewest = min(record["rows"] for record in of_fleet)
            taken = sum(record["steps"] for record in of_fleet)
            if noise:
                parts.append((noise, exposure(seed, taken, examples, fewest)))
        epsilon = epsilon_of(parts, self.plan.delta)
        for bound in (self.policy.most_epsilon or 0.0, self.plan.most_epsilon):
            if reason := spent(epsilon, bound):
                raise RefusedError(reason)
        return epsilon

    def _is_counted(self, ledger: Journal) -> bool:
        """Whether the ledger has this round already, from before a kill."""
        last = ledger.records[-1] if ledger.records else {}
        return (last.get("agreement"), last.get("round")) == (self.task.sha256.hex(), self.task.number)

    def _entry(self, number: int, rows: int, size: int) -> Record:
        """The ledger's line of this round."""
        return {
            "kind": "round",
            "step": number,
            "agreement": self.task.sha256.hex(),
            "round": self.task.number,
            "time": time.time(),
            "steps": self.plan.local_steps,
            "examples": self.plan.examples,
            "rows": rows,
            "noise": self.plan.noise,
            "bytes": size,
        }

    def _taken(self, ledger: Journal) -> int:
        ours = self.task.sha256.hex()
        return sum(record["steps"] for record in ledger.records if record["agreement"] == ours)

    def _common_state(self) -> TrainingState | Behind:
        """The state where the round begins, by what is kept and what the task brings."""
        modules, width = self.bundle.chain.modules, self.bundle.contract.width
        path, task = self.fleet / STATE, self.task
        state: TrainingState | None = None
        if task.state:
            state = unpack_state(task.state, self.plan, modules, width)
            if state.step == 0 and self.agreement.start not in ("", start_sha256(state)):
                raise RefusedError("the state isn't the one that the fleet agreed to start with")
        elif path.is_file():
            state = unpack_state(path.read_bytes(), self.plan, modules, width)
        elif not self.agreement.start:
            state = first_state(self.plan, read_peft(self.bundle.adapter, modules, self.bundle.adapter))
        if state is None or (state.step != task.step and not task.missed):
            return Behind(-1 if state is None else state.step)
        missed = [steps for steps in task.missed if steps.first >= state.step]
        if state.step != task.step:
            if not missed or missed[0].first != state.step:
                return Behind(state.step)
            guide = guide_of(self.bundle) if self.plan.guided else None
            replay_steps(state, missed, self.plan, replayer(self.plan, guide), task.number)
        if state.step != task.step:
            raise MessageError(f"steps to {state.step}, the round begins at {task.step}")
        write_file(path, pack_state(state))
        return state

    def _run_settings(self, folder: Path) -> RunSettings:
        """Which rows; the plan has the rest."""
        settings = self.plan.run_settings(self.settings.bundle, self.settings.train, folder)
        return replace(
            settings,
            task=self.settings.task,
            columns=self.settings.columns,
            train_limit=self.policy.most_rows,
        )

    def _stopper(self, settings: RunSettings) -> Callable[[], bool]:
        """Whether to give up: the owner's gates are waited for, the time of a round is not exceeded."""
        seconds = min(self.policy.most_seconds, self.task.seconds or self.policy.most_seconds)
        held = _Held(self.began + seconds)
        gates = Gates(self.policy.gated(settings))
        return lambda: gates.hold(held)


class _Held:
    """Implements gates.Held: nobody is told, and the time of a round ends a wait."""

    def __init__(self, until: float) -> None:
        self._until = until

    @property
    def stopped(self) -> bool:
        """Whether the round's time is over."""
        return time.monotonic() > self._until

    def say(self, text: str) -> None:
        """Nobody is told."""

    def on_pause(self, seconds: float) -> None:
        """Nobody is told."""


def _policy(settings: DeviceSettings) -> Policy:
    return Policy() if settings.policy is None else read_settings(Policy, settings.policy, "prge fleet join")
