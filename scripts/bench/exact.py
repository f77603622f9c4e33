"""Exact steps block by block against other ways to a gradient: seconds and memory of a step.

    python scripts/bench/exact.py --models smollm2-135m tinyllama-1.1b --json exact.json
    python scripts/bench/exact.py --monolith CHECKOUT --json exact.json

A model has random weights. All methods take steps on random rows in turns, each in a process of its own;
ratios are medians over rounds. They are

    blocks, least        exact steps of a bundle, with all weights loaded and with those of one block
    tangent, prge        the same bundle's tangents and differences, with `--queries`
    joint                exact steps of one program, by CHECKOUT: a working tree of a commit that makes these,
                         such as 6c5eaad
    pytorch-TYPE[-checkpointing]
                         PyTorch with PEFT: LoRA of the same rank on the same layers, AdamW; its peak_rss_mb
                         has the file that the model was read from
    limit                matrix products alone: forward, computed again, and back

Prints JSON by model: `blocks_over_METHOD`, `exact_over_limit`, `load_share` of a step that loads all weights,
`load_share_cold` with files that the system has forgotten, `recomputation_share`, the products of the second
forward pass in a step, and by method `seconds`, `anonymous_mb` and
`peak_rss_mb`. `blocks_over_pytorch` is against the faster type with checkpointing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import serve
from chain import monolith
from processes import Server, forget, serving
from products import Call, Products, load_products
from reports import circumstances, parser_of, report
from serve import ADAPTED, ENGINE, RANK
from timing import ROOT, export

from server_export.model.random_models import CONFIGURATIONS, save_random_model

PYTORCH = [f"pytorch-{kind}{more}" for kind in ("fp32", "bf16") for more in ("", "-checkpointing")]


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All methods on one model."""
    save_random_model(folder / "model", model, arguments.layers)
    length = ["--sequence-length", str(arguments.seq_len), "--rank", str(RANK)]
    scheme = ["--quantize", arguments.quantize]
    export(folder / "model", folder / "bundle", *scheme, *length, "--target-modules", *ADAPTED)
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    sizes = [arguments.batch_size, arguments.seq_len, arguments.threads]

    def command(method: str) -> list[str]:
        words = [method, folder, *sizes, arguments.queries]
        return [sys.executable, str(Path(serve.__file__)), *map(str, words)]

    with ExitStack() as stack:
        steps: dict[str, Server] = {}
        for method in arguments.methods:
            steps[method] = stack.enter_context(serving(command(method), environment, ROOT))
            steps[method]()
        if arguments.monolith is not None and model in arguments.joint_models:
            checkout = arguments.monolith.resolve()
            one = (checkout, folder / "model", folder / "one", arguments.quantize, "exact", sizes)
            steps["joint"] = stack.enter_context(monolith(*one))
            steps["joint"]()
        limit = Limit(model, arguments, folder)
        taken = rounds(steps, limit, arguments.repeats)
        figures = ratios(taken, [*steps])
        figures["methods"] = {
            name: {"seconds": statistics.median(t[name] for t in taken), **asdict(step.memory())}
            for name, step in steps.items()
        }
    if "least" in arguments.methods:
        with serving(command("least"), environment, ROOT) as step:
            cold = cold_seconds(step, folder / "cache", arguments.repeats)
        figures["load_share_cold"] = 1 - figures["methods"]["blocks"]["seconds"] / cold
    return {**figures, "limit_seconds": statistics.median(t["limit"] for t in taken)}


class Limit:
    """The matrix products of an exact step: those of its forward pass twice, and those of the way back."""

    def __init__(self, model: str, arguments: argparse.Namespace, folder: Path) -> None:
        def load(is_back: bool) -> Products:
            place = folder / f"limit-{is_back}"
            place.mkdir()
            call = Call(1, arguments.batch_size, arguments.seq_len, is_back=is_back)
            return load_products(model, arguments.layers, arguments.quantize, call, ADAPTED, RANK, place)

        self._forward, self._back = load(False), load(True)

    def __call__(self) -> dict[str, float]:
        """Seconds of all, and of the second forward pass among them."""
        first, again = self._forward(), self._forward()
        return {"limit": first + again + self._back(), "recomputation": again}


def rounds(steps: Mapping[str, Server], limit: Limit, repeats: int) -> list[dict[str, float]]:
    """Seconds by method, of rounds in which all take turns; every other round begins with the last one."""
    taken = []
    for number in range(repeats):
        found = {}
        for name in steps if number % 2 else reversed([*steps]):
            found[name] = steps[name]()[0]
        taken.append({**found, **limit()})
    return taken


def ratios(taken: list[dict[str, float]], methods: list[str]) -> dict[str, Any]:
    """Medians over rounds."""
    if "blocks" not in methods:
        return {}
    others = [name for name in methods if name != "blocks"]
    figures = {
        f"blocks_over_{name}": statistics.median(t["blocks"] / t[name] for t in taken)
        for name in (*others, "limit")
    }
    checkpointing = [name for name in others if name.endswith("-checkpointing")]
    if checkpointing:
        figures["blocks_over_pytorch"] = max(figures[f"blocks_over_{name}"] for name in checkpointing)
    if "least" in methods:
        figures["load_share"] = 1 - figures["blocks_over_least"]
    figures["recomputation_share"] = statistics.median(t["recomputation"] / t["blocks"] for t in taken)
    return {**figures, "exact_over_limit": figures.pop("blocks_over_limit")}


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
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument("--methods", nargs="+", choices=[*ENGINE, *PYTORCH], default=[*ENGINE, *PYTORCH])
    parser.add_argument("--monolith", type=Path, help="checkout that makes one program of the whole model")
    parser.add_argument("--joint-models", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where models and bundles are made for a while")
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            figures[model] = bench(arguments, model, Path(folder))
        print(model, figures[model], file=sys.stderr)
    report({**figures, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
