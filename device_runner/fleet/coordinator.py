"""The server side of a fleet: choose devices for a round, check their results and aggregate them.

    folder/   a run folder: journal.jsonl (steps that all devices replay, one line per round),
              checkpoints/, final/; and agreement.json

    devices -> tasks -> (the network) -> results -> checked -> aggregated -> journal -> global adapter

This module knows no network: tasks and results are bytes. A server that is killed resumes from its journal
with the same bits: the journal holds a round completely, or the server asks for the round again and devices
repeat their results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.fleet.aggregation import (
    aggregate,
    aggregate_projected_gradients,
    check_result,
    count_values,
    find_opposed_results,
    shorten_outliers,
)
from device_runner.fleet.agreement import Agreement
from device_runner.fleet.messages import (
    MessageError,
    RoundResult,
    RoundSteps,
    RoundTask,
    TaskRefusal,
    TaskRefusedError,
    parse_reply,
)
from device_runner.fleet.privacy.reported import BUDGET_EXCEEDED
from device_runner.fleet.state import apply_steps, global_recipe, pack_state, replay_estimator
from device_runner.session.inputs import start_record
from device_runner.session.replay import advance, replay
from prge.errors import ConfigError, RunError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.journal import GRADIENT, Journal, Record, encode_array
from prge.formats.run_folder import CHECKPOINTS, FINAL, JOURNAL, check_new_run
from prge.objectives.classification_head import Head
from prge.system.atomic import write_file
from prge.training.checkpoint import TrainingState, load_best, load_latest, save_and_prune, write_result
from prge.training.encoder_heads import Heads
from prge.training.estimators.directions import philox
from prge.training.loop import loss_has_risen

AGREEMENT = "agreement.json"
# Stop after this many consecutive rounds without enough results.
MAX_SILENT_ROUNDS = 3
_PICK_STREAM = 2**64 - 2
# The step of a device whose state is unknown: its next task carries the full state.
_NO_STATE = -1


@dataclass(frozen=True)
class RoundReport:
    """The outcome of a round: which devices answered, refused (with the reason), or were silent.

    Attributes:
        number: zero-based number of the round.
        rounds: rounds of the plan.
        refused: reasons by device.
        silent: devices that sent nothing.
        bytes_up: bytes of all results.
        bytes_down: bytes of all tasks.
        answered: devices whose results count.
        shortened: devices whose results were scaled down because they were too long.
        loss: median over devices, averaged over the steps; None with noise.
        privacy_epsilon: the largest epsilon that a device reports.
        problem: what is wrong with the aggregated result; empty if nothing is.
        discarded: whether the round changed nothing. Bad results may cost a round, never the fleet.
        evaluation: scores on the development rows, if they were due.
    """

    number: int
    rounds: int
    refused: dict[int, str]
    silent: list[int]
    bytes_up: int
    bytes_down: int
    answered: list[int] = field(default_factory=list)
    shortened: list[int] = field(default_factory=list)
    loss: float | None = None
    privacy_epsilon: float = 0.0
    problem: str = ""
    discarded: bool = False
    evaluation: Record = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = [f"{node} refused: {reason}" for node, reason in list(self.refused.items())[:3]]
        parts = (
            f"round {self.number + 1}/{self.rounds}: {len(self.answered)} answers",
            "" if self.loss is None else f"loss {self.loss:.4g}",
            f"{len(self.silent)} silent" if self.silent else "",
            *reasons,
            f"{len(self.shortened)} shortened" if self.shortened else "",
            f"discarded: {self.problem}" if self.discarded else self.problem,
            f"privacy_epsilon {self.privacy_epsilon:.3g}" if self.privacy_epsilon else "",
            f"{self.bytes_up:,} bytes up, {self.bytes_down:,} down",
            f"development loss {self.evaluation['loss']:.4g}" if self.evaluation else "",
        )
        return ", ".join(filter(None, parts))


@dataclass
class _Device:
    """What the server knows about a device.

    Attributes:
        step: the step of the global state that the device has, or _NO_STATE.
        has_agreement: whether the device has received the agreement.
        is_spent: whether the device's privacy budget is spent.
        trust: running agreement score; see `find_opposed_results`.
    """

    step: int
    has_agreement: bool = False
    is_spent: bool = False
    trust: float = 0.0


def begin_fleet(
    folder: Path, bundle: Bundle, agreement: Agreement, adapter: Adapter, head: Head | None = None
) -> None:
    """Write the initial files of a fleet's folder.

    Args:
        folder: a folder without a journal.
        bundle: the fleet's bundle.
        agreement: what the devices are held to.
        adapter: the initial adapter.
        head: the initial classification head of an encoder.

    Raises:
        RunError: the folder holds a run, or can't be written.
    """
    if not (folder / JOURNAL).is_file():
        check_new_run(folder, [AGREEMENT])
    folder.mkdir(parents=True, exist_ok=True)
    recipe = global_recipe(agreement.plan)
    with Journal(folder / JOURNAL) as journal:
        if journal.first("start") is not None:
            raise RunError(
                f"{folder} already holds a run.",
                remedy=f"Resume it with `prge fleet serve --resume {folder}`, or give another folder.",
                code="run-exists",
            )
        # Written last: a folder with this record has all of its initial files.
        journal.truncate(0)
        write_file(folder / AGREEMENT, agreement.content)
        if head is not None:
            journal.append(Heads(head).to_record())
        journal.append({**start_record(bundle, adapter), "settings": recipe.to_record()})


def has_begun(folder: Path) -> bool:
    """Return whether a folder holds a fleet."""
    return Journal(folder / JOURNAL, writable=False).first("start") is not None


def read_agreement(folder: Path) -> Agreement:
    """Read the agreement of a fleet's folder; raises RunError if this version of prge can't use it."""
    try:
        return Agreement.parse((folder / AGREEMENT).read_bytes())
    except (OSError, ConfigError) as error:
        raise RunError(
            f"{folder / AGREEMENT} is not from this version of prge: {error}",
            remedy="Use the version that started the fleet, or start a new fleet in another folder.",
            code="agreement-of-other-version",
        ) from None


@dataclass(frozen=True, kw_only=True)
class RoundsFlags:
    """How the server runs rounds."""

    per_round: int = 10
    """Devices to ask per round."""
    least_answers: int = 1
    """Fewest results that complete a round; with fewer the server asks for the round again."""
    seconds: float = 600.0
    """Seconds to wait for the results of a round."""
    eval_steps: int = 1
    """Rounds between evaluations on the development rows; 0: only before the first and after the last
    round."""


class Coordinator:
    """The server of a fleet, on a folder that `begin_fleet` wrote; a context manager.

    Attributes:
        finished_rounds: the journal's records of the rounds that are over.

    Args:
        folder: the folder of the fleet.
        bundle: the fleet's bundle.
        flags: how to run rounds.
        score: evaluates a state on the server's development rows.

    Raises:
        RunError: the folder holds no fleet, or its journal is damaged.
    """

    def __init__(
        self,
        folder: Path,
        bundle: Bundle,
        flags: RoundsFlags,
        score: Callable[[TrainingState], Record] | None = None,
    ) -> None:
        if not has_begun(folder):
            raise RunError(
                f"{folder} does not contain a fleet.",
                remedy="Start a fleet with `prge fleet serve`.",
                code="not-a-fleet",
            )
        self.folder = folder
        self.bundle = bundle
        self.flags = flags
        self._score = score
        self.agreement = read_agreement(folder)
        self.plan = self.agreement.plan
        if self.agreement.bundle != bundle.sha256:
            raise RunError(
                f"{folder} is a fleet with another bundle.",
                remedy="Give the bundle that the fleet was started with.",
                code="bundle-differs",
            )
        self.journal = Journal(folder / JOURNAL)
        self._truncate_unfinished_round()
        self.finished_rounds = [record for record in self.journal.records if record["type"] == "round"]
        self.estimator = replay_estimator(self.plan)
        self.state = self._restore_state()
        self._encoded_rounds: list[bytes] = []
        self._devices: dict[int, _Device] = {}
        for line in self.finished_rounds:
            self._update_devices(line)
        self._task_sizes: dict[int, int] = {}
        self._silent_rounds = 0
        self.privacy_is_spent = False

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.journal.close()

    @property
    def round(self) -> int:
        """Number of rounds that are over."""
        return len(self.finished_rounds)

    @property
    def max_bytes(self) -> int:
        """Size in bytes of the largest result that the plan allows."""
        values, losses = count_values(self.plan, self.state.adapter.size), self.plan.local_steps
        zeros = np.zeros(max(values, losses), np.float32)
        return len(RoundResult(b"", 0, 0, 0, 0.0, zeros[:losses], zeros[:values]).to_bytes())

    @property
    def finished(self) -> bool:
        """Whether all rounds are over, or no device has privacy budget left."""
        return self.round >= self.plan.rounds or self.privacy_is_spent

    def tasks(self, nodes: Sequence[int]) -> dict[int, bytes]:
        """Return the tasks of the next round, by device, for some of the available devices.

        Before that, evaluates the state if an evaluation is due: at the start, or after a round that was over
        when the server was killed.

        Args:
            nodes: the devices that are available.
        """
        self._score_if_due()
        chosen = self._choose_devices(nodes)
        state = pack_state(self.state)
        tasks = {node: self._task(self._device(node), state).to_bytes() for node in chosen}
        self._task_sizes = {node: len(task) for node, task in tasks.items()}
        return tasks

    def receive(self, messages: Mapping[int, bytes]) -> RoundReport:
        """End a round with the messages that arrived; messages without a valid result are refused by name.

        A round that would make the global adapter diverge is discarded: devices continue from where they
        were.

        Args:
            messages: the messages by device.

        Raises:
            RunError: too few devices answered several rounds in a row; or the disk is full.
        """
        results, refused = self._check_messages(messages)
        silent = sorted(set(self._task_sizes) - set(messages))
        up, down = sum(map(len, messages.values())), sum(self._task_sizes.values())
        report = RoundReport(self.round, self.plan.rounds, refused, silent, up, down)
        if len(results) < self.flags.least_answers:
            self._count_silence(refused)
            return report
        self._silent_rounds = 0
        previous_trust = {node: self._device(node).trust for node in results}
        opposed_nodes, trust = find_opposed_results(results, self.plan, previous_trust)
        for node in opposed_nodes:
            del results[node]
            refused[node] = f"opposes the other devices' results (trust {trust[node]:.1f})"
        results, shortened = shorten_outliers(results, self.plan)
        first, records = self.state.step, self._records(list(results.values()))
        new_state, scores, problem = self._try_steps(records)
        if not problem:
            self.state = new_state
            for record in records:
                self.journal.append(record)
        report = replace(
            report,
            answered=sorted(results),
            shortened=shortened,
            loss=None if self.plan.noise else float(np.mean([record["loss"] for record in records])),
            privacy_epsilon=max(
                (
                    result.privacy_epsilon
                    for result in results.values()
                    if np.isfinite(result.privacy_epsilon)
                ),
                default=0.0,
            ),
            problem=problem or loss_has_risen(new_state.progress, global_recipe(self.plan).divergence_ratio),
            discarded=bool(problem),
        )
        self._end_round(report, first, trust)
        evaluation = self._score_if_due(scores)
        self._save_checkpoint()
        return replace(report, evaluation=evaluation)

    def first_state(self) -> TrainingState:
        """Return the global state before the first step."""
        return replay(self.journal, 0)

    def evaluation_after(self, record: Record) -> Record | None:
        """Return the scores on the development rows after a finished round, or None."""
        steps = self.plan.local_steps if self.plan.sends_projected_gradients else 1
        return self.journal.evaluation(record["first"] + steps * (not record.get("discarded")))

    def best_state(self) -> TrainingState:
        """Return the global state at its best step; without development rows, after the last step."""
        state = self.state.copy()
        load_best(self.folder / CHECKPOINTS, state)
        return state

    def write_final(self) -> Path:
        """Write the adapter of the best state to `final/` and return that folder."""
        self._score_if_due()
        write_result(self.folder / FINAL, self.best_state(), self.bundle.adapter, overwrite=True)
        return self.folder / FINAL

    def _device(self, node: int) -> _Device:
        """Return the entry of a device; a new device has the bundle's own adapter, if that is the start."""
        return self._devices.setdefault(node, _Device(_NO_STATE if self.agreement.start else 0))

    def _choose_devices(self, nodes: Sequence[int]) -> list[int]:
        """Choose the devices of the round; the same nodes give the same choice whenever it is repeated."""
        available = sorted(node for node in nodes if not self._device(node).is_spent) or sorted(nodes)
        order = np.argsort(philox(self.plan.seed, self.round, _PICK_STREAM, len(available)), kind="stable")
        return sorted(available[index] for index in order[: self.flags.per_round])

    def _task(self, device: _Device, state: bytes) -> RoundTask:
        """Return a device's task, with the smallest payload that brings it to the start of the round."""
        step, history = self.state.step, self._encode_history()
        # Candidates of (state, missed rounds); the smallest one is sent.
        candidates = [(state, b"")]
        if self.plan.sends_projected_gradients or step == 0:
            # The initial state is mostly zeros, so that it is small when compressed.
            candidates.append((self._start, b"".join(history)))
        if device.step == step or (device.step != _NO_STATE and self.plan.sends_projected_gradients):
            candidates.append((b"", b"".join(history[device.step // self.plan.local_steps :])))
        sent_state, missed = min(candidates, key=lambda candidate: len(candidate[0]) + len(candidate[1]))
        agreement = b"" if device.has_agreement else self.agreement.content
        return RoundTask(
            self.agreement.sha256, self.round, step, self.flags.seconds, agreement, missed, sent_state
        )

    @cached_property
    def _start(self) -> bytes:
        """The packed state before the first step."""
        return pack_state(self.first_state())

    def _encode_history(self) -> list[bytes]:
        """Return the encoded steps of each round; empty if devices send adapter changes."""
        count = self.plan.local_steps
        while (
            self.plan.sends_projected_gradients
            and (first := len(self._encoded_rounds) * count) < self.state.step
        ):
            records = [self.journal.step(step) or {} for step in range(first, first + count)]
            self._encoded_rounds.append(RoundSteps.of_records(records).to_bytes())
        return self._encoded_rounds

    def _check_messages(self, messages: Mapping[int, bytes]) -> tuple[dict[int, RoundResult], dict[int, str]]:
        """Return the results that count, and the reasons why others do not.

        A device with a refused result receives the agreement and the full state with its next task.
        """
        results: dict[int, RoundResult] = {}
        refused: dict[int, str] = {}
        for node in sorted(messages):
            try:
                results[node] = self._check_message(node, messages[node])
            except (TaskRefusedError, MessageError) as error:
                refused[node] = str(error).partition("\n")[0]
                device = self._device(node)
                device.step, device.has_agreement = _NO_STATE, False
                device.is_spent |= refused[node].startswith(BUDGET_EXCEEDED)
        return results, refused

    def _check_message(self, node: int, content: bytes) -> RoundResult:
        """Decode and check a device's message.

        Raises:
            TaskRefusedError, MessageError: the message is not a result that counts.
        """
        reply = parse_reply(content)
        if isinstance(reply, TaskRefusal):
            raise TaskRefusedError(reply.reason, code="device-refuses")
        if node not in self._task_sizes:
            raise TaskRefusedError("was not asked", code="answer-unexpected")
        if (reply.number, reply.step) != (self.round, self.state.step):
            raise TaskRefusedError(
                f"late: a result of round {reply.number + 1}, not of {self.round + 1}", code="answer-late"
            )
        check_result(reply, self.agreement, self.state.adapter.size)
        return reply

    def _records(self, results: Sequence[RoundResult]) -> list[Record]:
        """Return the journal's step records of a round."""
        plan, step = self.plan, self.state.step
        # The median: a loss that one or two devices report has no influence.
        losses = np.median([result.losses.astype(np.float64) for result in results], 0)
        values = np.array([result.values for result in results])
        if plan.sends_projected_gradients:
            rates = plan.recipe.learning_rates()
            steps = RoundSteps(
                step,
                np.array([rates(step + k)["learning_rate"] for k in range(plan.local_steps)], np.float32),
                losses.astype(np.float32),
                aggregate_projected_gradients(values, plan).reshape(plan.local_steps, -1),
            )
            return steps.records(self.round, plan.seed, plan.shape)
        # All devices take the same number of examples, so that all have the same weight.
        change = aggregate(values, plan)
        return [
            {
                "type": "step",
                "step": step,
                "round": self.round,
                "seed": plan.seed,
                "loss": float(losses.mean()),
                "learning_rate": 1.0,
                GRADIENT: encode_array(-change),
            }
        ]

    def _end_round(self, report: RoundReport, first: int, trust: Mapping[int, float]) -> None:
        """Write the journal's line of a round, which ends it, and update its devices."""
        facts = asdict(replace(report, refused={}))
        for name in ("number", "rounds", "evaluation"):
            del facts[name]
        for name, by_node in (("refused", report.refused), ("spoken", trust)):
            facts[name] = {str(node): each for node, each in by_node.items()}
        line = {"type": "round", "step": report.number, "first": first, "time": time.time(), **facts}
        self.finished_rounds.append(self.journal.append(line))
        self._update_devices(line)

    def _update_devices(self, line: Record) -> None:
        """Update what is known about devices from the journal's line of a round."""
        for node, trust in line["spoken"].items():
            self._device(int(node)).trust = trust
        for node, reason in line["refused"].items():
            # Only the device itself knows that its privacy budget is spent.
            self._device(int(node)).is_spent |= reason.startswith(BUDGET_EXCEEDED)
        for node in line["answered"]:
            # The device holds the global state of the round's first step.
            device = self._device(node)
            device.step, device.has_agreement, device.is_spent = line["first"], True, False

    def _try_steps(self, records: Sequence[Record]) -> tuple[TrainingState, Record | None, str]:
        """Apply steps to a copy of the state.

        Returns:
            The new state, its scores if an evaluation is due, and why the state is unusable; empty if it is
            usable.
        """
        state = self.state.copy()
        if problem := apply_steps(state, records, self.estimator):
            return state, None, problem
        if self._score is None or not self._is_due(self.round + 1):
            return state, None, ""
        scores = self._score(state)
        initial_scores = self.journal.evaluation(0) or scores
        max_loss = global_recipe(self.plan).divergence_ratio * max(initial_scores["loss"], 1.0)
        if not scores["loss"] <= max_loss:
            return state, None, f"the development loss would be {scores['loss']:.4g}"
        return state, scores, ""

    def _is_due(self, rounds: int) -> bool:
        """Return whether an evaluation is due after this many rounds."""
        every = self.flags.eval_steps or self.plan.rounds
        return self.finished or rounds >= self.plan.rounds or rounds % every == 0

    def _score_if_due(self, scored: Record | None = None) -> Record:
        """Evaluate the state if an evaluation is due, unless the journal has its scores.

        Args:
            scored: scores of the present state, if they are known.

        Returns:
            The journal's record; empty if no evaluation is due.
        """
        if self._score is None or not self._is_due(self.round):
            return {}
        record = self.journal.evaluation(self.state.step)
        if record is None:
            scored = scored or self._score(self.state)
            record = self.journal.append({"type": "evaluation", "step": self.state.step, **scored})
        # Repeated on resume: a kill may have come between the journal and these updates.
        self.state.judge(record)
        self._save_checkpoint()
        return record

    def _save_checkpoint(self) -> None:
        template, gradients = self.bundle.adapter, self.plan.sends_projected_gradients
        save_and_prune(self.folder, self.state, template, self.journal, 0, gradients)

    def _truncate_unfinished_round(self) -> None:
        """Remove the steps of a round that a kill interrupted."""
        types = [record["type"] for record in self.journal.records]
        last_round = max((index for index, each in enumerate(types) if each == "round"), default=-1)
        if "step" in types[last_round + 1 :]:
            self.journal.truncate(types.index("step", last_round + 1))

    def _restore_state(self) -> TrainingState:
        """Return the global state after the journal's steps."""
        state = self.first_state()
        load_latest(self.folder / CHECKPOINTS, state, newest=self.journal.steps)
        advance(state, self.journal, self.estimator, self.journal.steps)
        return state

    def _count_silence(self, refused: Mapping[int, str]) -> None:
        """Count a round without enough results.

        Raises:
            RunError: too many such rounds in a row, and not because privacy budgets are spent.
        """
        self._silent_rounds += 1
        # After several rounds, any device that could continue has been asked.
        patient = self._silent_rounds < MAX_SILENT_ROUNDS
        nodes = self._devices if patient else self._task_sizes
        self.privacy_is_spent = bool(nodes) and all(self._device(node).is_spent for node in nodes)
        if patient or self.privacy_is_spent:
            return
        reasons = "; ".join(f"{node}: {reason}" for node, reason in list(refused.items())[:3]) or "no answer"
        raise RunError(
            f"No round was completed, {self._silent_rounds} times in a row: {reasons}",
            remedy=f"When devices are available, resume with `prge fleet serve --resume {self.folder}`.",
            code="devices-silent",
        )
