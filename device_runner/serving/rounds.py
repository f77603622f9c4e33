"""One round of learning beside answers: from rows of feedback to an adapter, and whether it is better.

    new rows -> some held back, the others with rows of before -> steps -> losses of both adapters

A round follows from its rows, the adapter that it begins with and its settings. It lies in a folder with the
journal and the checkpoints of a run, and a process that was killed goes on with it to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from device_runner.engines.opening import OpenEngine
from device_runner.serving.feedback_index import Entry
from device_runner.session.inputs import (
    estimator_of,
    origin_of,
)
from device_runner.session.planning import plan_run
from device_runner.session.settings import RunSettings
from prge.errors import printable, shortened
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.curves import score_of
from prge.files.journal import Journal, Record
from prge.files.run_folder import CHECKPOINTS, FINAL, JOURNAL
from prge.learning.checkpoint import TrainingState, keep_state, load_latest, write_result
from prge.learning.encoder_heads import Heads
from prge.learning.estimators.protocol import Measurement
from prge.learning.evaluation import score
from prge.learning.examples import Example
from prge.learning.preferences import ObjectiveName
from prge.learning.sampling import row_order
from prge.learning.training import AdapterLearner, train
from prge.rows.build_options import BuildOptions
from prge.rows.columns import RowError
from prge.rows.example_building import build_examples
from prge.rows.feedback_examples import FeedbackExamples, UnlearnableError
from prge.rows.forms.form import find_form
from prge.rows.forms.preferences import rating_fields
from prge.rows.forms.task import Task, load_task
from prge.rows.readers.feedback import Fields
from prge.rows.readers.files import Row, Selection, select_rows
from prge.rows.readers.splitting import split_rows
from prge.rows.scoring import evaluate
from prge.rows.sources import Source, read_source
from prge.rows.tokenization.tokenizer import Tokenizer

# Of what was asked in a round, one in so many is held back, the third one first.
_HELD, _FIRST = 5, 2
# Rows that it began with: those that are replayed are drawn from, and that a new adapter may not be worse on.
_MOST_KEPT, _MOST_JUDGED = 2000, 64


_LONGEST_ID = 100


# Does some work, and gives what the work gives.
Apart = Callable[[Callable[[], Any]], Any]


class AbandonedError(Exception):
    """A round whose adapter nobody wants any more."""


@dataclass(frozen=True)
class Kept:
    """Examples of the rows that a model must not forget: to replay, and to judge by; `sha256` is theirs."""

    replayed: list[Example] = field(default_factory=list)
    judged: list[Example] = field(default_factory=list)
    task: Task | None = None
    sha256: str | None = None


def read_kept(settings: RunSettings, tokenizer: Tokenizer, bundle: Bundle) -> Kept:
    """Examples of the training and development rows of a run; raises PrgeError."""
    task = load_task(settings.task) if settings.task else None
    train = read_source(settings.train, "train", settings.columns, objective="completion", task=task)
    if settings.dev is None:
        parts = split_rows(train.rows)
        train, dev = replace(train, rows=parts.train), replace(train, rows=parts.dev)
    else:
        dev = read_source(settings.dev, "dev", settings.columns, objective="completion", task=task)

    def some(source: Source, most: int, training: bool) -> list[Example]:
        rows = source.rows if task is not None else _liked(source)
        rows = select_rows(rows, Selection(limit=most, shuffle_seed=settings.seed))
        options = build_options(settings, task)
        return build_examples(rows, tokenizer, bundle.chain.model, task, options, training=training)[0]

    judged = some(dev, _MOST_JUDGED, False) if dev.rows else []
    return Kept(some(train, _MOST_KEPT, True), judged, task, train.sha256)


def _liked(source: Source) -> list[Row]:
    """Rows of texts, or of answers that are wanted: what is disliked isn't to be kept."""
    if find_form(source.rows, source.name, source.renamed).prefers != "ratings":
        return source.rows
    liked = []
    for row in source.rows:
        with suppress(RowError):
            liked += [row] if rating_fields(row.fields)["label"] else []
    return liked


@dataclass(frozen=True)
class Rows:
    """Keys of the feedback of a round, in order.

    `learnt` are those to learn: new ones, and those that the adapter that it begins with hasn't learnt, held
    back there or of rounds whose adapters weren't served. `held` are new ones to judge by; `learnt_before` is
    all else.
    """

    learnt: Sequence[str]
    held: Sequence[str] = ()
    learnt_before: Sequence[str] = ()


