"""Compare exact steps, block by block, with other ways to a gradient: seconds and memory of a step.

    python scripts/bench/exact.py --models smollm2-135m tinyllama-1.1b --json exact.json

A model has random weights. All methods take steps on random rows in turns, each in a process of its own;
ratios are medians over rounds. The methods are

    blocks               exact steps of a bundle, with all weights loaded and activations saved in the rest of
                         `--memory`, which is a quarter of the system's memory by default
    recomputed, least    the same without memory for activations, and with the weights of one block
    tangent, prge        steps of the same bundle by jvp and by finite differences, with `--queries`
    pytorch-TYPE[-checkpointing]
                         PyTorch with PEFT: LoRA of the same rank on the same layers, AdamW; its peak_rss_mb
                         includes the file that the model was read from
    limit                matrix products alone: forward, recomputation, and backward

Prints JSON by model: `blocks_over_METHOD`, where `recomputed` is called `kept_over_recomputed`,
`exact_over_limit` of `recomputed`, `load_share` of a step that loads all weights, `load_share_cold` with
files outside the page cache, `recomputation_share`, the products of the second forward pass in a step, and by
method `seconds`, `anonymous_mb` and `peak_rss_mb`. `blocks_over_pytorch` compares with the faster type with
checkpointing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import Server, drop_from_cache, start_method
from products import Call, Products, load_products
from reports import make_parser, measure_in_turns, median, report_models
from serve import ADAPTED, RANK
from timing import export

from prge.cli.field_types import Bytes, convert_value
from server_export.checkpoint.random_models import CONFIGURATIONS

PYTORCH = [f"pytorch-{dtype}{suffix}" for dtype in ("fp32", "bf16") for suffix in ("", "-checkpointing")]


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure all methods on one model."""
    length = ["--sequence-length", str(arguments.seq_len), "--rank", str(RANK)]
    scheme = ["--quantize", arguments.quantize]
    export(folder / "model", folder / "bundle", *scheme, *length, "--target-modules", *ADAPTED)
    sizes = [arguments.batch_size, arguments.seq_len, arguments.threads]
    extra_arguments = [arguments.queries, *([] if arguments.memory is None else [arguments.memory])]
    with ExitStack() as stack:
        steps: dict[str, Server] = {
            method: stack.enter_context(start_method(method, folder, *sizes, *extra_arguments))
            for method in arguments.methods
        }
        limit = Limit(model, arguments, folder)
        turns: dict[str, Callable[[], tuple[float, float]]] = {**steps, "limit": limit}
        rounds = measure_in_turns(turns, arguments.repeats)
        seconds = [{name: timings[0] for name, timings in each.items()} for each in rounds]
        for each, timings in zip(seconds, rounds, strict=True):
            each["recomputation"] = timings["limit"][1]
        figures = ratios(seconds, [*steps])
        figures["methods"] = {
            name: {"seconds": median(seconds, name), **asdict(step.memory())} for name, step in steps.items()
        }
    if "least" in arguments.methods:
        with start_method("least", folder, *sizes, arguments.queries) as step:
            cold = cold_seconds(step, folder / "cache", arguments.repeats)
        reference = "recomputed" if "recomputed" in arguments.methods else "blocks"
        figures["load_share_cold"] = 1 - figures["methods"][reference]["seconds"] / cold
    return {**figures, "limit_seconds": median(seconds, "limit")}


class Limit:
    """The matrix products of an exact step: two forward passes and the backward pass."""

    def __init__(self, model: str, arguments: argparse.Namespace, folder: Path) -> None:
        def load(is_backward: bool) -> Products:
            products_folder = folder / f"limit-{is_backward}"
            products_folder.mkdir()
            call = Call(1, arguments.batch_size, arguments.seq_len, is_backward=is_backward)
            return load_products(
                model, arguments.layers, arguments.quantize, call, ADAPTED, RANK, products_folder
            )

        self._forward, self._backward = load(False), load(True)

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of all products, and of the second forward pass among them."""
        first, again = self._forward(), self._forward()
        return first + again + self._backward(), again


def ratios(seconds: Sequence[dict[str, float]], methods: list[str]) -> dict[str, Any]:
    """Return medians over rounds."""
    if "blocks" not in methods:
        return {}
    others = [name for name in methods if name != "blocks"]
    figures = {f"blocks_over_{name}": median(seconds, "blocks", over=name) for name in others}
    checkpointing = [name for name in others if name.endswith("-checkpointing")]
    if checkpointing:
        figures["blocks_over_pytorch"] = max(figures[f"blocks_over_{name}"] for name in checkpointing)
    reference = "blocks"
    if "recomputed" in methods:
        reference = "recomputed"
        figures["kept_over_recomputed"] = figures.pop("blocks_over_recomputed")
    if "least" in methods:
        figures["load_share"] = 1 - median(seconds, reference, over="least")
    figures["recomputation_share"] = median(seconds, "recomputation", over=reference)
    return {**figures, "exact_over_limit": median(seconds, reference, over="limit")}


def cold_seconds(step: Server, cache: Path, repeats: int) -> float:
    """Return the seconds of a step without cached weights; no other process may map them."""
    step()
    seconds = []
    for _ in range(repeats):
        drop_from_cache(cache)
        seconds.append(step()[0])
    return statistics.median(seconds)


def main() -> None:
    """Parse the flags, measure and print JSON."""
    shape = {"queries": 4, "batch_size": 4, "seq_len": 64, "threads": 2, "repeats": 9}
    parser = make_parser(__doc__, quantize="8da4w", **shape)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument(
        "--memory",
        type=lambda text: convert_value(text, Bytes),
        help="memory for weights and activations",
    )
    methods = ["blocks", "recomputed", "least", "tangent", "prge", *PYTORCH]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
