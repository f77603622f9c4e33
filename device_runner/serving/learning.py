"""Learning from feedback while serving: runs rounds, serves better adapters, and keeps their history.

feedback.jsonl    the clients' feedback
adapters.jsonl    journal: the start, the rows of each round, its verdict, and what was taken back
rounds/0001/      a round; final/ is its adapter

A round has a fixed number of rows in their order, so that adapters depend on the feedback, and not on when it
arrived or how often a process was killed. A process of its own runs each round, and is paused while
completions are generated.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from device_runner.serving.feedback_index import SECONDS, ChangedError, FeedbackIndex, IndexEntry
from device_runner.serving.history import FEEDBACK, ROUNDS, History, Version, read_date
from device_runner.serving.protocol import RequestError
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.rounds import (
    Round,
    build_options,
    objective_of,
    read_retained_examples,
    split_held_out,
    unlearnable,
)
from device_runner.serving.settings import LearnFlags
from device_runner.session.pauses import Pauses
from device_runner.session.plan import DEFAULT_BATCH, RunPlan, plan_run, resolve_settings
from device_runner.session.sensors import Sensors
from device_runner.session.settings import EngineFlags, RunSettings
from prge.cli.settings import read_stored
from prge.data.feedback_examples import FeedbackExamples, UnlearnableError
from prge.data.readers.feedback import adapter_digest
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import PrgeError, RunError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.peft import find_adapter, find_run, read_compatible_adapter, read_peft
from prge.formats.run_folder import CHECKPOINTS, CONFIG, FINAL
from prge.formats.stored_settings import check_links
from prge.formats.tune_folder import find_tuning
from prge.objectives.preferences import ObjectiveFlags
from prge.training.estimators.rewards import RewardFlags

# Maximum number of rows of refused rounds that the next round learns again.
_MAX_OPEN = 256
_ANY_LOSS = 1e6
# Seconds between two checks for something to learn, and of the sensors.
SECONDS_TO_LOOK = 5.0
# Seconds to wait after a failure, such as a full disk.
SECONDS_TO_RETRY = 30.0
_Json = dict[str, Any]


class OnlineLearner:
    """Runs rounds one after the other, and serves better adapters.

    The storage's thread calls `work` and `take_back`. Any thread may call `pause`, and read `history` and
    `problem`, which never block.

    Args:
        flags: `learn` is the folder.
        plan: the plan of the rounds.
        has_retained: whether the plan's settings name rows that must not be forgotten.
        bundle: the bundle of all adapters.
        start: the initial adapter.
        tokenizer: used by this object only.
        serve: replaces the adapter that is served.
        log: called with messages for the user.
        begin: starts the process of a round.
        storage: executor with the one thread that reads and writes files of feedback and of adapters.
        loaded: bytes of weights that the process of a round may keep loaded; None: all.

    Raises:
        ConfigError, RunError: the folder belongs to something else, or can't be used.
    """

    def __init__(
        self,
        flags: LearnFlags,
        plan: RunPlan,
        has_retained: bool,
        bundle: Bundle,
        start: Adapter,
        tokenizer: Tokenizer,
        *,
        serve: Callable[[Adapter], object],
        log: Callable[[str], object],
        begin: Callable[[Round], RoundProcess],
        storage: Executor,
        loaded: int | None = None,
    ) -> None:
        assert flags.learn is not None
        self._flags, self._plan, self._has_kept, self._bundle = flags, plan, has_retained, bundle
        self._folder, self._start = flags.learn, start
        self.examples = FeedbackExamples(
            tokenizer, bundle.chain.model, build_options(plan.settings, plan.settings.objective)
        )
        """Builds the examples of feedback; also used to refuse feedback that can't be trained on."""
        self._chat_template = tokenizer.chat_template
        self._serve, self._log, self._begin = serve, log, begin
        self.storage, self._loaded = storage, loaded
        begun = {"bundle": bundle.sha256, "adapter": adapter_digest(start)}
        self._history = History(self._folder, begun, plan.settings.date)
        self.problem = ""
        """Why learning does not currently work; empty if nothing is wrong."""
        self.peak_bytes = 0
        """Highest memory use of the process of a round."""
        self._retry_at = 0.0
        self._index = FeedbackIndex(self._folder / FEEDBACK, flags.learn_objective != "completion")
        # Whether rows that were in no round can be trained on, by their keys.
        self._learnable = dict[str, bool]()
        # State at the last check for a new round: the file's generation, its rows, and the versions.
        self._seen = (0, 0, 0)
        # The process of the open round: its start, the keys of its rows, and the generation of the file.
        self._process: RoundProcess | None = None
        self._begun_at, self._keys, self._generation = 0.0, list[str](), 0
        sensors = Sensors(own_seconds=self.cpu_seconds)
        self._pauses = Pauses(flags.learning_conditions(), sensors, seconds=SECONDS_TO_LOOK)
        # Guards the process and the reasons why it is paused.
        self._lock = threading.Lock()
        self._answering, self._must_wait = 0, False
        # Used by the event loop: the call of `work` in progress, and when the next one is due.
        self._pending: Future[bool] | None = None
        self._due_at, self._is_woken = 0.0, False
        self._tidy()

    @property
    def adapter(self) -> Adapter:
        """The adapter that is served."""
        return self._adapter(self._history.current)

    def tick(self) -> None:
        """Submit `work` to the storage's thread if it is due; called by the event loop."""
        if self._pending is not None:
            if not self._pending.done():
                return
            has_more, self._pending = self._pending.result(), None
            self._due_at = time.monotonic() + (0 if has_more else SECONDS_TO_LOOK)
        if self._is_woken or time.monotonic() >= self._due_at:
            self._is_woken = False
            self._pending = self.storage.submit(self.work)

    def wake(self, *_: object) -> None:
        """Look for something to learn as soon as possible; called by the event loop."""
        self._is_woken = True

    def pause(self, is_answering: bool) -> None:
        """Pause the process of a round, until called with False as often as with True."""
        with self._lock:
            self._answering += 1 if is_answering else -1
            self._set_pause()

    def work(self) -> bool:
        """Do one unit of work: read feedback, begin a round, or serve the result of one.

        Returns:
            False if there is currently nothing more to do.
        """
        if time.monotonic() < self._retry_at:
            return False
        # Reading sensors may take a moment.
        must_wait = bool(self._pauses.reason_to_wait(lambda text: self._log(f"learning: {text}")))
        if must_wait and self._process is None:
            return False
        with self._lock:
            self._must_wait = must_wait
            self._set_pause()
        try:
            has_more = self._advance()
        except (PrgeError, OSError) as error:
            self._end_round()
            self._retry_at = time.monotonic() + SECONDS_TO_RETRY
            if self.problem != str(error):
                self._log(f"learning failed, trying again every {SECONDS_TO_RETRY:.0f} seconds: {error}")
            self.problem = str(error)
            return False
        if self._process is None:
            if self.problem:
                self._log("learning continues")
            self.problem = ""
        return has_more

    def history(self) -> list[_Json]:
        """Return all adapters, the newest last."""
        return self._history.described

    def revert(self, version: int) -> int:
        """Serve the parent of the version that is served; ends the round that builds on that version.

        Args:
            version: the version that the client believes to be served.

        Returns:
            The version that is served now.

        Raises:
            RequestError: another version is served, or the initial one.
        """
        current = self._history.current
        if current == 0:
            raise RequestError(409, "the initial adapter is served: there is no adapter to take back")
        if version != current:
            what = f"version {version} is not served: version {current} is"
            raise RequestError(409, what, param="version", code="version_not_served")
        parent = self._history.versions[current].parent or 0
        adapter = self._adapter(parent)
        self._end_round()
        self._history.add("back", current)
        if (begun := self._history.open) is not None:
            self._history.add("judged", begun.number, status="abandoned")
            self._tidy()
            self._log(begun.format_line())
        self._serve(adapter)
        return parent

    def close(self) -> None:
        """End the process of a round, and close all files; the storage's thread must have ended."""
        self._end_round()
        self._index.close()
        self._history.close()

    def cpu_seconds(self) -> float:
        """Return the processor time of this process and its children so far."""
        ended, process = os.times(), self._process
        running = 0.0 if process is None else process.cpu_seconds
        return time.process_time() + ended.children_user + ended.children_system + running

    def _advance(self) -> bool:
        has_more = self._read_on()
        version = self._history.open
        if (process := self._process) is None:
            if version is None or has_more:
                return has_more
            self._begin_round(version)
            return True
        assert version is not None
        if self._generation != self._index.generation:  # some of the rows may have been deleted
            self._end_round()
        elif (outcome := process.poll()) is not None:
            self._end_round()
            self._handle_outcome(version, outcome)
        return True

    def _begin_round(self, version: Version) -> None:
        round = self._new_round(version)
        self._begun_at, self._generation = time.monotonic(), self._index.generation
        self._keys = [row.key for row in (*round.learnt, *round.held_out)]
        process = self._begin(round)
        with self._lock:
            self._process = process
            self._set_pause()

    def _end_round(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            self.peak_bytes = max(self.peak_bytes, process.peak_bytes)
            process.end()

    def _set_pause(self) -> None:
        if self._process is not None:
            self._process.pause(self._answering > 0 or self._must_wait)

    def _handle_outcome(self, version: Version, outcome: _Json) -> None:
        """Handle the outcome of a round."""
        if outcome["status"] == "problem":
            raise RunError(outcome["problem"], code="round-failed")
        # An adapter that was trained on a deleted row is not served: the round begins again without the row.
        if not self._index.has_all(self._keys) or outcome["status"] == "changed":
            return
        adapter = self._read(version.number) if outcome["status"] == "served" else None
        verdict = {**outcome, "seconds": time.monotonic() - self._begun_at}
        self._history.add("judged", version.number, **verdict)
        if adapter is not None:
            self._serve(adapter)
        self._tidy()
        self._log(version.format_line())

    def _read_on(self) -> bool:
        """Read feedback for a moment, and begin a round if there is enough; True if there is more to read."""
        if self._index.read_on():
            return True
        history, every = self._history, self._flags.learn_every
        if history.open is not None:
            return False
        state = self._index.generation, len(self._index), len(history.versions) + history.abandoned
        if state == self._seen:
            return False
        until, new = 0.0, list[str]()
        for key in self._index.keys:
            if key in history.rows or not self._learnable.get(key, True):
                continue
            if key not in self._learnable:
                until = until or time.monotonic() + SECONDS
                if time.monotonic() > until:
                    return True
                if not self._is_learnable(key):
                    continue
            new.append(key)
            if len(new) == every:
                history.add("round", len(history.versions), parent=history.current, rows=new)
                for each in new:
                    del self._learnable[each]
                return False
        self._seen = state
        return False

    def _is_learnable(self, key: str) -> bool:
        """Return whether a row can be trained on; False if the file no longer has it."""
        try:
            (row,) = self._index.rows([key])
        except ChangedError:
            return False  # the index has a new generation
        try:
            self.examples.build(row)
        except UnlearnableError as error:
            self._learnable[key] = False
            self._log(unlearnable(row, error))
        else:
            self._learnable[key] = True
        return self._learnable[key]

    def _tidy(self) -> None:
        """Delete adapters that can no longer be restored, and checkpoints of finished rounds."""
        for version in self._history.versions[1:]:
            folder = self._folder_of(version.number)
            if version.status == "served":
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            elif version.status != "learning":
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, version: int) -> Path:
        return self._folder / ROUNDS / f"{version:04d}"

    def _new_round(self, version: Version) -> Round:
        """Return a round with those of its rows that the file still has."""

        def existing_entries(keys: Sequence[str]) -> list[IndexEntry]:
            return [entry for entry in self._index.entries(keys) if entry.is_learnable]

        parent = version.parent or 0
        unlearnt: list[IndexEntry] = []
        learnt: list[IndexEntry] = []
        for each in self._history.versions[1 : version.number]:
            if each.status not in ("served", "refused"):
                continue
            if each.number > parent:
                unlearnt += existing_entries(each.rows)
            else:
                learning, held_out = split_held_out(existing_entries(each.rows))
                learnt, unlearnt = [*learnt, *unlearnt, *learning], held_out
        learning, held_out = split_held_out(existing_entries(version.rows))
        settings = self._plan.settings
        seed, folder = settings.seed + version.number, self._folder_of(version.number)
        return Round(
            number=version.number,
            settings=replace(settings, out=folder, seed=seed),
            role=self._plan.role,
            adapter=self._adapter(parent),
            start=self._start,
            feedback=self._folder / FEEDBACK,
            learnt=[*unlearnt[-_MAX_OPEN:], *learning],
            held_out=held_out,
            learnt_before=learnt,
            replay=self._flags.replay,
            may_lose=self._flags.may_lose,
            has_retained=self._has_kept,
            chat_template=self._chat_template,
            loaded=self._loaded,
        )

    def _adapter(self, version: int) -> Adapter:
        return self._start if version == 0 else self._read(version)

    def _read(self, version: int) -> Adapter:
        return read_peft(self._folder_of(version) / FINAL, self._bundle.chain.modules)


