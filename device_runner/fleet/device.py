"""A device of a fleet: its folder, and what it answers to a server's task.

    device.yaml     its owner's settings: bundle, rows, task, policy
    own.json        the seed of its rows' order, which nobody else has
    ledger.jsonl    rounds begun and answered; what its privacy has cost follows from it (ledger.py)
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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from device_runner.fleet.agreement import Agreement, task_sha256
from device_runner.fleet.common import (
    first_state,
    pack_state,
    replay_steps,
    replayer,
    start_sha256,
    unpack_state,
)
from device_runner.fleet.local import Local, by_row, open_local, told
from device_runner.fleet.messages import MessageError, Refusal, RefusedError, Task
from device_runner.fleet.policy import Policy
from device_runner.fleet.privacy.ledger import BEGUN, Ledger
from device_runner.fleet.privacy.reported import spent
from device_runner.session.gates import Gates
from device_runner.session.settings import EngineFlags, RunSettings
from prge.errors import ConfigError, DivergenceError, PrgeError, RunError
from prge.files.bundle import open_bundle
from prge.files.documents import read_json
from prge.files.journal import Journal, Record
from prge.files.own_settings import write_settings
from prge.files.peft import read_peft
from prge.files.run_folder import JOURNAL, run_lock
from prge.host.atomic import write_file
from prge.host.terminal import best_effort
from prge.learning.checkpoint import TrainingState
from prge.rows.forms.task import load_task
from prge.rows.own_heads import task_of
from prge.rows.sources import hub_names
from prge.running.training_flags import ExampleFlags
from prge.verbs.inputs import BundleInput, InputFile, TrainRows
from prge.verbs.settings import read_settings, read_stored, settings_to_yaml, with_whole_paths

DEVICE, OWN, LEDGER, FLEETS = "device.yaml", "own.json", "ledger.jsonl", "fleets"
AGREEMENT, STATE, ANSWER, ROUND = "agreement.json", "state.safetensors", "answer.bin", "round"
# States that stay; a fleet that comes back after others sends its state again.
KEPT_FLEETS = 4
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class DeviceSettings(EngineFlags, ExampleFlags):
    """What a device trains with; a server never sees it."""

    bundle: BundleInput
    """Folder that `prge export` wrote; the fleet's, by its hash."""
    train: TrainRows
    """The device's rows."""
    policy: InputFile | None = None
    """YAML file with what the device's owner allows; default: scalars only, in the usual bounds."""


