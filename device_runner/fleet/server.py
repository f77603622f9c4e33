"""The settings of a fleet's server, its own rows, and how to open its coordinator."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet.agreement import Agreement, Plan, task_sha256
from device_runner.fleet.coordinator import Coordinator, RoundsFlags, begin_fleet, has_begun
from device_runner.fleet.state import initial_state, start_sha256
from device_runner.session.memory import shape_of_scores, step_budget
from device_runner.session.plan import plan_run
from device_runner.session.settings import EngineFlags
from prge.cli.field_types import Paths
from prge.cli.inputs import AdapterInput, BundleInput, DevRows, TrainRows
from prge.cli.outputs import OutputFolder
from prge.cli.settings import select_settings
from prge.data.example_building import load_examples
from prge.data.forms.task import Task
from prge.data.options import BuildOptions
from prge.data.readers.files import Selection
from prge.data.row_report import warn_unread
from prge.data.sources import Part, read_source
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import ConfigError
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.journal import Record
from prge.formats.peft import find_adapter, read_compatible_adapter, read_peft
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example
from prge.training.checkpoint import TrainingState
from prge.training.checkpoint_heads import load_bundle_task, load_head
from prge.training.encoder_heads import fit_heads
from prge.training.evaluation import evaluate
from prge.training.settings import ExampleFlags


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Plan, RoundsFlags, EngineFlags, ExampleFlags):
    """What a fleet's server is started with."""

    bundle: BundleInput
    """Folder that `prge export` wrote; all devices have the same bundle."""
    out: OutputFolder
    """The fleet's folder: a run folder with the trained adapter in final/."""
    name: str | None = None
    """Name of the fleet, which distinguishes it from others with the same plan; default: a random one."""
    dev: DevRows | None = None
    """Development rows on the server; the best step on them becomes the result."""
    dev_limit: int | None = None
    """Most development rows."""
    head_rows: TrainRows | None = None
    """Encoders: labelled rows on the server that fit the classification head before the start; a few rows of
    every class are enough."""
    head_limit: int | None = None
    """Most of these rows."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder to start from instead of the bundle's own adapter; for an encoder, it
    needs a head."""


@dataclass(frozen=True)
class ServerRows:
    """Rows on the server, and the engine that evaluates them."""

    bundle: Bundle
    task: Task | None
    opened: OpenEngine

    def examples(self, settings: ServerSettings, rows: Paths, part: Part, limit: int | None) -> list[Example]:
        """Read rows of a file and build their examples."""
        source = read_source(rows, part, settings.columns, task=self.task)
        tokenizer = load_bundle_tokenizer(self.bundle)
        options = BuildOptions(
            append_eos=settings.append_eos, control_tokens=settings.control_tokens, date=settings.date
        )
        selection, model = Selection(limit=limit), self.bundle.chain.model
        examples, report = load_examples(
            source, tokenizer, model, self.task, selection, options, training=False
        )
        warn_unread(report)
        return examples

    def fit_head(self, examples: list[Example]) -> Head:
        """Fit an encoder's head to labelled rows, with the bundle's own adapter."""
        adapter = read_peft(self.bundle.adapter, self.bundle.chain.modules)
        head = fit_heads(self.opened.engine, adapter, examples).head
        if head is None:
            raise ValueError("no head was fitted")
        return head

    def scorer(self, examples: list[Example]) -> Callable[[TrainingState], Record]:
        """Return a function that evaluates a state on these rows."""

        def score(state: TrainingState) -> Record:
            engine = self.opened.engine
            return evaluate(engine, state.adapter, examples, self.task, head=state.head)[0]

        return score


def open_fleet(settings: ServerSettings, opened: OpenEngine | None = None) -> Coordinator:
    """Open the coordinator of the fleet in `settings.out`, and start the fleet if there is none.

    Args:
        settings: the settings of the server.
        opened: engine of the bundle, if it is already open; otherwise one is opened if rows have to be
            evaluated.

    Raises:
        PrgeError: the bundle, rows or folder can't be used, or the folder belongs to another fleet.
    """
    plan = select_settings(Plan, settings)
    bundle = open_bundle(settings.bundle)
    plan_run(bundle, [], plan.run_settings(settings.bundle, Path(), settings.out))
    task = load_bundle_task(bundle, settings.task)
    rows = None
    if settings.dev or settings.head_rows:
        rows = ServerRows(bundle, task, opened or _engine(settings, bundle))
    if not has_begun(settings.out):
        head = _head(settings, bundle, task, rows)
        source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
        adapter = read_compatible_adapter(source, bundle.chain.modules, bundle.adapter)
        is_bundle_start = settings.adapter is None and head is None
        start = "" if is_bundle_start else start_sha256(initial_state(plan, adapter, head))
        name = settings.name or secrets.token_hex(8)
        agreement = Agreement(name, plan, bundle.sha256, task_sha256(task), start)
        begin_fleet(settings.out, bundle, agreement, adapter, head)
    score = None
    if rows is not None and settings.dev is not None:
        score = rows.scorer(rows.examples(settings, settings.dev, "dev", settings.dev_limit))
    coordinator = Coordinator(settings.out, bundle, select_settings(RoundsFlags, settings), score)
    stored_agreement = coordinator.agreement
    if (stored_agreement.plan, stored_agreement.task) != (plan, task_sha256(task)):
        raise ConfigError(
            f"{settings.out} is a fleet with another plan or task:",
            [
                f"{name} was {getattr(stored_agreement.plan, name)!r}, is now {getattr(plan, name)!r}"
                for name in vars(plan)
                if getattr(stored_agreement.plan, name) != getattr(plan, name)
            ],
            remedy=f"Resume it with `prge fleet serve --resume {settings.out}`, or give another folder.",
            code="plan-differs",
        )
    return coordinator


def _engine(settings: ServerSettings, bundle: Bundle) -> OpenEngine:
    """Open the engine that evaluates rows on the server."""
    shape = shape_of_scores(bundle, [])
    budget = step_budget(bundle, [shape], settings.memory, settings.engine, "scoring rows")
    loaded = None if budget is None else budget.loaded
    return open_engine(bundle, threads=settings.threads, engine=settings.engine, loaded=loaded)


def _head(
    settings: ServerSettings, bundle: Bundle, task: Task | None, rows: ServerRows | None
) -> Head | None:
    """Return an encoder's head; raises ConfigError if no setting provides one."""
    if not bundle.chain.is_encoder:
        return None
    if rows is not None and settings.head_rows is not None:
        return rows.fit_head(rows.examples(settings, settings.head_rows, "train", settings.head_limit))
    head = None
    if task is not None:
        source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
        head = load_head(bundle, source, task, len(task.label_words))
    if head is None:
        raise ConfigError(
            "A fleet with an encoder needs a classification head and a task:",
            ["devices keep their rows, and the server has no rows to fit the head to"],
            remedy="Give --task, and --head-rows with a few labelled rows, or --adapter with a run's head.",
            code="head-missing",
        )
    return head
