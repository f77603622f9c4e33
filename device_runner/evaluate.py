"""`prge eval`: score an adapter on rows of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from device_runner.engines.opening import open_engine
from device_runner.session.generation import print_note
from device_runner.session.memory import (
    generation_budget,
    rollout_budget,
    shape_of_scores,
    step_budget,
    watched_memory,
)
from device_runner.session.settings import EvaluateSettings
from prge.cli.settings import parse_settings
from prge.data.example_building import load_examples
from prge.data.forms.task import Generate, Task, load_task
from prge.data.options import BuildOptions
from prge.data.readers.files import row_location
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import ConfigError, EngineError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import HEAD, find_adapter, read_compatible_adapter, read_peft
from prge.formats.run_folder import write_json
from prge.formats.tune_folder import find_tuning
from prge.generation.loop import Completion, GenerationSettings, Generator, Request
from prge.generation.loop import Overflow as PromptOverflow
from prge.generation.prompts import Prompt, Prompts
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example, sequences_of
from prge.objectives.preferences import Preference, make_objective
from prge.objectives.scoring import Scores, with_reference_scores
from prge.rewards.opening import check_roles, open_reward
from prge.rewards.prompt_examples import prompt_examples, rollout_context
from prge.rewards.rollouts import Rollouts
from prge.system.atomic import write_output
from prge.system.progress import Progress
from prge.training.checkpoint_heads import describe_unused_head, load_head, with_bundle_label_order
from prge.training.estimators.rollouts import ROLLOUT_SLOTS
from prge.training.evaluation import evaluate, text_metrics

# Answers that are generated at once.
SLOTS = 8


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge eval --help`."""
    settings = parse_settings(EvaluateSettings, argv, "prge eval", ["bundle"])
    with watched_memory(settings.memory, print_note):
        record = run(settings)
    for name, value in record.items():
        print(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}")
    if cut := record.get("cut_examples"):
        print(f"{cut} of {record['examples']} examples were truncated: these figures are not for whole rows")
    if settings.json:
        write_json(settings.json, record)
    return 0


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Score the rows; return `examples`, `loss` and the metric by its name; no `loss` with a reward.

    Raises:
        PrgeError: bad input.
    """
    if settings.reward is not None:
        return _reward_of_completions(settings, settings.reward)
    task = load_task(settings.task) if settings.task else None
    generate = task.generate if task is not None else None
    if generate and settings.overflow == "split":
        raise ConfigError(
            "These settings can't be used:",
            ["--overflow is split, but a prompt and its answer must stay in one row"],
            remedy="Set --overflow to truncate or error.",
            code="settings-unusable",
        )
    bundle = open_bundle(settings.bundle)
    task = with_bundle_label_order(bundle, task)
    model = bundle.chain.model
    tokenizer = load_bundle_tokenizer(bundle)
    named = settings.adapter or (settings.bundle if find_tuning(settings.bundle) else bundle.adapter)
    trained = find_adapter(named)
    options = BuildOptions(
        overflow=settings.overflow,
        append_eos=settings.append_eos,
        control_tokens=settings.control_tokens,
        objective=settings.objective,
        date=settings.with_date().date,
    )
    source = read_source(settings.data, "test", settings.columns, objective=settings.objective, task=task)
    examples, report = load_examples(
        source, tokenizer, model, task, settings.selection, options, training=False
    )
    print("\n".join(filter(None, [source.feedback_summary, report.summary()])))
    objective = make_objective(report.objective, settings)
    adapter = read_compatible_adapter(trained, model.modules, bundle.adapter)
    head = _head(bundle, trained, task, examples[0].candidates) if model.is_encoder else None
    shape, context = shape_of_scores(bundle, examples), None
    if generate:
        context, budget = generation_budget(
            bundle, settings.memory, settings.engine, slots=SLOTS, steps=shape
        )
    else:
        process = "scoring these rows"
        budget = step_budget(bundle, [shape], settings.memory, settings.engine, process)
    loaded = None if budget is None else budget.loaded
    opened = open_engine(bundle, threads=settings.threads, engine=settings.engine, loaded=loaded)
    engine = opened.engine
    generator = Generator(opened.generation_engine(SLOTS, context), tokenizer) if generate else None
    is_compared = isinstance(objective, Preference)
    progress = _ScoringProgress(examples, 2 if is_compared else 1)
    if is_compared:
        start = read_peft(bundle.adapter, model.modules)
        examples = with_reference_scores(engine, start, examples, progress)
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
            f"The loss of these rows is {record['loss']}.",
            remedy="The adapter or the bundle is damaged: try the bundle's own adapter, or export it again.",
            code="loss-not-finite",
        )
    del record["value"]
    answers: list[str] = []
    if task is not None and generate is not None and generator is not None:
        completions = write_answers(generator, examples, adapter, generate, settings.overflow)
        answers = [answer.text.strip() for answer in completions]
        pairs = zip(examples, completions, strict=True)
        if cut := sum(example.cut or answer.cut_tokens > 0 for example, answer in pairs):
            record["cut_examples"] = cut
        record |= text_metrics(task, answers, examples)
    if settings.predictions:
        _write_predictions(settings.predictions, examples, scored, answers)
    return record


def _reward_of_completions(settings: EvaluateSettings, word: str) -> dict[str, Any]:
    """Return the mean reward of the most likely completions, the share of solved prompts, and tokens."""
    bundle, max_length = open_bundle(settings.bundle), settings.max_completion_length
    check_roles(bundle.chain.roles)
    chain, tokenizer = bundle.chain, load_bundle_tokenizer(bundle)
    prompts = Prompts(tokenizer, settings.with_date().date, control_tokens=settings.control_tokens)
    source = read_source(settings.data, "test", settings.columns)
    examples, notes = prompt_examples(
        source, settings.selection, prompts, context=chain.bounds.context, max_length=max_length
    )
    print("\n".join(notes))
    trained = settings.adapter or (settings.bundle if find_tuning(settings.bundle) else bundle.adapter)
    adapter = read_compatible_adapter(find_adapter(trained), chain.model.modules, bundle.adapter)
    context, limit = rollout_context(examples, max_length), settings.memory
    process = "scoring these rows"
    budget = rollout_budget(bundle, limit, settings.engine, context=context, process=process)
    loaded = None if budget is None else budget.loaded
    opened = open_engine(bundle, threads=settings.threads, engine=settings.engine, loaded=loaded)
    generator = Generator(opened.generation_engine(ROLLOUT_SLOTS, context), tokenizer)
    with closing(open_reward(word)) as reward:
        record = Rollouts(generator, reward, adapter.values, max_length).evaluate(adapter, examples)
    return {name: value for name, value in record.items() if name not in ("loss", "value")}


class _ScoringProgress:
    """Shows progress while examples are scored `times` times."""

    def __init__(self, examples: Sequence[Example], times: int) -> None:
        self._each = len(sequences_of(examples))
        self._progress = Progress(times * self._each, unit="sequence", only_if_long=True)
        self._before = 0

    def __call__(self, sequences: int) -> None:
        """Update the number of sequences that are scored in the current pass."""
        self._progress.update(self._before + sequences)
        if sequences == self._each:
            self._before += sequences
        if self._before == self._progress.steps:
            self._progress.close()


def _head(bundle: Bundle, trained: Path, task: Task | None, classes: int) -> Head:
    """Return an encoder's classification head, from its run or from its checkpoint.

    Raises:
        ConfigError: there is none.
    """
    head = load_head(bundle, trained, task, classes)
    if head is None:
        raise ConfigError(
            "An encoder needs a classification head:",
            [describe_unused_head(bundle) or f"{trained} has no {HEAD}"],
            remedy="Set --adapter to the folder of a run.",
            code="head-missing",
        )
    return head


def write_answers(
    generator: Generator, examples: Sequence[Example], adapter: Adapter, generate: Generate, overflow: str
) -> list[Completion]:
    """Generate an answer to the prompt of each example, with the most likely token each time.

    Args:
        generator: generator of the bundle that the examples were built for.
        examples: examples of a task whose answers are texts.
        adapter: adapter that answers.
        generate: settings that say when an answer ends.
        overflow: `error` keeps prompts whole; otherwise a prompt that leaves no room for an answer loses its
            beginning.
    """
    prompt_overflow: PromptOverflow = "error" if overflow == "error" else "truncate"
    settings = GenerationSettings(generate.max_tokens, generate.stop, overflow=prompt_overflow)
    return generator.generate([Request(Prompt(each.prompt), adapter, settings) for each in examples])


def _write_predictions(
    path: Path, examples: Sequence[Example], scored: Scores, answers: Sequence[str]
) -> None:
    lines = []
    for index, example in enumerate(examples):
        line: dict[str, Any] = {**row_location(example.row), "loss": float(scored.losses[index])}
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
