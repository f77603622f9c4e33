"""One round of learning from feedback: train an adapter on new rows, and judge whether it is better.

    new rows -> some held out, the others mixed with earlier rows -> steps -> losses of both adapters

A round is determined by its rows, its initial adapter and its settings. Its folder holds the journal and the
checkpoints of a run, and a process that was killed resumes it with the same bits.
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

import numpy as np

from device_runner.engines.opening import open_engine
from device_runner.serving.feedback_index import ChangedError, IndexEntry, read_rows
from device_runner.session.inputs import start_record
from device_runner.session.plan import plan_run
from device_runner.session.reference import load_or_compute_references
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
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.preferences import (
    PREFERENCES,
    ObjectiveName,
    Preference,
    make_objective,
    with_other_answers,
)
from prge.objectives.scoring import score
from prge.training.checkpoint import write_result
from prge.training.evaluation import evaluate
from prge.training.sampler import row_order
from prge.training.session import SessionData, SilentObserver, open_session
from prge.training.store import RunStore

# Hold out every fifth prompt, starting with the third.
_HELD_OUT_EVERY, _FIRST_HELD_OUT = 5, 2
# Limits on rows that must not be forgotten: candidates for replay, and rows to judge by.
_MAX_REPLAYED, _MAX_JUDGED = 2000, 64
_LONGEST_ID = 100


@dataclass(frozen=True)
class RetainedExamples:
    """Examples of the rows that must not be forgotten.

    Attributes:
        replayed: examples to train on again.
        judged: examples to judge adapters by.
        task: the task of the rows.
        sha256: the hash of the training rows.
    """

    replayed: list[Example] = field(default_factory=list)
    judged: list[Example] = field(default_factory=list)
    task: Task | None = None
    sha256: str | None = None


def read_retained_examples(settings: RunSettings, tokenizer: Tokenizer, bundle: Bundle) -> RetainedExamples:
    """Build examples of a run's training and development rows; raises PrgeError."""
    task = load_task(settings.task) if settings.task else None
    train = read_source(settings.train, "train", settings.columns, objective="completion", task=task)
    if settings.dev is None:
        parts = split_rows(train.rows)
        train, dev = replace(train, rows=parts.train), replace(train, rows=parts.dev)
    else:
        dev = read_source(settings.dev, "dev", settings.columns, objective="completion", task=task)

    def some(source: RowSource, limit: int, training: bool) -> list[Example]:
        rows = source.rows if task is not None else _well_rated(source)
        rows = select_rows(rows, Selection(limit=limit, shuffle_seed=settings.seed))
        options = build_options(settings, "completion" if task is None else "auto")
        return build_examples(rows, tokenizer, bundle.chain.model, task, options, training=training)[0]

    judged = some(dev, _MAX_JUDGED, False) if dev.rows else []
    replayed = some(train, _MAX_REPLAYED, True)
    if settings.objective in PREFERENCES:
        # Rows of a task with candidates have no answer that could be liked: adapters are only judged by them.
        replayed = [replace(each, liked=True) for each in replayed if each.label is None]
    return RetainedExamples(replayed, judged, task, train.sha256)


def _well_rated(source: RowSource) -> list[Row]:
    """Return the rows to retain: all rows, except bad answers among rated ones."""
    if find_form(source.rows, source.name, source.renamed).prefers != "ratings":
        return source.rows
    liked = []
    for row in source.rows:
        with suppress(RowError):
            liked += [row] if parse_rating(row.fields)["label"] else []
    return liked


def split_held_out(rows: Sequence[IndexEntry]) -> tuple[list[IndexEntry], list[IndexEntry]]:
    """Split rows into rows to learn and rows to hold out; rows with the same question stay together.

    Rows that can't be trained on are dropped.
    """
    numbers: dict[int, int] = {}
    parts: tuple[list[IndexEntry], list[IndexEntry]] = [], []
    for row in rows:
        if not row.is_learnable:
            continue
        number = numbers.setdefault(row.question, len(numbers))
        parts[number % _HELD_OUT_EVERY == _FIRST_HELD_OUT].append(row)
    return parts


