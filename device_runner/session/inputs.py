"""The inputs of a run, read and checked before an engine is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from device_runner.session.samples import SamplePrompt, read_prompts
from device_runner.session.settings import RunSettings
from prge.data.example_building import load_examples
from prge.data.forms.task import Task
from prge.data.options import BuildOptions
from prge.data.readers.files import Selection
from prge.data.row_report import DataReport, format_sample
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer
from prge.errors import ConfigError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.journal import Record, encode_array
from prge.formats.peft import find_adapter, read_compatible_adapter
from prge.generation.prompts import Prompts
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example, tokens_sha256
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.preferences import describe_objective, make_objective
from prge.training.checkpoint_heads import load_bundle_task, load_head


@dataclass(frozen=True)
class RunInputs:
    """Everything that a run reads before it needs an engine.

    `report` describes the rows for the user, `data` for run.json; `train_report` is the report of the
    training rows, if they are more than prompts. `tokenizer` is None if the run writes no text: it takes as
    much memory as the weights of a block.
    """

    bundle: Bundle
    tokenizer: Tokenizer | None
    task: Task | None
    train: list[Example]
    dev: list[Example]
    adapter: Adapter
    start_head: Head | None
    origin: Record
    report: str
    data: Record
    sample_prompts: list[SamplePrompt]
    sample_rows: list[Example]
    objective: Objective
    train_report: DataReport | None = None

    def identity(self, settings: RunSettings) -> Record:
        """Return the run's identity, the journal's first record, for resolved settings."""
        return {**self.origin, "settings": settings.recipe.to_record()}


def read_inputs(bundle: Bundle, settings: RunSettings) -> RunInputs:
    """Tokenize the data and read the adapter that the run starts from.

    Raises:
        PrgeError: the data or the adapter can't be used.
    """
    model = bundle.chain.model
    tokenizer = load_bundle_tokenizer(bundle)
    task = load_bundle_task(bundle, settings.task)
    options = BuildOptions(
        settings.overflow,
        settings.append_eos,
        settings.max_dropped,
        objective=settings.objective,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )
    seed = settings.shuffle_seed
    selection = Selection(settings.train_start, settings.train_limit, seed)
    train = read_source(settings.train, "train", settings.columns, objective=settings.objective, task=task)
    train_examples, train_report = load_examples(train, tokenizer, model, task, selection, options)
    objective = make_objective(train_report.objective, settings)
    options = replace(options, objective=train_report.objective)
    report_lines = [
        *filter(None, [train.feedback_summary]),
        train_report.summary(),
        format_sample(train_examples[0], tokenizer),
    ]
    data = {"train": train_report.counts()}
    dev_examples: list[Example] = []
    dev = None
    if settings.dev is not None:
        dev = read_source(settings.dev, "dev", settings.columns, objective=train_report.objective, task=task)
        selection = Selection(settings.dev_start, settings.dev_limit, seed)
        dev_examples, dev_report = load_examples(
            dev, tokenizer, model, task, selection, options, training=False
        )
        report_lines.insert(-1, dev_report.summary())
        data["dev"] = dev_report.counts()
    source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
    adapter = read_compatible_adapter(source, model.modules, bundle.adapter)
    start_head = None
    if model.is_encoder:
        start_head = load_head(bundle, source, task, train_examples[0].candidates)
    origin = start_record(bundle, adapter, train.sha256, dev.sha256 if dev else None, task, objective)
    origin["tokens"] = tokens_sha256([*train_examples, *dev_examples])
    writes_text = settings.sample_prompts is not None or settings.sample_rows
    return RunInputs(
        bundle,
        tokenizer if writes_text else None,
        task,
        train_examples,
        dev_examples,
        adapter,
        start_head,
        origin,
        "\n".join(report_lines),
        data,
        sample_prompts(settings, tokenizer),
        _sample_rows(settings.sample_rows, dev_examples),
        objective,
        train_report,
    )


def start_record(
    bundle: Bundle,
    adapter: Adapter,
    train: str | None = None,
    dev: str | None = None,
    task: Task | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> Record:
    """Return the first record of a run's journal: its identity. `train` and `dev` are hashes of rows."""
    return {
        "type": "start",
        "modules": [asdict(module) for module in bundle.chain.modules],
        "width": bundle.chain.width,
        "bundle": bundle.sha256,
        "train": train,
        "dev": dev,
        # In the form that JSON returns: a resumed run compares it with the journal.
        "task": json.loads(json.dumps(asdict(task))) if task else None,
        "adapter": encode_array(adapter.values) if adapter.values.any() else None,
        "objective": describe_objective(objective),
    }


def sample_prompts(settings: RunSettings, tokenizer: Tokenizer) -> list[SamplePrompt]:
    """Return the prompts that a run's samples answer."""
    if settings.sample_prompts is None:
        return []
    prompts = Prompts(tokenizer, settings.date, control_tokens=settings.control_tokens)
    return read_prompts(settings.sample_prompts, prompts)


def _sample_rows(count: int, dev: list[Example]) -> list[Example]:
    if count and not (dev and all(example.choices for example in dev)):
        raise ConfigError(
            "These settings can't be used:",
            [f"--sample-rows is {count}, but there are no development rows with candidates"],
            remedy="Leave it out, or set --dev and a task with candidates.",
            code="candidates-missing",
        )
    return dev[:count]
