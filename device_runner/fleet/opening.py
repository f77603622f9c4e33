"""A fleet's server: its settings, what it has of rows, and the coordinator that they make."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet.agreement import Agreement, Plan, task_sha256
from device_runner.fleet.common import first_state, start_sha256
from device_runner.fleet.coordinator import Coordinator, RoundsFlags, begin_fleet, has_begun
from device_runner.session.memory import budget_of_steps, shape_of_scores
from device_runner.session.planning import plan_run
from device_runner.session.settings import EngineFlags
from prge.errors import ConfigError
from prge.files.bundle import Bundle, open_bundle
from prge.files.journal import Record
from prge.files.peft import find_adapter, read_compatible_adapter, read_peft
from prge.learning.checkpoint import TrainingState
from prge.learning.encoder_heads import fit_heads
from prge.learning.examples import Example
from prge.learning.head import Head
from prge.rows.build_options import BuildOptions
from prge.rows.example_building import load_examples
from prge.rows.forms.task import Task
from prge.rows.own_heads import head_of, task_of
from prge.rows.readers.files import Selection
from prge.rows.report import warn_unread
from prge.rows.scoring import evaluate
from prge.rows.sources import Part, read_source
from prge.rows.tokenization.tokenizer import bundle_tokenizer
from prge.running.training_flags import ExampleFlags
from prge.verbs.inputs import AdapterInput, BundleInput, DevRows, TrainRows
from prge.verbs.kinds import Paths
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import part_of


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Plan, RoundsFlags, EngineFlags, ExampleFlags):
    """What a fleet's server is begun with."""

    bundle: BundleInput
    """Folder that `prge export` wrote; all devices have it."""
    out: OutputFolder
    """The fleet's folder: a run folder, with its adapter in final/."""
    name: str | None = None
    """Name of the fleet, which tells it from others with the same plan; default: a random one."""
    dev: DevRows | None = None
    """Development rows that the server may have; the best step on them becomes the result."""
    dev_limit: int | None = None
    """Most development rows."""
    head_rows: TrainRows | None = None
    """Encoders: labelled rows that the server may have, to fit the classification head on before the start;
    a few of every class are enough."""
    head_limit: int | None = None
    """Most of these rows."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder to start from instead of the bundle's own adapter; an encoder's has a
    head."""


@dataclass(frozen=True)
class ServerRows:
    """Rows that a server has, and the engine that scores them."""

    bundle: Bundle
    task: Task | None
    opened: OpenEngine

    def examples(self, settings: ServerSettings, rows: Paths, part: Part, limit: int | None) -> list[Example]:
        """Rows of a file."""
        source = read_source(rows, part, settings.columns, task=self.task)
        tokenizer = bundle_tokenizer(self.bundle)
        options = BuildOptions(
            append_eos=settings.append_eos, control_tokens=settings.control_tokens, date=settings.date
        )
        selection, model = Selection(limit=limit), self.bundle.chain.model
        examples, report = load_examples(
            source, tokenizer, model, self.task, selection, options, training=False
        )
        warn_unread(report)
        return examples

    def fitted_head(self, examples: list[Example]) -> Head:
        """An encoder's head by labelled rows, at the bundle's own adapter."""
        adapter = read_peft(self.bundle.adapter, self.bundle.chain.modules)
        head = fit_heads(self.opened.engine, adapter, examples).head
        if head is None:
            raise ValueError("no head was fitted")
        return head

    def scorer(self, examples: list[Example]) -> Callable[[TrainingState], Record]:
        """What scores a state on these rows."""

        def score(state: TrainingState) -> Record:
            engine = self.opened.engine
            return evaluate(engine, state.adapter, examples, self.task, head=state.head)[0]

        return score


def open_fleet(settings: ServerSettings, opened: OpenEngine | None = None) -> Coordinator:
    """The coordinator of a fleet, begun in `settings.out` or gone on with.

    Args:
        settings: of the server.
        opened: engine of the bundle, if it is open; else one is opened where rows have to be scored.

    Raises:
        PrgeError: the bundle, rows or folder can't be used, or the folder is another fleet's.
    """
    plan = part_of(Plan, settings)
    bundle = open_bundle(settings.bundle)
    plan_run(bundle, [], plan.run_settings(settings.bundle, Path(), settings.out))
    task = task_of(bundle, settings.task)
    rows = None
    if settings.dev or settings.head_rows:
        rows = ServerRows(bundle, task, opened or _engine(settings, bundle))
    if not has_begun(settings.out):
        head = _head(settings, bundle, task, rows)
        source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
        adapter = read_compatible_adapter(source, bundle.chain.modules, bundle.adapter)
        own = settings.adapter is None and head is None
        start = "" if own else start_sha256(first_state(plan, adapter, head))
        name = settings.name or secrets.token_hex(8)
        agreement = Agreement(name, plan, bundle.sha256, task_sha256(task), start)
        begin_fleet(settings.out, bundle, agreement, adapter, head)
    score = None
    if rows is not None and settings.dev is not None:
        score = rows.scorer(rows.examples(settings, settings.dev, "dev", settings.dev_limit))
    coordinator = Coordinator(settings.out, bundle, part_of(RoundsFlags, settings), score)
    theirs = coordinator.agreement
    if (theirs.plan, theirs.task) != (plan, task_sha256(task)):
        raise ConfigError(
            f"{settings.out} is a fleet with another plan or task:",
            [
                f"{name} was {getattr(theirs.plan, name)!r}, is {getattr(plan, name)!r}"
                for name in vars(plan)
                if getattr(theirs.plan, name) != getattr(plan, name)
            ],
            remedy=f"go on with it: prge fleet serve --resume {settings.out}; or give another folder",
            code="plan-differs",
        )
    return coordinator


def _engine(settings: ServerSettings, bundle: Bundle) -> OpenEngine:
    """What scores rows on the server."""
    shape = shape_of_scores(bundle, [])
    budget = budget_of_steps(bundle, [shape], settings.memory, settings.engine, "scoring rows")
    loaded = None if budget is None else budget.loaded
    return open_engine(bundle, threads=settings.threads, engine=settings.engine, loaded=loaded)


def _head(
    settings: ServerSettings, bundle: Bundle, task: Task | None, rows: ServerRows | None
) -> Head | None:
    """An encoder's head; ConfigError where nothing gives one."""
    if not bundle.chain.is_encoder:
        return None
    if rows is not None and settings.head_rows is not None:
        return rows.fitted_head(rows.examples(settings, settings.head_rows, "train", settings.head_limit))
    head = None
    if task is not None:
        source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
        head = head_of(bundle, source, task, len(task.label_words))
    if head is None:
        raise ConfigError(
            "an encoder's fleet needs a classification head and a task",
            ["devices keep their rows, and the server has none to fit the head on"],
            remedy="give --task, and --head-rows with a few labelled rows, or --adapter with a run's head",
            code="head-missing",
        )
    return head
