"""What a run is made of, read and checked before an engine is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from device_runner.session.samples import SamplePrompt, read_prompts
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.journal import Record, encode_array
from prge.files.peft import find_adapter, read_compatible_adapter
from prge.learning.examples import Example, tokens_sha256
from prge.learning.head import Head
from prge.learning.objectives import CROSS_ENTROPY, Objective
from prge.learning.preferences import describe_objective, make_objective
from prge.rows.build_options import BuildOptions
from prge.rows.example_building import load_examples
from prge.rows.forms.task import Task
from prge.rows.own_heads import head_of, task_of
from prge.rows.readers.files import Selection
from prge.rows.report import DataReport, show_sample
from prge.rows.sources import read_source
from prge.rows.tokenization.tokenizer import Tokenizer, bundle_tokenizer
from prge.text.prompts import Prompts


@dataclass(frozen=True)
class RunInputs:
    """Everything that a run reads before it needs an engine.

    `report` tells the user what became of the rows, `data` tells run.json; `train_report` is of the
    training rows.
    """

    bundle: Bundle
    tokenizer: Tokenizer
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
    train_report: DataReport

    def identity(self, settings: RunSettings) -> Record:
        """What a run with these inputs is, as the journal begins; for the settings of a plan."""
        return {**self.origin, "settings": settings.recipe.to_record()}


def read_inputs(bundle: Bundle, settings: RunSettings) -> RunInputs:
    """Tokenize the data and read the adapter to start from.

    Raises:
        PrgeError: what is wrong with them.
    """
    model = bundle.chain.model
    tokenizer = bundle_tokenizer(bundle)
    task = task_of(bundle, settings.task)
    options = BuildOptions(
        settings.overflow,
        settings.append_eos,
        settings.max_dropped,
        objective=settings.objective,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )
    seed = settings.shuffle_seed
    chosen = Selection(settings.train_start, settings.train_limit, seed)
    train = read_source(settings.train, "train", settings.columns, objective=settings.objective, task=task)
    train_examples, train_report = load_examples(train, tokenizer, model, task, chosen, options)
    objective = make_objective(train_report.objective, settings)
    options = replace(options, objective=train_report.objective)
    texts = [*filter(None, [train.told]), train_report.text(), show_sample(train_examples[0], tokenizer)]
    data = {"train": train_report.facts()}
    dev_examples: list[Example] = []
    dev = None
    if settings.dev is not None:
        dev = read_source(settings.dev, "dev", settings.columns, objective=train_report.objective, task=task)
        chosen = Selection(settings.dev_start, settings.dev_limit, seed)
        dev_examples, dev_report = load_examples(dev, tokenizer, model, task, chosen, options, training=False)
        texts.insert(-1, dev_report.text())
        data["dev"] = dev_report.facts()
    source = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
    adapter = read_compatible_adapter(source, model.modules, bundle.adapter)
    start_head = None
    if model.is_encoder:
        start_head = head_of(bundle, source, task, train_examples[0].candidates)
    origin = origin_of(bundle, adapter, train.sha256, dev.sha256 if dev else None, task, objective)
    origin["tokens"] = tokens_sha256([*train_examples, *dev_examples])
    return RunInputs(
        bundle,
        tokenizer,
        task,
        train_examples,
        dev_examples,
        adapter,
        start_head,
        origin,
        "\n".join(texts),
        data,
        _sample_prompts(settings, tokenizer),
        _sample_rows(settings.sample_rows, dev_examples),
        objective,
        train_report,
    )


def origin_of(
    bundle: Bundle,
    adapter: Adapter,
    train: str | None = None,
    dev: str | None = None,
    task: Task | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> Record:
    """What a run is made from, as its journal begins; `train` and `dev` are hashes of rows."""
    return {
        "kind": "start",
        "modules": [asdict(module) for module in bundle.chain.modules],
        "width": bundle.chain.width,
        "bundle": bundle.sha256,
        "train": train,
        "dev": dev,
        # As JSON reads it back: a resumed run compares it with the journal's.
        "task": json.loads(json.dumps(asdict(task))) if task else None,
        "adapter": encode_array(adapter.values) if adapter.values.any() else None,
        "objective": describe_objective(objective),
    }


def _sample_prompts(settings: RunSettings, tokenizer: Tokenizer) -> list[SamplePrompt]:
    if settings.sample_prompts is None:
        return []
    prompts = Prompts(tokenizer, settings.date, control_tokens=settings.control_tokens)
    return read_prompts(settings.sample_prompts, prompts)


def _sample_rows(count: int, dev: list[Example]) -> list[Example]:
    if count and not (dev and all(example.choices for example in dev)):
        raise ConfigError(
            "these settings can't be used:",
            [f"--sample-rows is {count}: there are no development rows with candidates"],
            remedy="leave it out, or give --dev and a task with candidates",
            code="candidates-missing",
        )
    return dev[:count]
