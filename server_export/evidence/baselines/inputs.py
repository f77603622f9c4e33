"""Read the rows of a baseline as a device reads them."""

from __future__ import annotations

from dataclasses import dataclass

from prge.cli.field_types import Paths
from prge.data.example_building import load_examples
from prge.data.forms.task import Task
from prge.data.options import BuildOptions
from prge.data.readers.files import Selection
from prge.data.row_report import format_sample
from prge.data.sources import Part, read_source
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.bundle import Bundle
from prge.objectives.examples import Example
from prge.training.checkpoint_heads import load_bundle_task
from server_export.evidence.baselines.settings import BaselineSettings


@dataclass(frozen=True)
class BaselineInputs:
    """The rows of a baseline, the padding token, and a report about the rows."""

    task: Task | None
    pad: int
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    report: str


def read_inputs(bundle: Bundle, settings: BaselineSettings) -> BaselineInputs:
    """Read and tokenize the rows as `prge run` and `prge eval` do.

    Raises:
        PrgeError: the rows or the task can't be used.
    """
    task = load_bundle_task(bundle, settings.task)
    tokenizer = load_bundle_tokenizer(bundle)
    options = BuildOptions(
        settings.overflow,
        settings.append_eos,
        settings.max_dropped,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )
    model, seed, reports = bundle.chain.model, settings.shuffle_seed, []

    def read(paths: Paths | None, part: Part, selection: Selection) -> list[Example]:
        if paths is None:
            return []
        rows = read_source(paths, part, settings.columns, task=task)
        training = part == "train"
        examples, report = load_examples(rows, tokenizer, model, task, selection, options, training=training)
        reports.append(report.summary())
        return examples

    train = read(settings.train, "train", Selection(settings.train_start, settings.train_limit, seed))
    reports.append(format_sample(train[0], tokenizer))
    dev = read(settings.dev, "dev", Selection(settings.dev_start, settings.dev_limit, seed))
    test = read(settings.test, "test", Selection())
    return BaselineInputs(task, tokenizer.pad_id, train, dev, test, "\n".join(reports))