@dataclass(frozen=True)
class Round:
    """A round, with everything that a process needs to run it.

    Args:
        number: the number of the round, from 1.
        settings: settings of the round's steps and engine; `out` is the round's folder.
        role: the role of its steps.
        adapter: initial adapter of the round.
        start: adapter of the first round.
        feedback: file with the rows.
        learnt: rows to learn: new ones, and those that `adapter` was not trained on because they were held
            out or their adapters were not served.
        held_out: new rows to judge by.
        learnt_before: all other rows, which earlier rounds trained on.
        replay: fraction of the examples that are earlier ones.
        may_lose: by how much an adapter may be worse than `start` on retained rows.
        has_retained: whether `train` and `dev` of the settings are rows that must not be forgotten.
        chat_template: the chat template of the tokenizer.
        loaded: bytes of weights that may stay loaded; None: all.
    """

    number: int
    settings: RunSettings
    role: str
    adapter: Adapter
    start: Adapter
    feedback: Path
    learnt: Sequence[IndexEntry]
    held_out: Sequence[IndexEntry]
    learnt_before: Sequence[IndexEntry]
    replay: float
    may_lose: float
    has_retained: bool
    chat_template: str | None
    loaded: int | None

    def digest(self) -> str:
        """Return a hash of the round's rows."""
        lists = [[row.key for row in part] for part in (self.learnt, self.held_out, self.learnt_before)]
        return hashlib.sha256(json.dumps([self.replay, lists], sort_keys=True).encode()).hexdigest()


def round_outcome(round: Round, log: Callable[[str], object]) -> Record:
    """Run a round, and return its outcome as JSON.

    Returns:
        The verdict, with a `status` of `served`, `refused` or `failed`; or `changed` if rows were deleted; or
        `problem`, with the reason why the round is to be tried again.
    """
    try:
        return run_round(round, log)
    except ChangedError:
        return {"status": "changed"}
    except (PrgeError, OSError) as error:
        return {"status": "problem", "problem": str(error)}


def run_round(round: Round, log: Callable[[str], object]) -> Record:
    """Take or resume the steps of a round, write its adapter, and judge it.

    Args:
        round: what to learn, and into which folder.
        log: called with a message about each row that can't be trained on.

    Returns:
        The verdict for the journal.

    Raises:
        PrgeError, OSError: rows can't be read, or the storage or the engine fails.
        ChangedError: rows were deleted meanwhile.
    """
    settings, bundle = round.settings, open_bundle(round.settings.bundle)
    tokenizer = load_bundle_tokenizer(bundle)
    tokenizer.chat_template = round.chat_template
    retained = (
        read_retained_examples(settings, tokenizer, bundle) if round.has_retained else RetainedExamples()
    )
    # Forks a process for the chat template, which must happen before an engine computes.
    builder = FeedbackExamples(tokenizer, bundle.chain.model, build_options(settings, settings.objective))
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
        return _train_and_judge(round, bundle, engine, _Feedback(round, builder, log), retained)
    except (DivergenceError, DataError, BundleError) as error:
        return {"status": "failed", "why": error.what}


def _train_and_judge(
    round: Round, bundle: Bundle, engine: Engine, feedback: _Feedback, retained: RetainedExamples
) -> Record:
    objective = objective_of(round.settings)
    learning = feedback.examples(round.learnt)
    examples = learning + _replayed(round, len(learning), feedback, retained)
    if why := _nothing_to_learn(round.settings.objective, learning, examples):
        return _verdict(why, learnt=0, steps=0, held_back={"rows": 0}, kept={"rows": 0})
    if round.settings.objective == "kto":
        examples = with_other_answers(examples, bundle.chain.model.sequence_length)
    plan = plan_run(bundle, examples, round.settings, objective)
    settings, adapter, folder = plan.settings, round.adapter, round.settings.out
    identity = {
        **start_record(bundle, adapter, round.digest(), retained.sha256, objective=objective),
        "settings": plan.recipe.to_record(),
    }
    with Journal(_folder_of(folder, identity) / JOURNAL) as journal:
        if journal.first("start") is None:
            journal.append(identity)
        if isinstance(objective, Preference):
            examples, _ = load_or_compute_references(folder, bundle.sha256, engine, adapter, examples)
        store = RunStore(
            folder=folder,
            journal=journal,
            template=bundle.adapter,
            save_steps=settings.save_steps,
            keep_gradients=settings.keep_gradients,
        )
        data = SessionData(train=examples, adapter=adapter, objective=objective)
        session = open_session(plan.recipe, engine, data, store)
        session.train(SilentObserver())
    state = session.state
    # Without held-out rows, the losses are those of the rows to learn.
    judged_examples = feedback.examples(round.held_out or round.learnt)
    before, after = (_losses(engine, each, judged_examples) for each in (adapter, state.adapter))
    held_scores: Record = {"rows": len(judged_examples) if round.held_out else 0}
    held_scores |= {"before": before[0], "after": after[0]}
    on_kept: Record = {"rows": len(retained.judged)}
    if retained.judged:
        (name, start), (_, new_value) = (
            _score(engine, each, retained) for each in (round.start, state.adapter)
        )
        on_kept |= {"metric": name, "start": start, "after": new_value}
    write_result(folder / FINAL, state, bundle.adapter, overwrite=True)
    why = ""
    if not after[0] < before[0]:
        why = "no better on the held-out feedback"
    elif not after[1] <= before[1]:
        why = "good answers of the held-out feedback became less likely"
    elif retained.judged and not on_kept["after"] >= on_kept["start"] - round.may_lose:
        why = "worse on the retained rows"
    return _verdict(why, learnt=len(learning), steps=settings.steps, held_back=held_scores, kept=on_kept)


