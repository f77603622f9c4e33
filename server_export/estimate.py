"""`prge estimate`: the cost of an export and of its runs, from configuration and flags alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from prge.formats.adapter import adapter_size
from prge.system.progress import format_duration
from prge.training.costs import (
    RUNTIME_BYTES,
    RunMemory,
    StepShape,
    estimate_run_memory,
    fit_budget,
    format_bytes,
    format_memory_table,
    memory_table,
)
from prge.training.estimators.table import ESTIMATORS, EstimatorName
from server_export.check.estimation import Estimate, estimate_source
from server_export.settings import EstimateConfig


def main(argv: Sequence[str]) -> int:
    """Run `prge estimate`; return the exit code."""
    from prge.cli.settings import parse_settings

    config = parse_settings(
        EstimateConfig,
        argv,
        "prge estimate",
    )
    from server_export.check.transformers_forward import refuse_if_transformers_fails
    from server_export.checkpoint.files import ConfigOnlyFiles
    from server_export.checkpoint.random_models import with_random_model
    from server_export.lower.chain import check_operators
    from server_export.source import open_source

    with with_random_model(config, weights=False) as resolved:
        source = open_source(resolved)
        report = estimate_report(config, estimate_source(resolved, source))
        # Refuses unsupported models within seconds instead of minutes into an export.
        graphs = replace(source, files=ConfigOnlyFiles(**vars(source.files)))
        with refuse_if_transformers_fails(source.loaded):
            chain = graphs.chain("fp32", source.longest)
        check_operators(chain, config.roles)
    print(json.dumps(report, indent=2) if config.json else "\n".join(_text(config, report)))
    return 0


def estimate_report(config: EstimateConfig, estimated: Estimate) -> dict[str, Any]:
    """Return the estimate of `prge estimate` as a JSON object.

    Raises:
        PrgeError: the run doesn't fit the bundle, or the rows can't be used.
    """
    weights, outline = estimated.weights, estimated.outline
    is_one = config.estimator is not None or config.memory is not None or config.train is not None
    return {
        "model": {
            "name_or_path": config.model,
            "parameters": outline.parameters,
            "blocks": outline.blocks,
            "adapted_layers": len(outline.modules),
            "adapter_parameters": adapter_size(outline.modules),
        },
        "programs_bytes": estimated.program_bytes,
        "weights_bytes": weights.stored,
        "packed_bytes": weights.packed + weights.packed_transposed,
        "export": {"peak_bytes": estimated.export_bytes, "seconds": estimated.export_seconds},
        **(_run if is_one else _runs)(config, estimated),
    }


def _runs(config: EstimateConfig, estimated: Estimate) -> dict[str, Any]:
    """Return the memory of runs of all estimators, with all weights loaded and with as few as possible."""
    shapes = {
        name: estimated.shape(config, name, config.tokens, config.tokens - 1) for name in estimated.estimators
    }
    return {"runs": memory_table(estimated.outline, shapes, estimated.weights, estimated.roles)}


def _run(config: EstimateConfig, estimated: Estimate) -> dict[str, Any]:
    """Return the cost of one run, of the chosen estimator or the best available one."""
    estimator = config.estimator or estimated.estimators[0]
    rows, steps = 0, [estimated.shape(config, estimator, config.tokens, config.tokens - 1)]
    if config.train is not None:
        rows, steps = _steps(config, estimated, estimator)
    step = max(steps, key=lambda shape: shape.tokens)
    passes = ESTIMATORS[estimator].passes(config.queries)
    memories = {engine: _memory(config, estimated, step, engine).to_json() for engine in RUNTIME_BYTES}
    return {
        "estimator": estimator,
        "step": {"forward_passes": passes * step.sequences, "tokens": step.tokens},
        "epoch": {"rows": rows, "steps": len(steps)} if rows else None,
        "run_memory": memories,
    }


def _memory(config: EstimateConfig, estimated: Estimate, step: StepShape, engine: str) -> RunMemory:
    """Return the memory of a run of such steps within `--memory`; raises ConfigError if it is too little."""

    def memory_with(loaded: int | None) -> RunMemory:
        return estimate_run_memory(
            estimated.outline, step, estimated.weights, estimated.roles, engine, loaded
        )

    if config.memory is None:
        return memory_with(None)
    if engine == "torch" and memory_with(estimated.weights.largest).total > config.memory:
        # Only the native engine can keep the bound, so it alone decides.
        return memory_with(estimated.weights.largest)
    remedy = "Raise --memory, or use a smaller --batch-size, --tokens, --rank or --quantize."
    budget = fit_budget(
        config.memory, lambda loaded: memory_with(loaded).total, estimated.weights, "this run", remedy
    )
    return memory_with(budget.loaded)


def _steps(
    config: EstimateConfig, estimated: Estimate, estimator: EstimatorName
) -> tuple[int, list[StepShape]]:
    """Return the number of training rows and the steps of one epoch."""
    from prge.data.example_building import load_examples
    from prge.data.forms.task import load_task
    from prge.data.options import BuildOptions
    from prge.data.row_report import warn_unread
    from prge.data.sources import read_source
    from prge.objectives.examples import sequences_of
    from prge.training.sampler import Sampler
    from server_export.checkpoint.chat_templates import set_chat_template
    from server_export.checkpoint.tokenization import device_tokenizer, load_tokenizer

    assert config.train is not None
    longest = estimated.outline.longest
    original = load_tokenizer(config.model, config.revision)
    set_chat_template(original, config.chat_template, config.prepend_bos)
    tokenizer = device_tokenizer(original, config.prepend_bos, estimated.vocabulary_size)
    estimated.shape(config, estimator, longest, longest - 1)
    task = load_task(config.task) if config.task else None
    options = BuildOptions(
        "auto",
        config.append_eos,
        objective="auto",
        control_tokens=config.control_tokens,
        date=config.date,
    )
    rows = read_source(config.train, "train", config.columns, objective="auto", task=task)
    examples, report = load_examples(rows, tokenizer, estimated.model, task, None, options)
    warn_unread(report)
    sampler = Sampler(examples, config.batch_size, seed=0)

    def shape(step: int) -> StepShape:
        sequences = sequences_of(sampler.examples_at(step))
        targets = math.ceil(sum(len(sequence.targets) for sequence in sequences) / len(sequences))
        tokens = max(len(sequence.tokens) for sequence in sequences)
        return estimated.shape(replace(config, batch_size=len(sequences)), estimator, tokens, targets)

    return len(examples), [shape(step) for step in range(math.ceil(len(examples) / config.batch_size))]


def _text(config: EstimateConfig, report: dict[str, Any]) -> Iterator[str]:
    model, export = report["model"], report["export"]
    yield (
        f"{config.model}: {model['parameters']:,} parameters in {model['blocks']} blocks, "
        f"{model['adapted_layers']} layers adapted, {config.quantize}"
    )
    yield f"\nbundle   programs {format_bytes(report['programs_bytes'])}, weights " + format_bytes(
        report["weights_bytes"]
    )
    yield f"device   {format_bytes(report['packed_bytes'])} of packed weights in addition to the bundle"
    yield (
        f"export   peak memory {format_bytes(export['peak_bytes'])}, "
        f"about {format_duration(export['seconds'])} on two cores"
    )
    if "runs" in report:
        yield f"\nmemory of a run, {config.batch_size} rows of {config.tokens} tokens, native engine"
        yield from format_memory_table(report["runs"])
    else:
        yield from _run_text(report)


def _run_text(report: dict[str, Any]) -> Iterator[str]:
    step, epoch = report["step"], report["epoch"]
    passes = f"{step['forward_passes']} forward passes of {step['tokens']} tokens"
    yield f"step     {report['estimator']}, {passes}"
    if epoch:
        yield f"epoch    {epoch['rows']} rows in {epoch['steps']} steps"
    memories = report["run_memory"]
    yield "".join([f"\n{'memory of a run':<26}", *(f"{engine:>12}" for engine in memories)])
    for name in next(iter(memories.values())):
        counts = "".join(f"{format_bytes(memory[name]):>12}" for memory in memories.values())
        yield f"  {name.removesuffix('_bytes'):<24}{counts}"
