"""`prge eval`: score an adapter on the rows of a file on its bundle."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_runner.engines.opening import open_engine
from device_runner.session.memory import budget_of_steps, budget_of_texts, shape_of_scores, watched_memory
from device_runner.session.settings import EvaluateSettings
from device_runner.session.speaking import note
from prge.errors import ConfigError, EngineError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle, open_bundle
from prge.files.peft import HEAD, find_adapter, read_compatible_adapter, read_peft
from prge.files.run_folder import write_json
from prge.files.tuned import tuning_at
from prge.host.atomic import write_output
from prge.host.progress import Progress
from prge.learning.evaluation import Scores, referred
from prge.learning.examples import Example, sequences_of
from prge.learning.head import Head
from prge.learning.preferences import Preference, make_objective
from prge.rows.build_options import BuildOptions
from prge.rows.example_building import load_examples
from prge.rows.forms.task import Generate, Task, load_task
from prge.rows.own_heads import head_of, ordered, refused_labels
from prge.rows.readers.files import place_of_row
from prge.rows.scoring import evaluate, text_metrics
from prge.rows.sources import read_source
from prge.rows.tokenization.tokenizer import bundle_tokenizer
from prge.text.loop import Answer, GenerationSettings, Generator, Request
from prge.text.loop import Overflow as PromptOverflow
from prge.text.prompts import Prompt
from prge.verbs.settings import parse_settings

# Answers that are written at once.
SLOTS = 8


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge eval --help`."""
    settings = parse_settings(EvaluateSettings, argv, "prge eval", ["bundle"])
    with watched_memory(settings.memory, note):
        record = run(settings)
    for name, value in record.items():
        print(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}")
    if cut := record.get("cut_examples"):
        print(f"{cut} of {record['examples']} examples were cut: these figures are not of whole rows")
    if settings.json:
        write_json(settings.json, record)
    return 0


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Score the rows; returns `examples`, `loss` and the metric by its name.

    Raises:
        PrgeError: bad input.
    """
    task = load_task(settings.task) if settings.task else None
    writes = task.generate if task is not None else None
    if writes and settings.overflow == "split":
        raise ConfigError(
            "these settings can't be used:",
            ["--overflow is split: a question with its answer is one row"],
            remedy="set --overflow to truncate or error",
            code="settings-unusable",
        )
    bundle = open_bundle(settings.bundle)
    task = ordered(bundle, task)
    model = bundle.chain.model
    tokenizer = bundle_tokenizer(bundle)
    named = settings.adapter or (settings.bundle if tuning_at(settings.bundle) else bundle.adapter)
    trained = find_adapter(named)
    options = BuildOptions(
        overflow=settings.overflow,
        append_eos=settings.append_eos,
        control_tokens=settings.control_tokens,
        objective=settings.objective,
        date=settings.dated().date,
    )
    source = read_source(settings.data, "test", settings.columns, objective=settings.objective, task=task)
    examples, report = load_examples(
        source, tokenizer, model, task, settings.selection, options, training=False
    )
    print("\n".join(filter(None, [source.told, report.text()])))
    objective = make_objective(report.objective, settings)
    adapter = read_compatible_adapter(trained, model.modules, bundle.adapter)
    head = _head(bundle, trained, task, examples[0].candidates) if model.is_encoder else None
    shape, context = shape_of_scores(bundle, examples), None
    if writes:
        context, budget = budget_of_texts(bundle, settings.memory, settings.engine, slots=SLOTS, steps=shape)
    else:
        process = "scoring these rows"
        budget = budget_of_steps(bundle, [shape], settings.memory, settings.engine, process)
    loaded = None if budget is None else budget.loaded
    opened = open_engine(bundle, threads=settings.threads, engine=settings.engine, loaded=loaded)
    engine = opened.engine
    generator = Generator(opened.speaker(SLOTS, context), tokenizer) if writes else None
    is_compared = isinstance(objective, Preference)
    progress = _ProgressOfScores(examples, 2 if is_compared else 1)
    if is_compared:
        start = read_peft(bundle.adapter, model.modules)
        examples = referred(engine, start, examples, progress)
    record, scored = evaluate(
        engine,
        adapter,
        examples,
        task,
        head=head,
        objective=objective,
        normalisation=settings.loss_normalisation,
        on_progress=progress,
    )
    if not math.isfinite(record["loss"]):
        raise EngineError(
            f"the loss of these rows is {record['loss']}",
            remedy="the adapter or the bundle is damaged: try the bundle's own adapter, or export it again",
            code="loss-not-finite",
        )
    del record["value"]
    answers: list[str] = []
    if task is not None and writes is not None and generator is not None:
        written = write_answers(generator, examples, adapter, writes, settings.overflow)
        answers = [answer.text.strip() for answer in written]
        pairs = zip(examples, written, strict=True)
        if cut := sum(example.cut or answer.cut_tokens > 0 for example, answer in pairs):
            record["cut_examples"] = cut
        record |= text_metrics(task, answers, examples)
    if settings.predictions:
        _write_predictions(settings.predictions, examples, scored, answers)
    return record


class _ProgressOfScores:
    """Shows progress while examples are scored so many times."""

    def __init__(self, examples: Sequence[Example], times: int) -> None:
        self._each = len(sequences_of(examples))
        self._progress = Progress(times * self._each, unit="sequence", only_if_long=True)
        self._before = 0

    def __call__(self, sequences: int) -> None:
        """So many sequences are scored, this time."""
        self._progress.update(self._before + sequences)
        if sequences == self._each:
            self._before += sequences
        if self._before == self._progress.steps:
            self._progress.close()


def _head(bundle: Bundle, trained: Path, task: Task | None, classes: int) -> Head:
    """An encoder's classification head, as its run wrote it, or as its checkpoint came with it.

    Raises:
        ConfigError: there is none.
    """
    head = head_of(bundle, trained, task, classes)
    if head is None:
        raise ConfigError(
            "an encoder needs a classification head",
            [refused_labels(bundle) or f"{trained} has no {HEAD}"],
            remedy="give the folder of a run with --adapter",
            code="head-missing",
        )
    return head


def write_answers(
    generator: Generator, examples: Sequence[Example], adapter: Adapter, generate: Generate, overflow: str
) -> list[Answer]:
    """What the model writes after the prompt of each example, the most likely token each time.

    Args:
        generator: of the bundle that the examples were built for.
        examples: of a task whose answers are texts.
        adapter: what it is asked with.
        generate: when an answer ends.
        overflow: `error` keeps prompts whole; else one that leaves an answer no room loses its beginning.
    """
    cut: PromptOverflow = "error" if overflow == "error" else "truncate"
    wanted = GenerationSettings(generate.max_tokens, generate.stop, overflow=cut)
    return generator.generate([Request(Prompt(each.prompt), adapter, wanted) for each in examples])


def _write_predictions(
    path: Path, examples: Sequence[Example], scored: Scores, answers: Sequence[str]
) -> None:
    lines = []
    for index, example in enumerate(examples):
        line: dict[str, Any] = {**place_of_row(example.row), "loss": float(scored.losses[index])}
        if example.label is not None:
            choice = int(scored.predictions[index])
            line["label"], line["prediction"] = example.label, choice
            line["scores"] = scored.scores[index].tolist()
            if example.choices:
                line["text"] = example.choices[choice]
        elif answers:
            line["text"] = answers[index]
        lines.append(json.dumps(line) + "\n")
    write_output(path, "".join(lines).encode())