def _nothing_to_learn(
    objective: ObjectiveName, learning: Sequence[Example], examples: Sequence[Example]
) -> str:
    """Return the reason why a round can't learn anything from its examples; empty if it can."""
    if not learning:
        nothing = "" if objective in PREFERENCES else ": there are no corrections and no good ratings"
        return f"no row can be trained on{nothing}"
    if objective == "grpo" and len({each.liked for each in examples}) == 1:
        rating = "good" if examples[0].liked else "bad"
        return f"all answers are {rating}: grpo learns only from differences between ratings"
    return ""


def _losses(engine: Engine, adapter: Adapter, examples: Sequence[Example]) -> tuple[float, float]:
    """Return the loss of feedback, and the loss of its good answers alone (0 if there are none).

    The loss of good answers is their mean negative log-probability per token; that of bad answers is
    subtracted from it.
    """
    losses, is_bad = (
        score(engine, adapter, examples).losses,
        np.array([each.liked is False for each in examples]),
    )
    good, bad = (math.fsum(part) / max(len(part), 1) for part in (losses[~is_bad], losses[is_bad]))
    return good - bad, good


def _verdict(why: str, **facts: Any) -> Record:
    """Return the verdict: to serve an adapter, or why not."""
    return {"status": "refused", "why": why, **facts} if why else {"status": "served", **facts}


def _score(engine: Engine, adapter: Adapter, retained: RetainedExamples) -> tuple[str, float]:
    """Return the name and value of the retained rows' metric, where more is better; -loss without a task."""
    scores, _ = evaluate(engine, adapter, retained.judged, retained.task)
    if "perplexity" in scores:
        return "-loss", -scores["loss"]
    return score_of(scores)


def _replayed(round: Round, learnt: int, feedback: _Feedback, retained: RetainedExamples) -> list[Example]:
    """Sample earlier examples: half of them feedback, half retained rows, if there are enough."""
    count = math.ceil(learnt * round.replay / (1 - round.replay))
    earlier = round.learnt_before
    retained_count = min(len(retained.replayed), max(count - count // 2, count - len(earlier)))
    seed, number = round.settings.seed, round.number
    replayed_feedback = _sample(earlier, count - retained_count, seed, number)
    return feedback.examples(replayed_feedback) + _sample(retained.replayed, retained_count, seed, number)


@dataclass(frozen=True)
class _Feedback:
    """Builds the examples of a round's feedback."""

    round: Round
    builder: FeedbackExamples
    log: Callable[[str], object]

    def examples(self, entries: Sequence[IndexEntry]) -> list[Example]:
        """Build examples of rows, rows of text before rows of messages."""
        rows = enumerate(read_rows(self.round.feedback, entries), 1)
        examples: list[Example] = []
        for number, row in sorted(rows, key=lambda numbered: "messages" in numbered[1]):
            try:
                examples += self.builder.build(row, number)
            except UnlearnableError as error:  # possible if an earlier version of prge began the round
                self.log(unlearnable(row, error))
        return examples


def unlearnable(row: Fields, error: UnlearnableError) -> str:
    """Format the log message about a row that can't be trained on."""
    return f"feedback {printable(shortened(str(row.get('id')), _LONGEST_ID))} is not usable: {error.problem}"


def objective_of(settings: RunSettings) -> Objective:
    """Construct the objective of rounds with these settings."""
    return (
        make_objective(settings.objective, settings) if settings.objective in PREFERENCES else CROSS_ENTROPY
    )


def build_options(settings: RunSettings, objective: ObjectiveName) -> BuildOptions:
    """Return how rows become examples for an objective, according to the settings of rounds."""
    return BuildOptions(
        settings.overflow,
        settings.append_eos,
        skip_unusable=True,
        objective=objective,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )


def _folder_of(folder: Path, identity: Record) -> Path:
    """Return a round's folder; deletes what it holds of another round, such as one with a deleted row."""
    path = folder / JOURNAL
    if path.is_file():
        with Journal(path) as journal:
            begun = journal.first("start")
        if begun is not None and begun != json.loads(json.dumps(identity)):
            shutil.rmtree(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _sample(items: Sequence[Any], count: int, seed: int, number: int) -> list[Any]:
    """Sample up to `count` of the items, different ones in every round."""
    return [items[index] for index in row_order(seed, number, len(items))[:count]] if items else []
