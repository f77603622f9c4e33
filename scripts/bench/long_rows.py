"""Measure exact steps on long rows: memory, seconds per token, and the share of attention's products.

    python scripts/bench/long_rows.py --models qwen2.5-0.5b qwen2.5-3b --lengths 256 1024 2048 4096

A model is an architecture with random weights, exported once for the longest rows. A `prge run` takes steps
on one row of each length with the minimum `--memory`, measured as in exact_memory.py. Attention's products
are timed separately in PyTorch, float32: those of the same chunks with the tokens before them, for two
forward passes and the backward pass.

Prints JSON by model: `export_seconds`, with `--short` the same of an export for 512 tokens and
`export_over_short`; by length the figures of exact_memory.py, `seconds_per_token`, `attention_share` of the
step, and `beyond_attention`: seconds per token without attention's products, over those of the shortest row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from exact_memory import run, write_rows
from reports import make_parser, report_models
from timing import export

from prge.formats.bundle import open_bundle
from prge.training.costs import ModelSizes

# Tokens of a chunk; later chunks are shorter, with the same products per token.
_CHUNK = 128


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Export a model and take steps on rows of all lengths."""
    flags = ["--quantize", arguments.quantize, "--rank", arguments.rank, "--roles", "forward", "backward"]
    figures: dict[str, Any] = {}
    if arguments.short:
        short = export(folder / "model", folder / "short", *flags, "--sequence-length", 512)
        figures["short_export_seconds"] = short["seconds"]
        shutil.rmtree(folder / "short")
    longest = max(arguments.lengths)
    figures["export_seconds"] = export(
        folder / "model", folder / "bundle", *flags, "--sequence-length", longest
    )["seconds"]
    if arguments.short:
        figures["export_over_short"] = figures["export_seconds"] / figures["short_export_seconds"]
    shutil.rmtree(folder / "model")
    bundle = open_bundle(folder / "bundle")
    outline = ModelSizes.from_json(bundle.manifest["outline"], bundle.chain)
    torch.set_num_threads(arguments.threads)
    write_rows(folder / "rows.jsonl", 2, min(arguments.lengths))
    run(arguments, folder, steps=1)
    other_seconds: dict[int, float] = {}
    for length in sorted(arguments.lengths):
        write_rows(folder / "rows.jsonl", 2 * arguments.batch_size, length)
        run_figures: dict[str, Any] = run(arguments, folder, arguments.steps)
        seconds = run_figures["step_seconds"] / arguments.batch_size
        attention = outline.adapted_blocks * attention_seconds(outline, length)
        other_seconds[length] = (seconds - attention) / length
        figures[str(length)] = {
            **run_figures,
            "seconds_per_token": seconds / length,
            "attention_share": attention / seconds,
            "beyond_attention": other_seconds[length] / other_seconds[min(other_seconds)],
        }
    return figures


def attention_seconds(outline: ModelSizes, length: int) -> float:
    """Return the seconds of a block's attention products in a step: two forward passes, one backward pass."""
    query_groups = outline.heads * outline.head_width // outline.key_width
    heads, width, seconds = outline.heads // query_groups, outline.head_width, 0.0
    for start in range(0, length, _CHUNK):
        rows, context = query_groups * min(_CHUNK, length - start), min(start + _CHUNK, length)
        query, keys, scores = (
            torch.randn(heads, *shape) for shape in ((rows, width), (context, width), (rows, context))
        )

        def products(query: Any = query, keys: Any = keys, scores: Any = scores) -> float:
            begin = time.perf_counter()
            for _ in range(2):
                torch.bmm(query, keys.mT)
                torch.bmm(scores, keys)
            for _ in range(2):
                # Gradients of the weights or queries, and of the values or keys.
                torch.bmm(query, keys.mT)
                torch.bmm(query.mT, scores)
            return time.perf_counter() - begin

        seconds += statistics.median(products() for _ in range(3))
    return seconds


def main() -> None:
    """Parse the flags, measure each model and print JSON."""
    shape = {"rank": 16, "batch_size": 1, "steps": 3, "threads": 2, "lengths": [256, 1024]}
    parser = make_parser(__doc__, models=["qwen2.5-0.5b"], quantize="8da4w", **shape)
    parser.add_argument("--short", action="store_true", help="time an export for 512 tokens too")
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
