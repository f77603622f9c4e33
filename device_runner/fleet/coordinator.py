"""The server's side of a fleet: which devices a round asks, and what comes of their answers.

    folder/   a run folder: journal.jsonl (steps that all devices replay, a line for every round),
              checkpoints/, final/; and agreement.json

    devices -> tasks -> (the network) -> answers -> checked -> combined -> journal -> common adapter

Knows no network: tasks and answers are bytes. A server that is killed goes on from its journal with the same
bits: a round is in it whole, or is asked for again, and devices repeat their answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.fleet.agreement import Agreement
from device_runner.fleet.combining import (
    checked,
    combined_scalars,
    middle,
    opposed_answers,
    shortened_answers,
    values_of,
)
from device_runner.fleet.common import common_recipe, pack_state, replayer, take_steps
from device_runner.fleet.messages import (
    Answer,
    MessageError,
    Refusal,
    RefusedError,
    Steps,
    Task,
    parse_answer,
)
from device_runner.fleet.privacy.reported import SPENT
from device_runner.session.inputs import origin_of
from device_runner.session.replaying import advance, replay
from prge.errors import ConfigError, RunError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.journal import GRADIENT, Journal, Record, encode_array
from prge.files.run_folder import CHECKPOINTS, FINAL, JOURNAL, check_new_run
from prge.host.atomic import write_file
from prge.learning.checkpoint import TrainingState, keep_state, load_best, load_latest, write_result
from prge.learning.encoder_heads import Heads
from prge.learning.estimators.directions import philox
from prge.learning.head import Head
from prge.learning.training import loss_has_risen

AGREEMENT = "agreement.json"
# Rounds in a row that nobody answers.
MOST_SILENT_ROUNDS = 3
_PICK_STREAM = 2**64 - 2
# What a device knows that has answered otherwise than it was asked: it gets the common state.
_NOTHING = -1


@dataclass(frozen=True)
class RoundReport:
    """What became of a round: devices that answered, refused (and why), or said nothing.

    `shortened`: devices whose answers were too long. `loss`: in the middle of the devices', at the steps'
    mean; none under noise. `privacy_epsilon`: the largest that a device says it has spent. `problem`: of the
    result; `discarded` says that it changed nothing, for what devices say may cost a round and never the
    fleet.
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
    """What a server knows of a device.

    `step`: of the common state that it has, or _NOTHING. `introduced`: whether it has the agreement. `spent`:
    whether it has no privacy left to spend. `spoken`: what speaks for it; see `opposed_answers`.
    """

    step: int
    introduced: bool = False
    spent: bool = False
    spoken: float = 0.0


def begin_fleet(
    folder: Path, bundle: Bundle, agreement: Agreement, adapter: Adapter, head: Head | None = None
) -> None:
    """Write what a fleet's folder begins with.

    Args:
        folder: without a journal yet.
        bundle: the fleet's.
        agreement: what its devices are held to.
        adapter: to start from.
        head: an encoder's.

    Raises:
        RunError: the folder holds a run, or can't be written.
    """
    if not (folder / JOURNAL).is_file():
        check_new_run(folder, [AGREEMENT])
    folder.mkdir(parents=True, exist_ok=True)
    recipe = common_recipe(agreement.plan)
    with Journal(folder / JOURNAL) as journal:
        if journal.first("start") is not None:
            raise RunError(
                f"{folder} holds a run already",
                remedy=f"go on with it: prge fleet serve --resume {folder}; or give another folder",
                code="run-exists",
            )
        # The start comes last: with it a fleet has begun, whole.
        journal.undo_after(0)
        write_file(folder / AGREEMENT, agreement.content)
        if head is not None:
            journal.append(Heads(head).to_record())
        journal.append({**origin_of(bundle, adapter), "settings": recipe.to_record()})


def has_begun(folder: Path) -> bool:
    """Whether a folder is that of a fleet."""
    return Journal(folder / JOURNAL, writable=False).first("start") is not None


def agreement_of(folder: Path) -> Agreement:
    """The agreement of a fleet's folder; raises RunError where this version of prge can't use it."""
    try:
        return Agreement.parse((folder / AGREEMENT).read_bytes())
    except (OSError, ConfigError) as error:
        raise RunError(
            f"{folder / AGREEMENT} is none of this version of prge: {error}",
            remedy="go on with the version that began the fleet, or begin another in another folder",
            code="agreement-of-other-version",
        ) from None