def held_back(rows: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Rows to learn and rows to hold back of those that can be learnt; one question is in one part."""
    numbers: dict[int, int] = {}
    parts: tuple[list[Entry], list[Entry]] = [], []
    for row in rows:
        if not row.is_learnable:
            continue
        number = numbers.setdefault(row.question, len(numbers))
        parts[number % _HELD == _FIRST].append(row)
    return parts


@dataclass(frozen=True)
class Round:
    """A round that is to be taken.

    Args:
        number: from 1.
        settings: of its steps; `out` is its folder.
        rows: feedback.
        replay: share of the examples that are of before.
        read: feedback by its keys; raises ChangedError where it is gone.
    """

    number: int
    settings: RunSettings
    rows: Rows
    replay: float
    read: Callable[[Sequence[str]], list[Fields]]

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.settings.out

    def digest(self) -> str:
        """What its rows are."""
        lists = [list(self.rows.learnt), list(self.rows.held), list(self.rows.learnt_before)]
        return hashlib.sha256(json.dumps([self.replay, lists], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Judged:
    """What became of a round; `adapter` is None where nothing could be learnt."""

    adapter: Adapter | None
    steps: int
    learnt: int
    held_back: Record
    kept: Record


class Workshop:
    """What all rounds of a server share.

    Args:
        bundle: of all adapters.
        opened: the engine, for the role of steps.
        tokenizer: of the bundle.
        feedback: builds examples of rows.
        kept: rows that must not be forgotten.
        start: the adapter that the first round began with.
        interrupted: whether the round is to wait, asked before every step.
        tell: called with what a user should know, once each.

    `apart` does what waits for storage.
    """

    def __init__(
        self,
        bundle: Bundle,
        opened: OpenEngine,
        tokenizer: Tokenizer,
        feedback: FeedbackExamples,
        kept: Kept,
        start: Adapter,
        interrupted: Callable[[], bool],
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._tell = tell
        self._feedback = feedback
        self._bundle = bundle
        self._engine = opened.engine
        self._tokenizer = tokenizer
        self._kept = kept
        self._start = start
        self._interrupted = interrupted
        self.apart: Apart = at_once
        self._kept_score: tuple[str, float] | None = None

    def take(self, round: Round, adapter: Adapter) -> Judged | None:
        """Take the steps of a round from an adapter on, or go on with them; None if they are to wait.

        Raises:
            PrgeError: the storage or the engine refuses, or the loss diverges.
            ChangedError: rows were forgotten meanwhile.
        """
        learning: list[Example] = self.apart(lambda: self._of_feedback(round, round.rows.learnt))
        if not learning:
            return Judged(None, 0, 0, {"rows": 0}, {"rows": 0})
        learnt = len(learning)
        examples = learning + self.apart(lambda: self._replayed(round, learnt))
        plan = plan_run(self._bundle, examples, round.settings)
        settings = plan.settings
        identity = {
            **origin_of(self._bundle, adapter, round.digest(), self._kept.sha256),
            "settings": plan.recipe.to_record(),
        }
        with _Journal(_folder_of(round.folder, identity) / JOURNAL, self.apart) as journal:
            if journal.first("start") is None:
                journal.append(identity)
            state = plan.recipe.new_state(adapter, Heads())
            load_latest(round.folder / CHECKPOINTS, state, newest=journal.steps)
            every, gradients = settings.checkpoint_every, settings.keep_gradients
            template = self._bundle.adapter

            def keep(at: TrainingState) -> None:
                kept = round.folder, at, template, journal, every, gradients
                self.apart(lambda: keep_state(*kept))

            learner = AdapterLearner(
                engine=self._engine,
                sampler=plan.recipe.sampler(examples),
                estimator=estimator_of(journal),
                learning_rates=plan.recipe.learning_rates(),
                state=state,
                settings=settings.of_loop,
                journal=journal,
                keep=keep,
            )
            train(learner, settings.of_loop, _Unwatched(), self._interrupted)
        if state.step < settings.steps:
            return None
        judged = self._judged(round, adapter, state.adapter, settings.steps, learnt)
        self.apart(lambda: write_result(round.folder / FINAL, state, self._bundle.adapter, overwrite=True))
        shutil.rmtree(round.folder / CHECKPOINTS, ignore_errors=True)
        return judged

    def _judged(self, round: Round, before: Adapter, after: Adapter, steps: int, learnt: int) -> Judged:
        """Losses by the adapters of before and after; without rows held back, on those that were learnt."""
        rows = round.rows.held or round.rows.learnt
        judged: list[Example] = self.apart(lambda: self._of_feedback(round, rows))
        held: Record = {"rows": len(judged) if round.rows.held else 0}
        held |= {"before": self._loss(before, judged), "after": self._loss(after, judged)}
        kept: Record = {"rows": len(self._kept.judged)}
        if self._kept.judged:
            if self._kept_score is None:
                self._kept_score = self._score(self._start)
            (name, start), (_, reached) = self._kept_score, self._score(after)
            kept |= {"metric": name, "start": start, "after": reached}
        return Judged(after, steps, learnt, held, kept)

    def _loss(self, adapter: Adapter, examples: Sequence[Example]) -> float:
        return score(self._engine, adapter, examples).loss

    def _score(self, adapter: Adapter) -> tuple[str, float]:
        """The metric of the kept rows' task and its value, where more is better; without a task -loss."""
        kept = self._kept
        found, _ = evaluate(self._engine, adapter, kept.judged, kept.task)
        if "perplexity" in found:
            return "-loss", -found["loss"]
        return score_of(found)

    def _replayed(self, round: Round, learnt: int) -> list[Example]:
        """Examples of before: one half feedback, the other rows that it began with, as far as there are."""
        count = math.ceil(learnt * round.replay / (1 - round.replay))
        earlier, kept = list(round.rows.learnt_before), self._kept.replayed
        of_kept = min(len(kept), max(count - count // 2, count - len(earlier)))
        seed, number = round.settings.seed, round.number
        chosen = _drawn(earlier, count - of_kept, seed, number)
        return self._of_feedback(round, chosen) + _drawn(kept, of_kept, seed, number)

    def _of_feedback(self, round: Round, keys: Sequence[str]) -> list[Example]:
        """Examples of feedback, texts before messages."""
        rows = sorted(enumerate(round.read(keys), 1), key=lambda numbered: "messages" in numbered[1])
        examples: list[Example] = []
        for number, row in rows:
            try:
                examples += self._feedback.of(row, number)
            except UnlearnableError as error:  # of a round that an earlier version of prge began
                self._tell(unlearnable(row, error))
        return examples


def unlearnable(row: Fields, error: UnlearnableError) -> str:
    """The log message about a row that is not trained on."""
    return (
        f"feedback {printable(shortened(str(row.get('id')), _LONGEST_ID))} can't be learnt: {error.problem}"
    )


class _Journal(Journal):
    """A journal whose steps are written apart."""

    def __init__(self, path: Path, apart: Apart) -> None:
        super().__init__(path)
        self._apart = apart

    def append(self, record: Record) -> Record:
        """See Journal."""
        append = super().append
        found: Record = self._apart(lambda: append(record))
        return found


def at_once(work: Callable[[], Any]) -> Any:
    """Implements Apart where nobody waits."""
    return work()


class _Unwatched:
    """Implements prge.learning.training.Observer: nobody watches."""

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See Observer."""

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See Observer."""


def build_options(settings: RunSettings, task: Task | None = None) -> BuildOptions:
    """How rows become examples by the settings of rounds."""
    what: ObjectiveName = "completion" if task is None else "auto"
    return BuildOptions(
        settings.overflow,
        settings.append_eos,
        skip_unusable=True,
        objective=what,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )


def _folder_of(folder: Path, identity: Record) -> Path:
    """A round's folder: what it held of another round, such as one with a row that is forgotten, goes."""
    path = folder / JOURNAL
    if path.is_file():
        with Journal(path) as journal:
            begun = journal.first("start")
        if begun is not None and begun != json.loads(json.dumps(identity)):
            shutil.rmtree(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _drawn(items: Sequence[Any], count: int, seed: int, number: int) -> list[Any]:
    """Some of the items, at most all, others in every round."""
    return [items[index] for index in row_order(seed, number, len(items))[:count]] if items else []
