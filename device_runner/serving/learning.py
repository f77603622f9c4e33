"""Learning beside answers: rounds of feedback, which of their adapters is served, and the history of that.

feedback.jsonl    what clients said of answers
adapters.jsonl    journal: what began, which rows a round has, how it was judged, what was taken back
rounds/0001/      a round; final/ is its adapter

A round has a fixed number of rows in their order, so that adapters follow from feedback, and not from when it
came or how often the process was killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from device_runner.engines.blocks import Blocks
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.serving.feedback_index import SECONDS, ChangedError, Entry, FeedbackIndex
from device_runner.serving.flags import LearnFlags
from device_runner.serving.history import FEEDBACK, ROUNDS, History, Version, date_of
from device_runner.serving.protocol import RequestError
from device_runner.serving.rounds import (
    AbandonedError,
    Apart,
    Judged,
    Kept,
    Round,
    Rows,
    Workshop,
    at_once,
    build_options,
    held_back,
    read_kept,
    unlearnable,
)
from device_runner.serving.worker import Worker
from device_runner.session.gates import Gates
from device_runner.session.planning import DEFAULT_BATCH, plan_run, settled
from device_runner.session.settings import EngineFlags, RunSettings
from prge.errors import BundleError, DataError, DivergenceError, PrgeError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.journal import Record
from prge.files.own_settings import check_links
from prge.files.peft import find_adapter, read_compatible_adapter, read_peft, run_of
from prge.files.run_folder import CONFIG, FINAL
from prge.files.tuned import tuning_at
from prge.learning.costs import StepShape
from prge.rows.feedback_examples import FeedbackExamples, UnlearnableError
from prge.rows.readers.feedback import adapter_digest
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.verbs.settings import read_stored

# Rows of refused rounds that the next one learns, too.
_MOST_OPEN = 256
_ANY_LOSS = 1e6
# Between two looks for something to learn, and at the sensors.
_SECONDS = 5.0
# After a failure, such as of a full disk, until it is tried again.
_SECONDS_TO_RETRY = 30.0
# Of no index.
_NOWHERE = (-1, -1)
_Json = dict[str, Any]


class Learning:
    """Runs learning rounds while the worker has no request to answer.

    Any thread may read `history` and `problem`, which never block. Only the storage thread calls `take_back`.

    Args:
        flags: `learn` is the folder.
        settings: of a round's steps.
        bundle: of all adapters.
        start: what the folder began with.
        examples: builds those of feedback; whoever takes feedback asks it first if a row can be learnt.
        serve: puts an adapter in the place of the one that is served.
        tell: called with what a user should know.
    """

    seconds = _SECONDS

    def __init__(
        self,
        flags: LearnFlags,
        settings: RunSettings,
        bundle: Bundle,
        start: Adapter,
        examples: FeedbackExamples,
        serve: Callable[[Adapter], object],
        tell: Callable[[str], object],
    ) -> None:
        assert flags.learn is not None
        self._flags, self._settings, self._bundle = flags, settings, bundle
        self._folder, self._start = flags.learn, start
        self.examples = examples
        self._serve, self._tell = serve, tell
        begun = {"bundle": bundle.sha256, "adapter": adapter_digest(start)}
        self._history = History(self._folder, begun, settings.date)
        self._workshop: Workshop | None = None
        self._apart: Apart = at_once
        self._taken: Version | None = None
        conditions = flags.learning_conditions()
        self._gates = Gates(conditions, seconds=_SECONDS) if conditions else None
        self.problem = ""
        """Why nothing is learnt by now; empty if nothing is wrong."""
        self._retry_at = 0.0
        self._index = FeedbackIndex(self._folder / FEEDBACK)
        # New rows that can be learnt, which the next round begins with, among those that were looked at.
        self._looked, self._new = 0, list[str]()
        self._looked_in = _NOWHERE
        self._unlearnable = set[str]()
        self._tidy()

    @property
    def date(self) -> str | None:
        """The day that chat templates take for today in what is learnt."""
        return self._settings.date

    def open(self, workshop: Workshop) -> None:
        """Have what rounds need."""
        self._workshop = workshop

    def give_way(self, worker: Worker, blocks: Blocks) -> None:
        """Let answers be made before every block of a step, and while the storage is waited for."""
        blocks.between, self._apart = worker.give_way, worker.apart
        if self._workshop is not None:
            self._workshop.apart = worker.apart

    @property
    def adapter(self) -> Adapter:
        """The one that is served."""
        return self._adapter(self._history.current)

    def work(self) -> bool:
        """Go on with a round, or begin one; False if there is nothing to do by now."""
        if self._workshop is None or time.monotonic() < self._retry_at or self.must_wait():
            return False
        try:
            if self._apart(self._read_on):
                return True
            version = self._history.open
            has_worked = version is not None and self._worked(self._workshop, version)
        except (PrgeError, OSError) as error:
            self._retry_at = time.monotonic() + _SECONDS_TO_RETRY
            if self.problem != str(error):
                self._tell(f"nothing is learnt, tried again every {_SECONDS_TO_RETRY:.0f} seconds: {error}")
            self.problem = str(error)
            return False
        if self.problem:
            self._tell("learning goes on")
        self.problem = ""
        return has_worked

    def must_wait(self) -> bool:
        """Whether no step may be taken now."""
        if (gates := self._gates) is None:
            return False
        # Sensors may take a moment to read, in which answers are made.
        return bool(self._apart(lambda: gates.closed(lambda text: self._tell(f"learning: {text}"))))

    def history(self) -> list[_Json]:
        """All adapters, the newest last."""
        return self._history.described

    def take_back(self, version: int) -> int:
        """Serve what was served before a version, which is served now.

        Returns:
            The version that is served then.

        Raises:
            RequestError: another version is served, or the first one.
        """
        with self._history.lock:
            last = self._history.current
            if last == 0:
                raise RequestError(409, "the adapter of the start is served: there is none to take back")
            if version != last:
                what = f"version {version} isn't served: version {last} is"
                raise RequestError(409, what, param="version", code="version_not_served")
            parent = self._history.versions[last].parent or 0
            adapter = self._adapter(parent)
            self._history.add("back", last)
            if (begun := self._history.open) is not None:
                self._history.add("judged", begun.number, status="abandoned")
            self._serve(adapter)
            return parent

    def close(self) -> None:
        """Close what is open."""
        self._index.close()
        self._history.close()

    def check(self) -> None:
        """Raise AbandonedError if the round that is being taken was judged meanwhile."""
        if self._taken is not None and self._history.open is not self._taken:
            raise AbandonedError

    def _read_on(self) -> bool:
        """Read feedback for a moment, and begin a round if there is enough; whether there is more to read."""
        if self._index.read_on():
            return True
        history, every = self._history, self._flags.learn_every
        if history.open is not None:
            return False
        if self._looked_in != (now := (self._index.generation, history.abandoned)):
            self._looked, self._new, self._looked_in = 0, [], now
        deadline = time.monotonic() + SECONDS
        while self._looked < len(self._index) and len(self._new) < every:
            if time.monotonic() > deadline:
                return True
            self._look_at(self._index[self._looked].key)
            self._looked += 1
        if len(self._new) < every:
            return False
        keys, self._new = self._new, []
        try:
            with history.lock:
                history.add("round", len(history.versions), parent=history.current, rows=keys)
        except (PrgeError, OSError):
            self._looked_in = _NOWHERE
            raise
        return False

    def _look_at(self, key: str) -> None:
        """Keep a row for the next round, if it is new and can be learnt."""
        if key in self._history.rows or key in self._unlearnable:
            return
        try:
            (row,) = self._index.rows([key])
        except ChangedError:
            return  # the index has another generation now
        try:
            self.examples.of(row)
        except UnlearnableError as error:
            self._unlearnable.add(key)
            self._tell(unlearnable(row, error))
        else:
            self._new.append(key)

    def _worked(self, workshop: Workshop, version: Version) -> bool:
        begin, self._taken = time.monotonic(), version
        try:
            round = self._apart(lambda: self._round(version))
            adapter = self._apart(lambda: self._adapter(version.parent or 0))
            judged = workshop.take(round, adapter)
            if judged is None:
                return False
            verdict = {**_verdict(judged, self._flags.may_lose), "seconds": time.monotonic() - begin}
            # An adapter that was taught a row that is forgotten isn't served: the round begins again without.
            if not self._apart(lambda: self._index.has_all([*round.rows.learnt, *round.rows.held])):
                return True
        except ChangedError:
            return True
        except AbandonedError:
            judged, verdict = None, {"status": "abandoned"}
        except (DivergenceError, DataError, BundleError) as error:
            judged, verdict = None, {"status": "failed", "why": error.what}
        finally:
            self._taken = None
        with self._history.lock:
            if self._history.open is version:
                self._history.add("judged", version.number, **verdict)
                if verdict["status"] == "served" and judged is not None and judged.adapter is not None:
                    self._serve(judged.adapter)
        self._apart(self._tidy)
        self._tell(version.line())
        return True

    def _tidy(self) -> None:
        """Delete the adapters of versions that can no longer be restored."""
        for version in self._history.versions[1:]:
            if version.status not in ("served", "learning"):
                shutil.rmtree(self._folder_of(version.number), ignore_errors=True)

    def _folder_of(self, version: int) -> Path:
        return self._folder / ROUNDS / f"{version:04d}"

    def _round(self, version: Version) -> Round:
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
        folder = self._folder_of(version.number)
        seed = self._settings.seed + version.number
        learning, held = held_back(there(version.rows))
        keys = ([row.key for row in rows] for rows in ([*unlearnt[-_MOST_OPEN:], *learning], held, learnt))
        settings = replace(self._settings, out=folder, seed=seed)
        return Round(version.number, settings, Rows(*keys), self._flags.replay, self._index.rows)

    def _adapter(self, version: int) -> Adapter:
        if version == 0:
            return self._start
        return read_peft(self._folder_of(version) / FINAL, self._bundle.chain.modules)


def open_learning(
    flags: LearnFlags,
    engine: EngineFlags,
    source: Path | None,
    bundle: Bundle,
    start: Adapter,
    tokenizer: Tokenizer,
    serve: Callable[[Adapter], object],
    tell: Callable[[str], object],
    loaded_beside: Callable[[StepShape], int | None] = lambda steps: None,
) -> tuple[Learning, OpenEngine]:
    """What learns beside answers, and the engine that it shares with them.

    Args:
        flags: `learn` is the folder to learn into.
        engine: flags of it.
        source: tuning, run or PEFT folder that the adapter of the start is from; None: it is the bundle's.
        bundle: of all adapters.
        start: the adapter that is served where nothing was learnt yet.
        tokenizer: of what learns alone.
        serve: puts an adapter in the place of the one that is served.
        tell: called with what a user should know.
        loaded_beside: bytes of weights that may stay loaded, by the shape of steps; None: all.

    Raises:
        PrgeError: rows that are to be kept can't be used, the folder is of something else, the engine can't
            be had, or the bundle's programs can't train the adapter of the start.
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
    kept = read_kept(settings, tokenizer, bundle) if has_kept else Kept()
    plan = plan_run(bundle, kept.replayed, replace(settings, epochs=None))
    settings = replace(settings, batch_size=plan.settings.batch_size)
    examples = FeedbackExamples(tokenizer, bundle.chain.model, build_options(settings))
    learning = Learning(flags, settings, bundle, start, examples, serve, tell)
    loaded = loaded_beside(plan.shape)
    opened = open_engine(
        bundle,
        plan.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=loaded,
        kept=KeptStates(settings.checkpoint_dtype, flags.learn, loaded),
        speaks=True,
    )
    if opened.notes:
        tell(opened.notes)
    learning.open(Workshop(bundle, opened, tokenizer, examples, kept, start, learning.must_wait, tell))
    return learning, opened


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


def _verdict(judged: Judged, may_lose: float) -> Record:
    """Whether an adapter is to be served, and why not."""
    held, kept = judged.held_back, judged.kept
    why = ""
    if judged.adapter is None:
        why = "no row can be learnt: there are no corrections and no good ratings"
    elif not held["after"] < held["before"]:
        why = "no better on the feedback that it is judged by"
    elif kept["rows"] and not kept["after"] >= kept["start"] - may_lose:
        why = "worse on the kept rows"
    found = {"learnt": judged.learnt, "steps": judged.steps, "held_back": held, "kept": kept}
    return {"status": "refused", "why": why, **found} if why else {"status": "served", **found}
