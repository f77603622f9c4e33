"""`prge estimate`: what an export and its runs would cost, from configuration and flags alone."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.costs import bytes_text
from prge.progress import duration
from server_export.check.estimation import ENGINES, Estimate, RowLengths, estimate
from server_export.settings import EstimateConfig

if TYPE_CHECKING:
    from server_export.check.calibration import Rates


def main(argv: Sequence[str]) -> int:
    """Run `prge estimate`; returns the exit code."""
    from prge.settings import parse_settings

    config = parse_settings(
        EstimateConfig,
        argv,
        "prge estimate",
        description="Tell what an export and its runs would cost; takes the flags of `prge export`.",
    )
    estimated = estimate(config)
    if config.train is not None:
        estimated = replace(estimated, data=_row_lengths(config, estimated))
    report = estimated.to_json(_rates(estimated) if config.calibrate else None)
    print(json.dumps(report, indent=2) if config.json else "\n".join(_text(config, report)))
    return 0


def _row_lengths(config: EstimateConfig, estimated: Estimate) -> RowLengths:
    """Tokenize the training rows and put them into batches as a run does."""
    from prge.rows.example_building import BuildOptions, load_examples
    from prge.rows.task import load_task
    from prge.rows.tokenizer import load_tokenizer as load_written
    from prge.sampling import Sampler
    from server_export.model.tokenization import load_tokenizer, tokenizer_block, write_tokenizer

    assert config.train is not None
    contract = estimated.contract
    with tempfile.TemporaryDirectory() as folder:
        original = load_tokenizer(config.model, config.revision)
        write_tokenizer(original, Path(folder))
        block = tokenizer_block(original, config.prepend_bos, contract.vocabulary_size)
        tokenizer = load_written(folder, block)
    task = load_task(config.task) if config.task else None
    options = BuildOptions(overflow="truncate")
    examples, _ = load_examples(config.train, tokenizer, contract, task, None, options)
    sampler = Sampler(examples, contract, seed=0)
    lengths = [variant.sequence_length for variant in estimated.steps]

    def chosen(step: int) -> int:
        longest = max(len(s.tokens) for example in sampler.chosen(step) for s in example.sequences)
        return next(length for length in lengths if longest <= length)

    steps = math.ceil(len(examples) / sampler.per_step)
    return RowLengths(len(examples), tuple(chosen(step) for step in range(steps)))


def _rates(estimated: Estimate) -> Rates:
    from server_export.check.calibration import calibrate

    contract = estimated.contract
    scheme = estimated.config.quantize
    return calibrate(estimated.outline, scheme, contract.computed_rows, contract.sequence_length)


def _text(config: EstimateConfig, report: dict[str, Any]) -> Iterator[str]:
    model, step, export = report["model"], report["step"], report["export"]
    yield (
        f"{config.model}: {model['parameters']:,} parameters in {model['blocks']} blocks, "
        f"{model['adapted_layers']} layers adapted, {config.quantize}"
    )
    yield f"\nprogram  {bytes_text(report['program_bytes'])}"
    calls = f" in {step['calls']} calls" if step["calls"] > 1 else ""
    for title, cost in zip(
        ["step", *[""] * len(step["lengths"])], [step, *step["lengths"][::-1]], strict=True
    ):
        yield f"{title:<9}{step['rows']} rows of {cost['sequence_length']} tokens{calls}, {_work(cost)}"
        if "cached_operations" in cost:
            cached = {"operations": cost["cached_operations"], "seconds": cost["cached_seconds"]}
            yield f"         {_work(cached)} for rows whose trunk is cached"
    if report["data"]:
        data = report["data"]
        counts = ", ".join(f"{count} of {length} tokens" for length, count in data["steps_of_length"].items())
        yield f"epoch    {data['rows']} rows in {data['steps']} steps: {counts}; {_work(data)}"
    if report["scoring"]:
        yield f"scoring  {report['scoring']['rows']} rows a call, {_work(report['scoring'])}"
    if report["rates"] is None:
        yield "         seconds are told with --calibrate"
    yield (
        f"export   {bytes_text(export['peak_bytes'])} of memory at its peak, "
        f"about {duration(export['seconds'])} on two cores"
    )
    for title, memories in (("a run", report["run_memory"]), ("scoring", report["score_memory"])):
        if memories:
            yield f"\nmemory of {title:<14} {'':>2}{'native':>12}{'torch':>12}"
            for name in ("runtime", "weights", "arena", "workspace", "adapter", "directions"):
                yield _row(name, memories)
            yield _row("total", memories)
            yield _row("while_loading", memories)


def _row(name: str, memories: dict[str, Any]) -> str:
    numbers = "".join(f"{bytes_text(memories[engine][f'{name}_bytes']):>12}" for engine in ENGINES)
    return f"  {name.replace('_', ' '):<24}{numbers}"


def _work(block: dict[str, Any]) -> str:
    operations = f"{block['operations'] / 1e9:,.1f} GFLOP"
    return operations if block["seconds"] is None else f"{operations}, {block['seconds']:.3g} s"