def make_device(folder: Path, settings: DeviceSettings) -> None:
    """Write what makes a folder a device's; its seed and its ledger stay if it is one already.

    Raises:
        PrgeError: the bundle, the task or the policy can't be used, or the folder can't be written.
    """
    open_bundle(settings.bundle)
    if settings.task:
        load_task(settings.task)
    _policy(settings)
    whole = with_whole_paths(settings.dated(), leave=hub_names(settings, ["train"]))
    with run_lock(folder):
        write_settings(folder / DEVICE, settings_to_yaml(whole))
        if not (folder / OWN).exists():
            write_file(folder / OWN, json.dumps({"rows_seed": secrets.randbits(63)}).encode())


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
            raise RunError(
                f"{folder} is no device's folder",
                remedy="make it one with `prge fleet join`",
                code="not-a-device-folder",
            )
        self.folder = folder
        self.task = task
        self.began = time.monotonic()
        self.settings = read_stored(DeviceSettings, folder / DEVICE, "prge fleet join")
        self.policy = _policy(self.settings)
        self.seconds = min(self.policy.most_seconds, task.seconds or self.policy.most_seconds)
        self.bundle = open_bundle(self.settings.bundle)
        self.fleet = folder / FLEETS / task.sha256.hex()
        self.agreement = self._agreed()
        self.plan = self.agreement.plan

    def answer(self) -> bytes:
        """See `answer`."""
        task, ledger = self.task, Ledger(self.folder / LEDGER)
        folder = self.fleet / f"{ROUND}-{task.number:06d}"
        line = ledger.line(task.sha256.hex(), task.number)
        if line is not None and (folder / ANSWER).is_file():
            # A kill may have come between the file and the line.
            ledger.answer(line)
            return (folder / ANSWER).read_bytes()
        if line is not None and ledger.is_answered(line):
            raise RefusedError(
                f"round {task.number + 1} was answered, and what was said is gone", code="answer-lost"
            )
        self._check(ledger, line)
        self._keep_agreement()
        state = self._known_state()
        for older in self.fleet.glob(f"{ROUND}-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._run_settings(folder)
        stopped = self._stopper()
        local, _ = open_local(self.plan, self.bundle, settings)
        line, privacy_epsilon = self._counted(ledger, line, local)
        if not self._catches_up(state, stopped):
            raise self._out_of_time()
        taken = ledger.steps_before(task.sha256.hex(), task.number)
        seed = read_json(self.folder / OWN)["rows_seed"]
        try:
            with Journal(folder / JOURNAL) as journal:
                learnt = local.steps(state, journal, seed, taken, stopped)
            if learnt is None:
                raise self._out_of_time()
            content = told(self.agreement, task.number, state.step, privacy_epsilon, learnt)
        except DivergenceError:
            # Kept as an answer is: with noise drawn anew it might say something else.
            content = Refusal("its steps diverge: the learning rate is too high").to_bytes()
        write_file(folder / ANSWER, content)
        ledger.answer(line)
        return content

    def _out_of_time(self) -> RefusedError:
        # Not how long it took, which rows have a say in.
        return RefusedError(f"out of time: it may take {self.seconds:g} s", code="round-out-of-time")

    def _agreed(self) -> Agreement:
        """The agreement that the task names, from the task or from a round before."""
        path = self.fleet / AGREEMENT
        content = self.task.agreement
        if not content:
            if not path.is_file():
                raise RefusedError(
                    "an agreement that this device doesn't know; it needs its text", code="agreement-unknown"
                )
            content = path.read_bytes()
        try:
            agreement = Agreement.parse(content)
        except ConfigError as error:
            raise RefusedError(str(error), code=error.code) from None
        if agreement.sha256 != self.task.sha256:
            raise RefusedError(
                "an agreement that doesn't have the hash that it is named by", code="agreement-of-other-hash"
            )
        task = task_of(self.bundle, self.settings.task)
        self.classes = () if task is None else task.classes
        if agreement.bundle != self.bundle.sha256:
            ours = self.bundle.sha256
            raise RefusedError(
                f"the fleet's bundle is {agreement.bundle[:12]}, mine {ours[:12]}", code="bundle-differs"
            )
        if agreement.task != task_sha256(task):
            raise RefusedError("the fleet's task is another one than mine", code="task-differs")
        # Rounds that the server discarded have no steps.
        rounds, rest = divmod(self.task.step, agreement.plan.local_steps if agreement.plan.by_scalars else 1)
        if self.task.number >= agreement.plan.rounds or rest or rounds > self.task.number:
            raise RefusedError(
                f"the plan has no round {self.task.number + 1} from step {self.task.step} on",
                code="round-not-of-plan",
            )
        return agreement

    def _keep_agreement(self) -> None:
        """Make room for a fleet that is new: of the others all but the newest lose their states.

        The ledger keeps what they cost, and which of their rounds were answered.
        """
        self.fleet.mkdir(parents=True, exist_ok=True)
        if (self.fleet / AGREEMENT).is_file():
            return
        write_file(self.fleet / AGREEMENT, self.agreement.content)
        fleets = sorted(self.fleet.parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in fleets[:-KEPT_FLEETS]:
            shutil.rmtree(folder, ignore_errors=True)

    def _check(self, ledger: Ledger, line: Record | None) -> None:
        """Raise RefusedError for what the owner doesn't allow; a round that goes on isn't another one."""
        now = time.time()
        today = ledger.begun_since(now - _DAY) - (line is not None and line["time"] > now - _DAY)
        if objections := self.policy.objections(self.plan, now, today):
            raise RefusedError("; ".join(objections), code="policy-forbids")

    def _counted(self, ledger: Ledger, line: Record | None, local: Local) -> tuple[Record, float]:
        """The round's line, written before anything is computed, and what privacy has cost with it.

        Raises:
            RefusedError: it would cost more than is allowed, or the round was begun with other rows.
        """
        plan, rows = self.plan, len(by_row(local.examples))
        entry: Record = {
            "kind": BEGUN,
            "agreement": self.task.sha256.hex(),
            "round": self.task.number,
            "time": time.time(),
            "steps": plan.local_steps,
            "examples": min(plan.examples, rows),
            "rows": rows,
            "data": local.data,
            "unit": plan.unit,
            "noise": plan.noise,
        }
        if line is not None and {**line, "time": entry["time"]} != entry:
            raise RefusedError("the round was begun with other rows", code="rows-differ")
        said = ledger.privacy_epsilon(line or entry, plan.delta, plan.unit, whole=False)
        most, own = self.policy.most_privacy_epsilon, 0.0
        if most is not None:
            own = ledger.privacy_epsilon(line or entry, plan.delta, self.policy.unit, whole=True)
        if reason := spent(own, most or 0.0) or spent(said, plan.most_privacy_epsilon):
            raise RefusedError(reason, code="privacy-spent")
        if line is None:
            ledger.begin(entry)
        return line or entry, said

    def _known_state(self) -> TrainingState:
        """A common state that the missed rounds follow, of what is kept and what the task brings.

        Raises:
            RefusedError: there is none.
        """
        modules, width = self.bundle.chain.modules, self.bundle.chain.width
        path, task = self.fleet / STATE, self.task
        classes = len(self.classes) if self.bundle.chain.is_encoder else 0
        state: TrainingState | None = None
        if task.state:
            state = unpack_state(task.state, self.plan, modules, width, classes)
            if state.step == 0 and self.agreement.start not in ("", start_sha256(state)):
                raise RefusedError(
                    "the state isn't the one that the fleet agreed to start with", code="state-differs"
                )
        elif path.is_file():
            state = unpack_state(path.read_bytes(), self.plan, modules, width, classes)
        elif not self.agreement.start:
            state = first_state(self.plan, read_peft(self.bundle.adapter, modules))
        first = next((steps.first for steps in task.missed_steps()), task.step)
        if state is None or not min(first, task.step) <= state.step <= task.step:
            has = "has no common state" if state is None else f"is at step {state.step}"
            raise RefusedError(f"{has}, needs that of step {task.step}", code="state-missing")
        return state

    def _catches_up(self, state: TrainingState, stopped: Callable[[], bool]) -> bool:
        """Take the missed rounds, and keep where that leads; whether there was time for all."""
        plan, task = self.plan, self.task
        missed = task.missed_steps((plan.local_steps, int(np.prod(plan.shape))))
        in_time = replay_steps(state, missed, plan, replayer(plan), task.number, stopped)
        if in_time and state.step != task.step:
            raise MessageError(
                f"steps to {state.step}, the round begins at {task.step}", code="steps-out-of-order"
            )
        write_file(self.fleet / STATE, pack_state(state))
        return in_time

    def _run_settings(self, folder: Path) -> RunSettings:
        """Which rows; the plan has the rest."""
        settings = self.plan.run_settings(self.settings.bundle, self.settings.train, folder)
        return replace(
            settings,
            task=self.settings.task,
            columns=self.settings.columns,
            date=self.settings.date,
            control_tokens=self.settings.control_tokens,
            append_eos=self.settings.append_eos,
            train_limit=self.policy.most_rows,
            engine=self.settings.engine,
            threads=self.settings.threads,
            memory=self.settings.memory,
        )

    def _stopper(self) -> Callable[[], bool]:
        """Whether to give up: the owner's gates are waited for, the time of a round is not exceeded."""
        held = _Held(self.began + self.seconds)
        gates = Gates(self.policy.conditions())
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

    def on_wait(self, why: str) -> None:
        """Nobody is told."""

    def on_pause(self, seconds: float) -> None:
        """Nobody is told."""


def _policy(settings: DeviceSettings) -> Policy:
    return Policy() if settings.policy is None else read_settings(Policy, settings.policy, "prge fleet join")
