"""One round of learning: from rows of feedback to an adapter, and whether it is better.

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

from device_runner.engines.opening import open_engine
from device_runner.serving.feedback_index import ChangedError, IndexEntry, read_rows
from device_runner.session.inputs import origin_of
from device_runner.session.plan import plan_run
from device_runner.session.settings import RunSettings
from prge.data.columns import RowError
from prge.data.example_building import build_examples
from prge.data.feedback_examples import FeedbackExamples, UnlearnableError
from prge.data.forms.form import find_form
from prge.data.forms.preferences import parse_rating
from prge.data.forms.task import Task, load_task
from prge.data.options import BuildOptions
from prge.data.readers.feedback import Fields
from prge.data.readers.files import Row, Selection, select_rows
from prge.data.readers.splitting import split_rows
from prge.data.sources import RowSource, read_source
from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer
from prge.engine import Engine
from prge.errors import BundleError, DataError, DivergenceError, PrgeError, printable, shortened
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.curves import score_of
from prge.formats.journal import Journal, Record
from prge.formats.run_folder import FINAL, JOURNAL
from prge.objectives.examples import Example
from prge.objectives.preferences import ObjectiveName
from prge.objectives.scoring import score
from prge.training.checkpoint import write_result
from prge.training.evaluation import evaluate
from prge.training.sampler import row_order
from prge.training.session import SessionData, SilentObserver, open_session
from prge.training.store import RunStore

# Of what was asked in a round, one in so many is held back, the third one first.
_HELD, _FIRST = 5, 2
# Rows that it began with: those that are replayed are drawn from, and that a new adapter may not be worse on.
_MOST_KEPT, _MOST_JUDGED = 2000, 64
_LONGEST_ID = 100


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

    def some(source: RowSource, most: int, training: bool) -> list[Example]:
        rows = source.rows if task is not None else _liked(source)
        rows = select_rows(rows, Selection(limit=most, shuffle_seed=settings.seed))
        options = build_options(settings, task)
        return build_examples(rows, tokenizer, bundle.chain.model, task, options, training=training)[0]

    judged = some(dev, _MOST_JUDGED, False) if dev.rows else []
    return Kept(some(train, _MOST_KEPT, True), judged, task, train.sha256)


def _liked(source: RowSource) -> list[Row]:
    """Rows of texts, or of answers that are wanted: what is disliked isn't to be kept."""
    if find_form(source.rows, source.name, source.renamed).prefers != "ratings":
        return source.rows
    liked = []
    for row in source.rows:
        with suppress(RowError):
            liked += [row] if parse_rating(row.fields)["label"] else []
    return liked


def held_back(rows: Sequence[IndexEntry]) -> tuple[list[IndexEntry], list[IndexEntry]]:
    """Rows to learn and rows to hold back of those that can be learnt; one question is in one part."""
    numbers: dict[int, int] = {}
    parts: tuple[list[IndexEntry], list[IndexEntry]] = [], []
    for row in rows:
        if not row.is_learnable:
            continue
        number = numbers.setdefault(row.question, len(numbers))
        parts[number % _HELD == _FIRST].append(row)
    return parts


@dataclass(frozen=True)
class Round:
    """A round, with all that a process of its own needs to take it.

    Args:
        number: from 1.
        settings: of its steps and its engine; `out` is its folder.
        role: of its steps.
        adapter: that it begins with.
        start: the adapter of the first round.
        feedback: file of its rows.
        learnt: rows to learn: new ones, and those that `adapter` hasn't learnt, held back there or of rounds
            whose adapters weren't served.
        held: new rows to judge by.
        learnt_before: all other rows.
        replay: share of the examples that are of before.
        may_lose: by how much an adapter may be worse than `start` on kept rows.
        has_kept: whether `train` and `dev` of the settings are rows that must not be forgotten.
        chat_template: of the tokenizer.
        loaded: bytes of weights that may stay loaded; None: all.
    """

    number: int
    settings: RunSettings
    role: str
    adapter: Adapter
    start: Adapter
    feedback: Path
    learnt: Sequence[IndexEntry]
    held: Sequence[IndexEntry]
    learnt_before: Sequence[IndexEntry]
    replay: float
    may_lose: float
    has_kept: bool
    chat_template: str | None
    loaded: int | None

    def digest(self) -> str:
        """What its rows are."""
        lists = [[row.key for row in part] for part in (self.learnt, self.held, self.learnt_before)]
        return hashlib.sha256(json.dumps([self.replay, lists], sort_keys=True).encode()).hexdigest()


def outcome_of(round: Round, tell: Callable[[str], object]) -> Record:
    """What became of a round, as JSON.

    Returns:
        Its verdict: `status` is `served`, `refused` or `failed`. Or `changed`: rows were forgotten. Or
        `problem`: why it is to be tried again.
    """
    try:
        return take_round(round, tell)
    except ChangedError:
        return {"status": "changed"}
    except (PrgeError, OSError) as error:
        return {"status": "problem", "problem": str(error)}