def plan_rounds(
    flags: LearnFlags, engine: EngineFlags, source: Path | None, bundle: Bundle, tokenizer: Tokenizer
) -> tuple[RunPlan, bool]:
    """Return the plan of rounds, and whether the settings name rows that must not be forgotten.

    Args:
        flags: `learn` is the folder to learn into.
        engine: flags of the engine.
        source: tuning, run or PEFT folder of the initial adapter; None: the bundle's adapter.
        bundle: the bundle of all adapters.
        tokenizer: the tokenizer of the bundle.

    Raises:
        PrgeError: the rows that must not be forgotten can't be used, or the bundle's programs can't train
            the initial adapter.
    """
    assert flags.learn is not None
    run = None
    if source is not None:
        # An adapter for generation may have a lora_a that the bundle's programs can't train with.
        read_compatible_adapter(find_adapter(source), bundle.chain.modules, bundle.adapter)
        run = find_run(find_adapter(source))
    tuning = None if source is None or flags.kept is not None else find_tuning(source)
    settings, has_retained = _settings(flags, engine, bundle, run, has_rows=tuning is not None)
    if tuning is not None and has_retained:
        check_links(tuning.rows)
        dev = tuning.rows / "dev.jsonl"
        settings = replace(settings, train=tuning.rows / "train.jsonl", dev=dev if dev.is_file() else None)
    settings = resolve_settings(
        replace(settings, date=read_date(flags.learn) or settings.date), bundle
    ).with_date()
    replayed = read_retained_examples(settings, tokenizer, bundle).replayed if has_retained else []
    plan = plan_run(bundle, replayed, replace(settings, epochs=None), objective_of(settings))
    if settings.objective == "kto":  # examples get another answer, see `with_other_answers`
        pairs = replace(plan.shape, sequences=2 * plan.shape.sequences, sequences_per_example=2)
        plan = replace(plan, shape=pairs)
    return replace(plan, settings=replace(settings, batch_size=plan.settings.batch_size)), has_retained


