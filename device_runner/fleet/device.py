"""A device of a fleet: its folder, and how it answers a server's task.

    device.yaml     its owner's settings: bundle, rows, task, policy
    own.json        the secret seed of the order of its rows
    ledger.jsonl    rounds begun and answered; the epsilon that was spent follows from it (ledger.py)
    fleets/<hash>/  of one agreement: its content, the global state, the present round

A device that is killed resumes in the step where it was; a device that is asked twice answers the same bytes.
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
from device_runner.fleet.local_round import LocalTrainer, by_row, encode_result, open_local
from device_runner.fleet.messages import MessageError, RoundTask, TaskRefusal, TaskRefusedError
from device_runner.fleet.policy import Policy
from device_runner.fleet.privacy.ledger import BEGUN, Ledger
from device_runner.fleet.privacy.reported import budget_refusal
from device_runner.fleet.state import (
    initial_state,
    pack_state,
    replay_estimator,
    replay_steps,
    start_sha256,
    unpack_state,
)
from device_runner.session.pauses import Pauses
from device_runner.session.settings import EngineFlags, RunSettings
from prge.cli.inputs import BundleInput, InputFile, TrainRows
from prge.cli.settings import read_settings, read_stored, settings_to_yaml, with_absolute_paths
from prge.data.forms.task import load_task
from prge.data.sources import hub_names
from prge.errors import ConfigError, DivergenceError, PrgeError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.documents import read_json
from prge.formats.journal import Journal, Record
from prge.formats.peft import read_peft
from prge.formats.run_folder import JOURNAL, run_lock
from prge.formats.stored_settings import write_settings
from prge.system.atomic import write_file
from prge.system.terminal import best_effort
from prge.training.checkpoint import TrainingState
from prge.training.checkpoint_heads import load_bundle_task
from prge.training.settings import ExampleFlags

DEVICE, SEED_FILE, LEDGER, FLEETS = "device.yaml", "own.json", "ledger.jsonl", "fleets"
AGREEMENT, STATE, ANSWER, ROUND = "agreement.json", "state.safetensors", "answer.bin", "round"
# Agreements whose states are kept; a fleet that returns after more than these others sends its state again.
KEPT_FLEETS = 4
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class DeviceSettings(EngineFlags, ExampleFlags):
    """What a device trains with; a server never sees these settings."""

    bundle: BundleInput
    """Folder that `prge export` wrote; its hash must be that of the fleet's bundle."""
    train: TrainRows
    """The device's rows."""
    policy: InputFile | None = None
    """YAML file with what the device's owner allows; default: projected gradients only, within the default
    bounds."""


def make_device(folder: Path, settings: DeviceSettings) -> None:
    """Write the settings of a device to a folder; an existing seed and ledger stay.

    Raises:
        PrgeError: the bundle, the task or the policy can't be used, or the folder can't be written.
    """
    open_bundle(settings.bundle)
    if settings.task:
        load_task(settings.task)
    _policy(settings)
    whole = with_absolute_paths(settings.with_date(), keep=hub_names(settings, ["train"]))
    with run_lock(folder):
        write_settings(folder / DEVICE, settings_to_yaml(whole))
        if not (folder / SEED_FILE).exists():
            write_file(folder / SEED_FILE, json.dumps({"rows_seed": secrets.randbits(63)}).encode())


def answer(folder: Path, content: bytes) -> bytes:
    """Return a device's message for a task: a result, or a refusal with its reason.

    Errors about rows, files and settings name private things: the server learns only that there was an error.

    Raises:
        RunError: the folder is not a device's, or can't be written.
    """
    with run_lock(folder):
        try:
            task = RoundTask.parse(content)
            return _Round(folder, task).answer()
        except (TaskRefusedError, MessageError) as error:
            return TaskRefusal(str(error)).to_bytes()
        except RunError:
            raise
        except PrgeError as error:
            with best_effort(sys.stderr):
                print(f"{folder}: {error}", file=sys.stderr, flush=True)
            return TaskRefusal("an error on the device, which printed it").to_bytes()