def take_round(round: Round, tell: Callable[[str], object]) -> Record:
    """Take the steps of a round, or go on with them, write its adapter, and judge it.

    Args:
        round: what is learnt, and into which folder.
        tell: called with a message about each row that can't be learnt.

    Returns:
        The verdict of the journal.

    Raises:
        PrgeError, OSError: rows can't be read, or the storage or the engine refuses.
        ChangedError: rows were forgotten meanwhile.
    """
    settings, bundle = round.settings, open_bundle(round.settings.bundle)
    tokenizer = load_bundle_tokenizer(bundle)
    tokenizer.chat_template = round.chat_template
    kept = read_kept(settings, tokenizer, bundle) if round.has_kept else Kept()
    # Forks a process for the chat template, before an engine computes.
    builder = FeedbackExamples(tokenizer, bundle.chain.model, build_options(settings))
    engine = open_engine(
        bundle,
        round.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=round.loaded,
        folder=round.feedback.parent,
        checkpoint_dtype=settings.checkpoint_dtype,
    ).engine
    try:
        return _taken(round, bundle, engine, _Feedback(round, builder, tell), kept)
    except (DivergenceError, DataError, BundleError) as error:
        return {"status": "failed", "why": error.what}


def _taken(round: Round, bundle: Bundle, engine: Engine, feedback: _Feedback, kept: Kept) -> Record:
    learning = feedback.examples(round.learnt)
    if not learning:
        return _verdict(round, 0, 0, {"rows": 0}, {"rows": 0})
    examples = learning + _replayed(round, len(learning), feedback, kept)
    plan = plan_run(bundle, examples, round.settings)
    settings, adapter, folder = plan.settings, round.adapter, round.settings.out
    identity = {
        **origin_of(bundle, adapter, round.digest(), kept.sha256),
        "settings": plan.recipe.to_record(),
    }
    with Journal(_folder_of(folder, identity) / JOURNAL) as journal:
        if journal.first("start") is None:
            journal.append(identity)
        store = RunStore(
            folder=folder,
            journal=journal,
            template=bundle.adapter,
            checkpoint_every=settings.checkpoint_every,
            keep_gradients=settings.keep_gradients,
        )
        session = open_session(plan.recipe, engine, SessionData(train=examples, adapter=adapter), store)
        session.train(SilentObserver())
    state = session.state
    # Without rows held back, losses are of those that were learnt.
    judged = feedback.examples(round.held or round.learnt)
    held: Record = {"rows": len(judged) if round.held else 0}
    held |= {
        "before": score(engine, adapter, judged).loss,
        "after": score(engine, state.adapter, judged).loss,
    }
    on_kept: Record = {"rows": len(kept.judged)}
    if kept.judged:
        (name, start), (_, reached) = (_score(engine, each, kept) for each in (round.start, state.adapter))
        on_kept |= {"metric": name, "start": start, "after": reached}
    write_result(folder / FINAL, state, bundle.adapter, overwrite=True)
    return _verdict(round, settings.steps, len(learning), held, on_kept)


def _verdict(round: Round, steps: int, learnt: int, held: Record, kept: Record) -> Record:
    """Whether an adapter is to be served, and why not."""
    why = ""
    if not learnt:
        why = "no row can be learnt: there are no corrections and no good ratings"
    elif not held["after"] < held["before"]:
        why = "no better on the feedback that it is judged by"
    elif kept["rows"] and not kept["after"] >= kept["start"] - round.may_lose:
        why = "worse on the kept rows"
    facts = {"learnt": learnt, "steps": steps, "held_back": held, "kept": kept}
    return {"status": "refused", "why": why, **facts} if why else {"status": "served", **facts}


def _score(engine: Engine, adapter: Adapter, kept: Kept) -> tuple[str, float]:
    """The metric of the kept rows' task and its value, where more is better; without a task -loss."""
    found, _ = evaluate(engine, adapter, kept.judged, kept.task)
    if "perplexity" in found:
        return "-loss", -found["loss"]
    return score_of(found)


def _replayed(round: Round, learnt: int, feedback: _Feedback, kept: Kept) -> list[Example]:
    """Examples of before: one half feedback, the other rows that it began with, as far as there are."""
    count = math.ceil(learnt * round.replay / (1 - round.replay))
    earlier = round.learnt_before
    of_kept = min(len(kept.replayed), max(count - count // 2, count - len(earlier)))
    seed, number = round.settings.seed, round.number
    chosen = _drawn(earlier, count - of_kept, seed, number)
    return feedback.examples(chosen) + _drawn(kept.replayed, of_kept, seed, number)


@dataclass(frozen=True)
class _Feedback:
    """Builds the examples of a round's feedback."""

    round: Round
    builder: FeedbackExamples
    tell: Callable[[str], object]

    def examples(self, entries: Sequence[IndexEntry]) -> list[Example]:
        """Examples of rows, texts before messages."""
        rows = enumerate(read_rows(self.round.feedback, entries), 1)
        examples: list[Example] = []
        for number, row in sorted(rows, key=lambda numbered: "messages" in numbered[1]):
            try:
                examples += self.builder.build(row, number)
            except UnlearnableError as error:  # of a round that an earlier version of prge began
                self.tell(unlearnable(row, error))
        return examples


def unlearnable(row: Fields, error: UnlearnableError) -> str:
    """The log message about a row that is not trained on."""
    return (
        f"feedback {printable(shortened(str(row.get('id')), _LONGEST_ID))} can't be learnt: {error.problem}"
    )


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