@dataclass(frozen=True, kw_only=True)
class RoundsFlags:
    """How rounds are taken."""

    per_round: int = 10
    """Devices that a round asks."""
    least_answers: int = 1
    """A round with fewer answers is asked for again."""
    seconds: float = 600.0
    """How long a round's answers are waited for."""
    evaluate_every: int = 1
    """Rounds between scores of development rows; 0: before the first and after the last alone."""


class Coordinator:
    """The server of a fleet, on a folder that `begin_fleet` made; a context manager.

    `over` has the journal's records of the rounds that are over.

    Args:
        folder: of the fleet.
        bundle: the fleet's.
        flags: how rounds are taken.
        score: scores development rows that the server has.

    Raises:
        RunError: the folder is no fleet's, or its journal is damaged.
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
                f"{folder} is no fleet's folder",
                remedy="begin a fleet with `prge fleet serve`",
                code="not-a-fleet",
            )
        self.folder = folder
        self.bundle = bundle
        self.flags = flags
        self._score = score
        self.agreement = agreement_of(folder)
        self.plan = self.agreement.plan
        if self.agreement.bundle != bundle.sha256:
            raise RunError(
                f"{folder} is a fleet of another bundle",
                remedy="give the bundle that it was begun with",
                code="bundle-differs",
            )
        self.journal = Journal(folder / JOURNAL)
        self._undo_half_a_round()
        self.over = [record for record in self.journal.records if record["kind"] == "round"]
        self.estimator = replayer(self.plan)
        self.state = self._state()
        self._told: list[bytes] = []
        self._devices: dict[int, _Device] = {}
        for line in self.over:
            self._take_note(line)
        self._asked: dict[int, int] = {}
        self._silent_rounds = 0
        self.privacy_is_spent = False

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.journal.close()

    @property
    def round(self) -> int:
        """Rounds that are over."""
        return len(self.over)

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest answer of the plan."""
        values, losses = values_of(self.plan, self.state.adapter.size), self.plan.local_steps
        zeros = np.zeros(max(values, losses), np.float32)
        return len(Answer(b"", 0, 0, 0, 0.0, zeros[:losses], zeros[:values]).to_bytes())

    @property
    def finished(self) -> bool:
        """Whether all rounds are over, or no device may spend more of its privacy."""
        return self.round >= self.plan.rounds or self.privacy_is_spent

    def tasks(self, nodes: Sequence[int]) -> dict[int, bytes]:
        """The tasks of the next round for some of the devices that are there, by their names.

        Scores what is due first: the start, or a round that was over when the server was killed.
        """
        self._score_if_due()
        chosen = self._chosen(nodes)
        state = pack_state(self.state)
        tasks = {node: self._task(self._device(node), state).to_bytes() for node in chosen}
        self._asked = {node: len(task) for node, task in tasks.items()}
        return tasks

    def receive(self, answers: Mapping[int, bytes]) -> RoundReport:
        """End a round with the answers that came: what is no answer to it is refused by name.

        What makes the common adapter absurd is discarded: devices go on from where they were.

        Raises:
            RunError: nobody answered, several rounds in a row; or no space left.
        """
        good, refused = self._sorted(answers)
        silent = sorted(set(self._asked) - set(answers))
        up, down = sum(map(len, answers.values())), sum(self._asked.values())
        report = RoundReport(self.round, self.plan.rounds, refused, silent, up, down)
        if len(good) < self.flags.least_answers:
            self._count_silence(refused)
            return report
        self._silent_rounds = 0
        before = {node: self._device(node).spoken for node in good}
        opposed, spoken = opposed_answers(good, self.plan, before)
        for node in opposed:
            del good[node]
            refused[node] = f"is against what the others say ({spoken[node]:.1f})"
        good, shortened = shortened_answers(good, self.plan)
        first, records = self.state.step, self._records(list(good.values()))
        after, scored, problem = self._tried(records)
        if not problem:
            self.state = after
            for record in records:
                self.journal.append(record)
        report = replace(
            report,
            answered=sorted(good),
            shortened=shortened,
            loss=None if self.plan.noise else float(np.mean([record["loss"] for record in records])),
            privacy_epsilon=max(
                (answer.privacy_epsilon for answer in good.values() if np.isfinite(answer.privacy_epsilon)),
                default=0.0,
            ),
            problem=problem or loss_has_risen(after.progress, common_recipe(self.plan).divergence_ratio),
            discarded=bool(problem),
        )
        self._end_round(report, first, spoken)
        evaluation = self._score_if_due(scored)
        self._keep()
        return replace(report, evaluation=evaluation)

    def first_state(self) -> TrainingState:
        """The common state before the first step."""
        return replay(self.journal, 0)

    def evaluation_after(self, record: Record) -> Record | None:
        """Scores of development rows after a round that is over, if there are any."""
        steps = self.plan.local_steps if self.plan.by_scalars else 1
        return self.journal.evaluation(record["first"] + steps * (not record.get("discarded")))

    def best_state(self) -> TrainingState:
        """The common state at the best step, or after the last one without development rows."""
        state = self.state.copy()
        load_best(self.folder / CHECKPOINTS, state)
        return state

    def write_final(self) -> Path:
        """Write the adapter of the best state as `final/`."""
        self._score_if_due()
        write_result(self.folder / FINAL, self.best_state(), self.bundle.adapter, overwrite=True)
        return self.folder / FINAL

    def _device(self, node: int) -> _Device:
        """What is known of a device; a new one has the bundle's own adapter, if that is the start."""
        return self._devices.setdefault(node, _Device(_NOTHING if self.agreement.start else 0))

    def _chosen(self, nodes: Sequence[int]) -> list[int]:
        """The devices of the round: the same ones of the same nodes, whenever it is asked for."""
        there = sorted(node for node in nodes if not self._device(node).spent) or sorted(nodes)
        order = np.argsort(philox(self.plan.seed, self.round, _PICK_STREAM, len(there)), kind="stable")
        return sorted(there[index] for index in order[: self.flags.per_round])

    def _task(self, device: _Device, state: bytes) -> Task:
        """What a device is asked, with the least that brings it to where the round begins."""
        step, history = self.state.step, self._history()
        # State and missed rounds: nothing but the present state, the start, what the device has.
        ways = [(state, b"")]
        if self.plan.by_scalars or step == 0:
            # Compressed: the start is mostly zeros.
            ways.append((self._start, b"".join(history)))
        if device.step == step or (device.step != _NOTHING and self.plan.by_scalars):
            ways.append((b"", b"".join(history[device.step // self.plan.local_steps :])))
        sent, missed = min(ways, key=lambda way: len(way[0]) + len(way[1]))
        text = b"" if device.introduced else self.agreement.content
        return Task(self.agreement.sha256, self.round, step, self.flags.seconds, text, missed, sent)

    @cached_property
    def _start(self) -> bytes:
        """The state before the first step."""
        return pack_state(self.first_state())

    def _history(self) -> list[bytes]:
        """The rounds' steps, as messages carry them; none where devices send changes."""
        count = self.plan.local_steps
        while self.plan.by_scalars and (first := len(self._told) * count) < self.state.step:
            records = [self.journal.step(step) or {} for step in range(first, first + count)]
            self._told.append(Steps.of_records(records).to_bytes())
        return self._told

    def _sorted(self, answers: Mapping[int, bytes]) -> tuple[dict[int, Answer], dict[int, str]]:
        """The answers that count, and why others don't; their devices get everything with the next task."""
        good: dict[int, Answer] = {}
        refused: dict[int, str] = {}
        for node in sorted(answers):
            try:
                good[node] = self._good(node, answers[node])
            except (RefusedError, MessageError) as error:
                refused[node] = str(error).partition("\n")[0]
                device = self._device(node)
                device.step, device.introduced = _NOTHING, False
                device.spent |= refused[node].startswith(SPENT)
        return good, refused

    def _good(self, node: int, content: bytes) -> Answer:
        """An answer that counts.

        Raises:
            RefusedError, MessageError: why it doesn't.
        """
        said = parse_answer(content)
        if isinstance(said, Refusal):
            raise RefusedError(said.reason, code="device-refuses")
        if node not in self._asked:
            raise RefusedError("wasn't asked", code="answer-unexpected")
        if (said.number, said.step) != (self.round, self.state.step):
            raise RefusedError(
                f"late: an answer of round {said.number + 1}, not of {self.round + 1}", code="answer-late"
            )
        checked(said, self.agreement, self.state.adapter.size)
        return said

    def _records(self, answers: Sequence[Answer]) -> list[Record]:
        """The journal's step records of a round."""
        plan, step = self.plan, self.state.step
        # By the middle one of the devices: a word of one or two of them is nobody's.
        losses = np.median([answer.losses.astype(np.float64) for answer in answers], 0)
        values = np.array([answer.values for answer in answers])
        if plan.by_scalars:
            rates = plan.recipe.learning_rates()
            steps = Steps(
                step,
                np.array([rates(step + k)["learning_rate"] for k in range(plan.local_steps)], np.float32),
                losses.astype(np.float32),
                combined_scalars(values, plan).reshape(plan.local_steps, -1),
            )
            return steps.records(self.round, plan.seed, plan.shape)
        # Every device has as many examples, so nobody's weight is larger.
        change = middle(values, plan)
        return [
            {
                "kind": "step",
                "step": step,
                "round": self.round,
                "seed": plan.seed,
                "loss": float(losses.mean()),
                "learning_rate": 1.0,
                GRADIENT: encode_array(-change),
            }
        ]

    def _end_round(self, report: RoundReport, first: int, spoken: Mapping[int, float]) -> None:
        """Write the round's line, which ends it, and take note of what its devices have now."""
        facts = asdict(replace(report, refused={}))
        for name in ("number", "rounds", "evaluation"):
            del facts[name]
        for name, by_node in (("refused", report.refused), ("spoken", spoken)):
            facts[name] = {str(node): each for node, each in by_node.items()}
        line = {"kind": "round", "step": report.number, "first": first, "time": time.time(), **facts}
        self.over.append(self.journal.append(line))
        self._take_note(line)

    def _take_note(self, line: Record) -> None:
        """Keep what a round's line says of its devices."""
        for node, spoken in line["spoken"].items():
            self._device(int(node)).spoken = spoken
        for node, reason in line["refused"].items():
            # Who has no privacy left to spend says so for itself alone.
            self._device(int(node)).spent |= reason.startswith(SPENT)
        for node in line["answered"]:
            # It holds the common state of where the round began.
            device = self._device(node)
            device.step, device.introduced, device.spent = line["first"], True, False

    def _tried(self, records: Sequence[Record]) -> tuple[TrainingState, Record | None, str]:
        """The state after common steps, its scores where they are due, and why it is absurd, if it is."""
        state = self.state.copy()
        if problem := take_steps(state, records, self.estimator):
            return state, None, problem
        if self._score is None or not self._is_due(self.round + 1):
            return state, None, ""
        scored = self._score(state)
        began = self.journal.evaluation(0) or scored
        most = common_recipe(self.plan).divergence_ratio * max(began["loss"], 1.0)
        if not scored["loss"] <= most:
            return state, None, f"the development loss would be {scored['loss']:.4g}"
        return state, scored, ""

    def _is_due(self, rounds: int) -> bool:
        """Whether development rows are scored after so many rounds."""
        every = self.flags.evaluate_every or self.plan.rounds
        return self.finished or rounds >= self.plan.rounds or rounds % every == 0

    def _score_if_due(self, scored: Record | None = None) -> Record:
        """Score development rows if it is time to, unless the journal has that; nothing if it isn't."""
        if self._score is None or not self._is_due(self.round):
            return {}
        record = self.journal.evaluation(self.state.step)
        if record is None:
            scored = scored or self._score(self.state)
            record = self.journal.append({"kind": "evaluation", "step": self.state.step, **scored})
        # A kill may have come between the journal and what follows.
        self.state.judge(record)
        self._keep()
        return record

    def _keep(self) -> None:
        template, gradients = self.bundle.adapter, self.plan.by_scalars
        keep_state(self.folder, self.state, template, self.journal, 0, gradients)

    def _undo_half_a_round(self) -> None:
        """Leave out steps of a round that a kill cut off."""
        types = [record["kind"] for record in self.journal.records]
        ended = max((index for index, each in enumerate(types) if each == "round"), default=-1)
        if "step" in types[ended + 1 :]:
            self.journal.undo_after(types.index("step", ended + 1))

    def _state(self) -> TrainingState:
        """The common state after the journal's steps."""
        state = self.first_state()
        load_latest(self.folder / CHECKPOINTS, state, newest=self.journal.steps)
        advance(state, self.journal, self.estimator, self.journal.steps)
        return state

    def _count_silence(self, refused: Mapping[int, str]) -> None:
        """Take note of a round without answers.

        Raises:
            RunError: it is one too many, and not because privacy is spent.
        """
        self._silent_rounds += 1
        # After some rounds those that could go on have gone.
        patient = self._silent_rounds < MOST_SILENT_ROUNDS
        nodes = self._devices if patient else self._asked
        self.privacy_is_spent = bool(nodes) and all(self._device(node).spent for node in nodes)
        if patient or self.privacy_is_spent:
            return
        reasons = "; ".join(f"{node}: {reason}" for node, reason in list(refused.items())[:3]) or "no answer"
        raise RunError(
            f"no round could be ended, {self._silent_rounds} times in a row: {reasons}",
            remedy=f"go on when devices are there: prge fleet serve --resume {self.folder}",
            code="devices-silent",
        )