def _settings(
    flags: LearnFlags, engine: EngineFlags, bundle: Bundle, run: Path | None, has_rows: bool
) -> tuple[RunSettings, bool]:
    """Return the settings of rounds: those of the previous run, or the defaults of `prge run`.

    Also returns whether they name rows that must not be forgotten.

    Args:
        flags: the flags of learning.
        engine: flags of the engine.
        bundle: the bundle that is served.
        run: the run that trained the initial adapter.
        has_rows: whether the rows to retain are next to the run, as in the folder of a tuning.
    """
    assert flags.learn is not None
    train = flags.kept or flags.learn / FEEDBACK
    settings = RunSettings(bundle=bundle.folder, train=train, out=flags.learn, batch_size=DEFAULT_BATCH)
    if run is not None:
        unread = {"bundle", "out", "adapter", "resume", "sample_prompts", "heads_of"}
        unread |= {"train", "dev"} if has_rows else set()
        unread |= set() if flags.kept is None else {"train", "dev", "task"}
        remedy = "Give the rows that must not be forgotten with --kept."
        settings = read_stored(RunSettings, run / CONFIG, "prge run", unread, remedy)
    # The prompts of a reward have no answers to retain.
    has_retained = flags.kept is not None or (run is not None and settings.reward is None)
    if settings.reward is not None:
        own: dict[str, Any] = {each.name: each.default for each in fields(RewardFlags)}
        settings = replace(settings, reward=None, objective="auto", beta=None, train=train, dev=None, **own)
    if flags.kept is not None:
        settings = replace(settings, train=flags.kept, dev=None, task=None, columns=[])
    if flags.learn_objective != "completion":
        # Settings of another objective, such as the previous run's, don't apply.
        own = {each.name: each.default for each in fields(ObjectiveFlags)}
        settings = replace(settings, **own)
    settings = replace(
        settings,
        bundle=bundle.folder,
        learning_rate=flags.learning_rate or settings.learning_rate,
        engine=engine.engine,
        threads=engine.threads,
        memory=engine.memory,
        objective=flags.learn_objective,
        # The first loss may come from replayed rows, which predicts nothing about corrections, and adapters
        # are judged anyway.
        divergence_ratio=_ANY_LOSS,
        train_start=0,
        train_limit=None,
        dev_start=0,
        dev_limit=None,
        steps=RunSettings.steps,
        epochs=flags.learn_epochs,
        warmup_steps=None,
        adapter=None,
        sample_prompts=None,
        sample_rows=0,
        heads_of=None,
    )
    return settings, has_retained
