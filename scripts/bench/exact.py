"""Exact steps block by block against other ways to a gradient: seconds and memory of a step.

    python scripts/bench/exact.py --models smollm2-135m tinyllama-1.1b --json exact.json

A model has random weights. All methods take steps on random rows in turns, each in a process of its own;
ratios are medians over rounds. They are

    blocks               exact steps of a bundle, with all weights loaded and activations saved in what
                         `--memory` leaves beside them, by default a quarter of what the system has
    recomputed, least    the same with no memory for activations, and with the weights of one block
    tangent, prge        the same bundle's tangents and differences, with `--queries`
    pytorch-TYPE[-checkpointing]
                         PyTorch with PEFT: LoRA of the same rank on the same layers, AdamW; its peak_rss_mb
                         has the file that the model was read from
    limit                matrix products alone: forward, computed again, and back

Prints JSON by model: `blocks_over_METHOD`, that over `recomputed` as `kept_over_recomputed`,
`exact_over_limit` of `recomputed`, `load_share` of a step that loads all weights, `load_share_cold` with
files that the system has forgotten, `recomputation_share`, the products of the second forward pass in a
step, and by method `seconds`, `anonymous_mb` and `peak_rss_mb`. `blocks_over_pytorch` is against the faster
type with checkpointing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import Server, forget, serving
from products import Call, Products, load_products
from reports import in_turns, median, parser_of, report_models
from serve import ADAPTED, RANK
from timing import export

from prge.cli.field_types import Bytes, convert_value
from server_export.checkpoint.random_models import CONFIGURATIONS

PYTORCH = [f"pytorch-{kind}{more}" for kind in ("fp32", "bf16") for more in ("", "-checkpointing")]


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All methods on one model."""
    length = ["--sequence-length", str(arguments.seq_len), "--rank", str(RANK)]
    scheme = ["--quantize", arguments.quantize]
    export(folder / "model", folder / "bundle", *scheme, *length, "--target-modules", *ADAPTED)
    sizes = [arguments.batch_size, arguments.seq_len, arguments.threads]
    more = [arguments.queries, *([] if arguments.memory is None else [arguments.memory])]
    with ExitStack() as stack:
        steps: dict[str, Server] = {
            method: stack.enter_context(serving(method, folder, *sizes, *more))
            for method in arguments.methods
        }
        limit = Limit(model, arguments, folder)
        turns: dict[str, Callable[[], tuple[float, float]]] = {**steps, "limit": limit}
        taken = in_turns(turns, arguments.repeats)
        seconds = [{name: found[0] for name, found in each.items()} for each in taken]
        for each, found in zip(seconds, taken, strict=True):
            each["recomputation"] = found["limit"][1]
        figures = ratios(seconds, [*steps])
        figures["methods"] = {
            name: {"seconds": median(seconds, name), **asdict(step.memory())} for name, step in steps.items()
        }
    if "least" in arguments.methods:
        with serving("least", folder, *sizes, arguments.queries) as step:
            cold = cold_seconds(step, folder / "cache", arguments.repeats)
        whole = "recomputed" if "recomputed" in arguments.methods else "blocks"
        figures["load_share_cold"] = 1 - figures["methods"][whole]["seconds"] / cold
    return {**figures, "limit_seconds": median(seconds, "limit")}


class Limit:
    """The matrix products of an exact step: those of its forward pass twice, and those of the way back."""

    def __init__(self, model: str, arguments: argparse.Namespace, folder: Path) -> None:
        def load(is_back: bool) -> Products:
            place = folder / f"limit-{is_back}"
            place.mkdir()
            call = Call(1, arguments.batch_size, arguments.seq_len, is_back=is_back)
            return load_products(model, arguments.layers, arguments.quantize, call, ADAPTED, RANK, place)

        self._forward, self._back = load(False), load(True)

    def __call__(self) -> tuple[float, float]:
        """Seconds of all, and of the second forward pass among them."""
        first, again = self._forward(), self._forward()
        return first + again + self._back(), again


def ratios(seconds: Sequence[dict[str, float]], methods: list[str]) -> dict[str, Any]:
    """Medians over rounds."""
    if "blocks" not in methods:
        return {}
    others = [name for name in methods if name != "blocks"]
    figures = {f"blocks_over_{name}": median(seconds, "blocks", over=name) for name in others}
    checkpointing = [name for name in others if name.endswith("-checkpointing")]
    if checkpointing:
        figures["blocks_over_pytorch"] = max(figures[f"blocks_over_{name}"] for name in checkpointing)
    whole = "blocks"
    if "recomputed" in methods:
        whole = "recomputed"
        figures["kept_over_recomputed"] = figures.pop("blocks_over_recomputed")
    if "least" in methods:
        figures["load_share"] = 1 - median(seconds, whole, over="least")
    figures["recomputation_share"] = median(seconds, "recomputation", over=whole)
    return {**figures, "exact_over_limit": median(seconds, whole, over="limit")}


def cold_seconds(step: Server, cache: Path, repeats: int) -> float:
    """Of a step that finds no weights in memory; no other process may map them."""
    step()
    seconds = []
    for _ in range(repeats):
        forget(cache)
        seconds.append(step()[0])
    return statistics.median(seconds)


def main() -> None:
    """Read the flags, measure, print JSON."""
    shape = {"queries": 4, "batch_size": 4, "seq_len": 64, "threads": 2, "repeats": 9}
    parser = parser_of(__doc__, quantize="8da4w", **shape)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument(
        "--memory",
        type=lambda text: convert_value(text, Bytes),
        help="of weights and activations",
    )
    methods = ["blocks", "recomputed", "least", "tangent", "prge", *PYTORCH]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
