"""The rows of a baseline, read as a device reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prge.files.bundle import Bundle
from prge.learning.examples import Example
from prge.rows.example_building import BuildOptions, load_examples
from prge.rows.readers import Selection
from prge.rows.report import show_sample
from prge.rows.sources import Part, read_source
from prge.rows.task import Task
from prge.rows.tokenizer import Tokenizer, bundle_tokenizer
from server_export.evidence.baselines.settings import BaselineSettings


@dataclass(frozen=True)
class BaselineInputs:
    """The rows of a baseline, read as a device reads them."""

    bundle: Bundle
    tokenizer: Tokenizer
    task: Task | None
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    report: str


def read_inputs(bundle: Bundle, settings: BaselineSettings, task: Task | None) -> BaselineInputs:
    """Tokenize the rows as `prge run` and `prge eval` do.

    Raises:
        PrgeError: what is wrong with them.
    """
    tokenizer = bundle_tokenizer(bundle)
    options = BuildOptions(settings.overflow, settings.append_eos, settings.max_dropped)
    seed = settings.shuffle_seed
    chosen = Selection(settings.train_start, settings.train_limit, seed)
    rows = read_source(settings.train, "train", settings.columns)
    train, report = load_examples(rows, tokenizer, bundle.chain.scoring, task, chosen, options)
    texts = [report.text(), show_sample(train[0], tokenizer)]
    others: list[list[Example]] = []
    parts: list[tuple[Path | None, Part, Selection]] = [
        (settings.dev, "dev", Selection(settings.dev_start, settings.dev_limit, seed)),
        (settings.test, "test", Selection()),
    ]
    for where, part, selection in parts:
        others.append([])
        if where is not None:
            rows = read_source(where, part, settings.columns)
            others[-1], report = load_examples(
                rows, tokenizer, bundle.chain.scoring, task, selection, options, training=False
            )
            texts.append(report.text())
    dev, test = others
    return BaselineInputs(bundle, tokenizer, task, train, dev, test, "\n".join(texts))
