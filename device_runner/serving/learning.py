"""Learning while answers are made: rounds of feedback, which adapter is served, and the history of that.

feedback.jsonl    what clients said of answers
adapters.jsonl    journal: what began, which rows a round has, how it was judged, what was taken back
rounds/0001/      a round; final/ is its adapter

A round has a fixed number of rows in their order, so that adapters follow from feedback, and not from when it
came or how often a process was killed. Each is taken by a process of its own, which computes nothing while an
answer is made.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from device_runner.serving.feedback_index import SECONDS, ChangedError, Entry, FeedbackIndex
from device_runner.serving.flags import LearnFlags
from device_runner.serving.history import FEEDBACK, ROUNDS, History, Version, date_of
from device_runner.serving.protocol import RequestError
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.rounds import Round, build_options, held_back, read_kept, unlearnable
from device_runner.session.gates import Gates
from device_runner.session.planning import DEFAULT_BATCH, RunPlan, plan_run, settled
from device_runner.session.sensors import Sensors
from device_runner.session.settings import EngineFlags, RunSettings
from prge.errors import PrgeError, RunError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.own_settings import check_links
from prge.files.peft import find_adapter, read_compatible_adapter, read_peft, run_of
from prge.files.run_folder import CHECKPOINTS, CONFIG, FINAL
from prge.files.tuned import tuning_at
from prge.rows.feedback_examples import FeedbackExamples, UnlearnableError
from prge.rows.readers.feedback import adapter_digest
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.verbs.settings import read_stored

# Rows of refused rounds that the next one learns, too.
_MOST_OPEN = 256
_ANY_LOSS = 1e6
# Between two looks for something to learn, and at the sensors.
SECONDS_TO_LOOK = 5.0
# After a failure, such as of a full disk, until it is tried again.
SECONDS_TO_RETRY = 30.0
_Json = dict[str, Any]


class Learning:
    """Has rounds taken, one after the other, and serves what is better.

    The storage's thread calls `work` and `take_back`. Any thread may call `pause`, and read `history` and
    `problem`, which never block.

    Args:
        flags: `learn` is the folder.
        plan: of rounds.
        has_kept: whether its settings name rows that must not be forgotten.
        bundle: of all adapters.
        start: the adapter that is served where nothing was learnt yet.
        tokenizer: of what learns alone.
        serve: puts an adapter in the place of the one that is served.
        tell: called with what a user should know.
        begin: starts the process of a round.
        storage: the one thread that reads and writes files of feedback and of what is learnt.
        loaded: bytes of weights that the process of a round may keep loaded; None: all.

    Raises:
        ConfigError, RunError: the folder is of something else, or can't be used.
    """

    def __init__(
        self,
        flags: LearnFlags,
        plan: RunPlan,
        has_kept: bool,
        bundle: Bundle,
        start: Adapter,
        tokenizer: Tokenizer,
        *,
        serve: Callable[[Adapter], object],
        tell: Callable[[str], object],
        begin: Callable[[Round], RoundProcess],
        storage: Executor,
        loaded: int | None = None,
    ) -> None:
        assert flags.learn is not None
        self._flags, self._plan, self._has_kept, self._bundle = flags, plan, has_kept, bundle
        self._folder, self._start = flags.learn, start
        self.examples = FeedbackExamples(tokenizer, bundle.chain.model, build_options(plan.settings))
        """Builds the examples of feedback; whoever takes feedback asks it first if a row can be learnt."""
        self._chat_template = tokenizer.chat_template
        self._serve, self._tell, self._begin = serve, tell, begin
        self.storage, self._loaded = storage, loaded
        begun = {"bundle": bundle.sha256, "adapter": adapter_digest(start)}
        self._history = History(self._folder, begun, plan.settings.date)
        self.problem = ""
        """Why nothing is learnt by now; empty if nothing is wrong."""
        self.peak_bytes = 0
        """The most memory that a round's process took."""
        self._retry_at = 0.0
        self._index = FeedbackIndex(self._folder / FEEDBACK)
        # Whether rows can be learnt that no round has had, by their keys.
        self._learnable = dict[str, bool]()
        # Of the last look for a round: the file, its rows, and the versions.
        self._seen = (0, 0, 0)
        # Of the open round's process: when it began, the rows that it learns, and the file that had them.
        self._process: RoundProcess | None = None
        self._begun_at, self._keys, self._generation = 0.0, list[str](), 0
        sensors = Sensors(own_seconds=self.cpu_seconds)
        self._gates = Gates(flags.learning_conditions(), sensors, seconds=SECONDS_TO_LOOK)
        # Over the process and why it is paused.
        self._lock = threading.Lock()
        self._answering, self._must_wait = 0, False
        # Of the event loop: the look that is taken, and when the next one is.
        self._look: Future[bool] | None = None
        self._next, self._is_woken = 0.0, False
        self._tidy()

    @property
    def adapter(self) -> Adapter:
        """The one that is served."""
        return self._adapter(self._history.current)

    def tick(self) -> None:
        """Have the storage's thread look, unless it does, or did a moment ago; called by the event loop."""
        if self._look is not None:
            if not self._look.done():
                return
            has_more, self._look = self._look.result(), None
            self._next = time.monotonic() + (0 if has_more else SECONDS_TO_LOOK)
        if self._is_woken or time.monotonic() >= self._next:
            self._is_woken = False
            self._look = self.storage.submit(self.work)

    def wake(self, *_: object) -> None:
        """Look for something to learn as soon as possible; called by the event loop."""
        self._is_woken = True

    def pause(self, is_answering: bool) -> None:
        """Let the process of a round compute nothing, until it is called with False as often as with True."""
        with self._lock:
            self._answering += 1 if is_answering else -1
            self._set_pause()

    def work(self) -> bool:
        """Look once: read feedback, begin a round, serve what came of one; False if nothing is to be done."""
        if time.monotonic() < self._retry_at:
            return False
        # Sensors may take a moment to read.
        must_wait = bool(self._gates.closed(lambda text: self._tell(f"learning: {text}")))
        if must_wait and self._process is None:
            return False
        with self._lock:
            self._must_wait = must_wait
            self._set_pause()
        try:
            has_more = self._worked()
        except (PrgeError, OSError) as error:
            self._end_round()
            self._retry_at = time.monotonic() + SECONDS_TO_RETRY
            if self.problem != str(error):
                self._tell(f"nothing is learnt, tried again every {SECONDS_TO_RETRY:.0f} seconds: {error}")
            self.problem = str(error)
            return False
        if self._process is None:
            if self.problem:
                self._tell("learning goes on")
            self.problem = ""
        return has_more

    def history(self) -> list[_Json]:
        """All adapters, the newest last."""
        return self._history.described

    def take_back(self, version: int) -> int:
        """Serve what was served before a version, which is served now; ends the round that goes on from it.

        Returns:
            The version that is served then.

        Raises:
            RequestError: another version is served, or the first one.
        """
        last = self._history.current
        if last == 0:
            raise RequestError(409, "the adapter of the start is served: there is none to take back")
        if version != last:
            what = f"version {version} isn't served: version {last} is"
            raise RequestError(409, what, param="version", code="version_not_served")
        parent = self._history.versions[last].parent or 0
        adapter = self._adapter(parent)
        self._end_round()
        self._history.add("back", last)
        if (begun := self._history.open) is not None:
            self._history.add("judged", begun.number, status="abandoned")
            self._tidy()
            self._tell(begun.line())
        self._serve(adapter)
        return parent

    def close(self) -> None:
        """End the process of a round, and close what is open; the storage's thread has ended."""
        self._end_round()
        self._index.close()
        self._history.close()

    def cpu_seconds(self) -> float:
        """Processor time of this process and of its children so far."""
        ended, process = os.times(), self._process
        running = 0.0 if process is None else process.cpu_seconds
        return time.process_time() + ended.children_user + ended.children_system + running

    def _worked(self) -> bool:
        has_more = self._read_on()
        version = self._history.open
        if (process := self._process) is None:
            if version is None or has_more:
                return has_more
            self._begin_round(version)
            return True
        assert version is not None
        if self._generation != self._index.generation:  # of the rows some may be forgotten
            self._end_round()
        elif (outcome := process.poll()) is not None:
            self._end_round()
            self._take(version, outcome)
        return True

    def _begin_round(self, version: Version) -> None:
        round = self._new_round(version)
        self._begun_at, self._generation = time.monotonic(), self._index.generation
        self._keys = [row.key for row in (*round.learnt, *round.held)]
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

    def _take(self, version: Version, outcome: _Json) -> None:
        """Do what follows from the outcome of a round."""
        if outcome["status"] == "problem":
            raise RunError(outcome["problem"], code="round-failed")
        # An adapter that was taught a row that is forgotten isn't served: the round begins again without.
        if not self._index.has_all(self._keys) or outcome["status"] == "changed":
            return
        adapter = self._read(version.number) if outcome["status"] == "served" else None
        verdict = {**outcome, "seconds": time.monotonic() - self._begun_at}
        self._history.add("judged", version.number, **verdict)
        if adapter is not None:
            self._serve(adapter)
        self._tidy()
        self._tell(version.line())

    def _read_on(self) -> bool:
        """Read feedback for a moment, and begin a round if there is enough; whether there is more to read."""
        if self._index.read_on():
            return True
        history, every = self._history, self._flags.learn_every
        if history.open is not None:
            return False
        seen = self._index.generation, len(self._index), len(history.versions) + history.abandoned
        if seen == self._seen:
            return False
        until, new = 0.0, list[str]()
        for key in self._index.keys:
            if key in history.rows or not self._learnable.get(key, True):
                continue
            if key not in self._learnable:
                until = until or time.monotonic() + SECONDS
                if time.monotonic() > until:
                    return True
                if not self._look_at(key):
                    continue
            new.append(key)
            if len(new) == every:
                history.add("round", len(history.versions), parent=history.current, rows=new)
                for each in new:
                    del self._learnable[each]
                return False
        self._seen = seen
        return False

    def _look_at(self, key: str) -> bool:
        """Whether a row can be learnt, by trying; False where it isn't there any more."""
        try:
            (row,) = self._index.rows([key])
        except ChangedError:
            return False  # the index has another generation now
        try:
            self.examples.of(row)
        except UnlearnableError as error:
            self._learnable[key] = False
            self._tell(unlearnable(row, error))
        else:
            self._learnable[key] = True
        return self._learnable[key]

    def _tidy(self) -> None:
        """Delete the adapters of versions that can no longer be restored, and what a round went on from."""
        for version in self._history.versions[1:]:
            folder = self._folder_of(version.number)
            if version.status == "served":
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            elif version.status != "learning":
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, version: int) -> Path:
        return self._folder / ROUNDS / f"{version:04d}"

    def _new_round(self, version: Version) -> Round:
        """A round with its rows, as far as the file has them still."""

        def there(keys: Sequence[str]) -> list[Entry]:
            return [entry for entry in self._index.entries(keys) if entry.is_learnable]

        parent = version.parent or 0
        unlearnt: list[Entry] = []
        learnt: list[Entry] = []
        for each in self._history.versions[1 : version.number]:
            if each.status not in ("served", "refused"):
                continue
            if each.number > parent:
                unlearnt += there(each.rows)
            else:
                learning, held = held_back(there(each.rows))
                learnt, unlearnt = [*learnt, *unlearnt, *learning], held
        learning, held = held_back(there(version.rows))
        settings = self._plan.settings
        seed, folder = settings.seed + version.number, self._folder_of(version.number)
        return Round(
            number=version.number,
            settings=replace(settings, out=folder, seed=seed),
            role=self._plan.role,
            adapter=self._adapter(parent),
            start=self._start,
            feedback=self._folder / FEEDBACK,
            learnt=[*unlearnt[-_MOST_OPEN:], *learning],
            held=held,
            learnt_before=learnt,
            replay=self._flags.replay,
            may_lose=self._flags.may_lose,
            has_kept=self._has_kept,
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
    """How rounds are taken, and whether the settings name rows that must not be forgotten.

    Args:
        flags: `learn` is the folder to learn into.
        engine: flags of it.
        source: tuning, run or PEFT folder that the adapter of the start is from; None: it is the bundle's.
        bundle: of all adapters.
        tokenizer: of the bundle.

    Raises:
        PrgeError: rows that are to be kept can't be used, or the bundle's programs can't train the adapter of
            the start.
    """
    assert flags.learn is not None
    run = None
    if source is not None:
        # What is only generated with may have a lora_a that the bundle's programs can't train against.
        read_compatible_adapter(find_adapter(source), bundle.chain.modules, bundle.adapter)
        run = run_of(find_adapter(source))
    tuning = None if source is None or flags.kept is not None else tuning_at(source)
    settings = _settings(flags, engine, bundle, run, has_rows=tuning is not None)
    if tuning is not None:
        check_links(tuning.rows)
        dev = tuning.rows / "dev.jsonl"
        settings = replace(settings, train=tuning.rows / "train.jsonl", dev=dev if dev.is_file() else None)
    settings = settled(replace(settings, date=date_of(flags.learn) or settings.date), bundle).dated()
    has_kept = flags.kept is not None or run is not None
    replayed = read_kept(settings, tokenizer, bundle).replayed if has_kept else []
    plan = plan_run(bundle, replayed, replace(settings, epochs=None))
    return replace(plan, settings=replace(settings, batch_size=plan.settings.batch_size)), has_kept


def _settings(
    flags: LearnFlags, engine: EngineFlags, bundle: Bundle, run: Path | None, has_rows: bool
) -> RunSettings:
    """How steps of rounds are taken: as the run took them that came before, or by `prge run`'s defaults.

    Args:
        flags: of learning.
        engine: flags of it.
        bundle: that is served.
        run: that the adapter of the start is from.
        has_rows: whether rows to keep lie beside the run, as in the folder of a tuning.
    """
    assert flags.learn is not None
    train = flags.kept or flags.learn / FEEDBACK
    settings = RunSettings(bundle=bundle.folder, train=train, out=flags.learn, batch_size=DEFAULT_BATCH)
    if run is not None:
        unread = {"bundle", "out", "adapter", "resume", "sample_prompts", "heads_of"}
        unread |= {"train", "dev"} if has_rows else set()
        unread |= set() if flags.kept is None else {"train", "dev", "task"}
        remedy = "give the rows that are to be kept with --kept"
        settings = read_stored(RunSettings, run / CONFIG, "prge run", unread, remedy)
    if flags.kept is not None:
        settings = replace(settings, train=flags.kept, dev=None, task=None, columns=[])
    return replace(
        settings,
        bundle=bundle.folder,
        learning_rate=flags.learning_rate or settings.learning_rate,
        engine=engine.engine,
        threads=engine.threads,
        memory=engine.memory,
        objective="completion",
        # A first loss of replayed rows says nothing of that of corrections, and adapters are judged anyway.
        divergence_ratio=_ANY_LOSS,
        train_start=0,
        train_limit=None,
        dev_start=0,
        dev_limit=None,
        steps=RunSettings.steps,
        epochs=flags.learn_epochs,
        warmup=None,
        adapter=None,
        sample_prompts=None,
        sample_rows=0,
        heads_of=None,
    )