class _Round:
    """One round on a device: checks the task, replays missed steps, trains, and stores the result."""

    def __init__(self, folder: Path, task: RoundTask) -> None:
        if not (folder / DEVICE).is_file():
            raise RunError(
                f"{folder} is not the folder of a device.",
                remedy="Create one with `prge fleet join`.",
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
        self.agreement = self._read_agreement()
        self.plan = self.agreement.plan

    def answer(self) -> bytes:
        """See `answer`."""
        task, ledger = self.task, Ledger(self.folder / LEDGER)
        folder = self.fleet / f"{ROUND}-{task.number:06d}"
        line = ledger.line(task.sha256.hex(), task.number)
        if line is not None and (folder / ANSWER).is_file():
            # Repeated on resume: a kill may have come between the file and the ledger's line.
            ledger.mark_answered(line)
            return (folder / ANSWER).read_bytes()
        if line is not None and ledger.is_answered(line):
            raise TaskRefusedError(
                f"round {task.number + 1} was answered, but its result is gone", code="answer-lost"
            )
        self._check(ledger, line)
        self._store_agreement()
        state = self._known_state()
        for older in self.fleet.glob(f"{ROUND}-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._run_settings(folder)
        stopped = self._make_stopped()
        local, _ = open_local(self.plan, self.bundle, settings)
        line, privacy_epsilon = self._count_round(ledger, line, local)
        if not self._catch_up(state, stopped):
            raise self._out_of_time_error()
        taken = ledger.steps_before(task.sha256.hex(), task.number)
        seed = read_json(self.folder / SEED_FILE)["rows_seed"]
        try:
            with Journal(folder / JOURNAL) as journal:
                update = local.train(state, journal, seed, taken, stopped)
            if update is None:
                raise self._out_of_time_error()
            content = encode_result(self.agreement, task.number, state.step, privacy_epsilon, update)
        except DivergenceError:
            # Stored like a result: sampling new noise might lead to another outcome.
            content = TaskRefusal("the steps diverge: the learning rate is too high").to_bytes()
        write_file(folder / ANSWER, content)
        ledger.mark_answered(line)
        return content

    def _out_of_time_error(self) -> TaskRefusedError:
        # The time that the round took is not revealed, because it depends on the rows.
        return TaskRefusedError(f"out of time: a round may take {self.seconds:g} s", code="round-out-of-time")

    def _read_agreement(self) -> Agreement:
        """Return the agreement that the task names, from the task or from an earlier round."""
        path = self.fleet / AGREEMENT
        content = self.task.agreement
        if not content:
            if not path.is_file():
                raise TaskRefusedError(
                    "an agreement that this device does not know; send its content", code="agreement-unknown"
                )
            content = path.read_bytes()
        try:
            agreement = Agreement.parse(content)
        except ConfigError as error:
            raise TaskRefusedError(str(error), code=error.code) from None
        if agreement.sha256 != self.task.sha256:
            raise TaskRefusedError(
                "an agreement that does not have the hash in the task", code="agreement-of-other-hash"
            )
        task = load_bundle_task(self.bundle, self.settings.task)
        self.classes = () if task is None else task.classes
        if agreement.bundle != self.bundle.sha256:
            own_hash = self.bundle.sha256
            raise TaskRefusedError(
                f"the fleet's bundle is {agreement.bundle[:12]}, the device's is {own_hash[:12]}",
                code="bundle-differs",
            )
        if agreement.task != task_sha256(task):
            raise TaskRefusedError("the fleet's task is not the device's", code="task-differs")
        # Discarded rounds have no steps, so that there may be fewer rounds with steps than rounds.
        rounds, rest = divmod(
            self.task.step, agreement.plan.local_steps if agreement.plan.sends_projected_gradients else 1
        )
        if self.task.number >= agreement.plan.rounds or rest or rounds > self.task.number:
            raise TaskRefusedError(
                f"the plan has no round {self.task.number + 1} from step {self.task.step} on",
                code="round-not-of-plan",
            )
        return agreement

    def _store_agreement(self) -> None:
        """Store the agreement of a new fleet; all but the newest fleets lose their states.

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
        """Raise TaskRefusedError if the owner's policy forbids the round.

        A resumed round does not count as another one.
        """
        now = time.time()
        today = ledger.begun_since(now - _DAY) - (line is not None and line["time"] > now - _DAY)
        if objections := self.policy.objections(self.plan, now, today):
            raise TaskRefusedError("; ".join(objections), code="policy-forbids")

    def _count_round(self, ledger: Ledger, line: Record | None, local: LocalTrainer) -> tuple[Record, float]:
        """Write the round's line to the ledger, before anything is computed.

        Returns:
            The line, and the epsilon that the device has spent with it.

        Raises:
            TaskRefusedError: epsilon would exceed its bound, or the round was begun with other rows.
        """
        plan, rows = self.plan, len(by_row(local.examples))
        entry: Record = {
            "type": BEGUN,
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
            raise TaskRefusedError("the round was begun with other rows", code="rows-differ")
        epsilon = ledger.privacy_epsilon(line or entry, plan.delta, plan.unit, whole=False)
        max_epsilon, owner_epsilon = self.policy.most_privacy_epsilon, 0.0
        if max_epsilon is not None:
            owner_epsilon = ledger.privacy_epsilon(line or entry, plan.delta, self.policy.unit, whole=True)
        if reason := budget_refusal(owner_epsilon, max_epsilon or 0.0) or budget_refusal(
            epsilon, plan.most_privacy_epsilon
        ):
            raise TaskRefusedError(reason, code="privacy-spent")
        if line is None:
            ledger.begin(entry)
        return line or entry, epsilon

    def _known_state(self) -> TrainingState:
        """Return the global state that the missed rounds follow: of the task, the folder or the bundle.

        Raises:
            TaskRefusedError: there is none.
        """
        modules, width = self.bundle.chain.modules, self.bundle.chain.width
        path, task = self.fleet / STATE, self.task
        classes = len(self.classes) if self.bundle.chain.is_encoder else 0
        state: TrainingState | None = None
        if task.state:
            state = unpack_state(task.state, self.plan, modules, width, classes)
            if state.step == 0 and self.agreement.start not in ("", start_sha256(state)):
                raise TaskRefusedError(
                    "the state is not the initial state of the agreement", code="state-differs"
                )
        elif path.is_file():
            state = unpack_state(path.read_bytes(), self.plan, modules, width, classes)
        elif not self.agreement.start:
            state = initial_state(self.plan, read_peft(self.bundle.adapter, modules))
        first = next((steps.first for steps in task.missed_steps()), task.step)
        if state is None or not min(first, task.step) <= state.step <= task.step:
            description = "has no common state" if state is None else f"is at step {state.step}"
            raise TaskRefusedError(f"{description}, needs that of step {task.step}", code="state-missing")
        return state

    def _catch_up(self, state: TrainingState, stopped: Callable[[], bool]) -> bool:
        """Replay the missed rounds, and store the resulting state.

        Returns:
            False if there was no time for all of them.
        """
        plan, task = self.plan, self.task
        missed = task.missed_steps((plan.local_steps, int(np.prod(plan.shape))))
        in_time = replay_steps(state, missed, plan, replay_estimator(plan), task.number, stopped)
        if in_time and state.step != task.step:
            raise MessageError(
                f"steps to {state.step}, the round begins at {task.step}", code="steps-out-of-order"
            )
        write_file(self.fleet / STATE, pack_state(state))
        return in_time

    def _run_settings(self, folder: Path) -> RunSettings:
        """Return the settings of the plan's steps with the device's rows and engine."""
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

    def _make_stopped(self) -> Callable[[], bool]:
        """Return a function that waits for the owner's conditions and says if the round's time is over."""
        held = _RoundWait(self.began + self.seconds)
        pauses = Pauses(self.policy.constraints())
        return lambda: pauses.wait(held)


class _RoundWait:
    """Implements pauses.PauseObserver: prints nothing, and ends a wait when the round's time is over."""

    def __init__(self, until: float) -> None:
        self._until = until

    @property
    def stopped(self) -> bool:
        """Whether the round's time is over."""
        return time.monotonic() > self._until

    def note(self, text: str) -> None:
        """Print nothing."""

    def on_wait(self, why: str) -> None:
        """Record nothing."""

    def on_pause(self, seconds: float) -> None:
        """Record nothing."""


def _policy(settings: DeviceSettings) -> Policy:
    return Policy() if settings.policy is None else read_settings(Policy, settings.policy, "prge fleet join")
