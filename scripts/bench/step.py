"""Time of a training step against its matrix products alone, and what one call with all copies gains.

    python scripts/bench/step.py --model smollm2-135m --queries 4 --batch-size 2 --seq-len 64 --json out.json

Steps and their `limit`, the products of scripts/bench/products.py, take turns in one process; figures are
medians of the ratios of seconds in the engine. Prints JSON: the keys of the first scheme at the top, every
scheme under `schemes`. `parallel_speedup` is of one call with all copies over one call for each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from products import Call, Products, load_products
from reports import circumstances, parser_of, report
from timing import TimedStep, export, timed_step

from server_export.model.random_models import CONFIGURATIONS, save_random_model


def bench(arguments: argparse.Namespace, scheme: str, model: Path, folder: Path) -> dict[str, Any]:
    """One quantization scheme."""
    shape = (arguments.batch_size, arguments.seq_len)
    adapter = ["--target-modules", *arguments.target_modules, "--rank", str(arguments.rank)]
    length = ["--sequence-length", str(arguments.seq_len), "--roles", "stack", "tangent"]
    export(model, folder / "bundle", "--quantize", scheme, *adapter, *length)

    def step(estimator: Any, copies: int | None = None) -> TimedStep:
        return timed_step(folder / "bundle", estimator, *shape, arguments.threads, arguments.queries, copies)

    def limit(values: int, is_tangent: bool) -> Products:
        call = Call(values, *shape, is_tangent)
        place = folder / f"limit-{values}-{is_tangent}"
        place.mkdir()
        return load_products(
            arguments.model, arguments.layers, scheme, call, arguments.target_modules, arguments.rank, place
        )

    queries = arguments.queries
    steps = {"stack": step("antithetic"), "sequential": step("antithetic", 1), "tangent": step("tangent")}
    limits = {"stack": limit(2 * queries, False), "tangent": limit(1 + queries, True)}
    return figures_of(*taken(steps, limits, arguments.repeats))


def taken(
    steps: Mapping[str, TimedStep], limits: Mapping[str, Callable[[], float]], repeats: int
) -> tuple[list[dict[str, float]], float]:
    """Seconds of rounds in which all take turns, and how far the scalars of one call and many are apart.

    A round has a step's seconds by its name, those in the engine as `NAME_engine`, its limit's as
    `NAME_limit`.
    """
    rounds: list[dict[str, float]] = []
    difference = 0.0
    for _ in range(repeats + 1):
        found: dict[str, float] = {}
        scalars = {}
        for name, step in steps.items():
            found[name], measurement = step()
            found[f"{name}_engine"], scalars[name] = measurement.engine_seconds, measurement.scalars
            if name in limits:
                found[f"{name}_limit"] = limits[name]()
        difference = max(difference, float(np.abs(scalars["stack"] - scalars["sequential"]).max()))
        rounds.append(found)
    # The first warms caches up.
    return rounds[1:], difference


def figures_of(rounds: list[dict[str, float]], difference: float) -> dict[str, Any]:
    """Medians over rounds."""

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(value, rounds))

    return {
        "stack_over_limit": median(lambda r: r["stack_engine"] / r["stack_limit"]),
        "tangent_over_limit": median(lambda r: r["tangent_engine"] / r["tangent_limit"]),
        "parallel_speedup": median(lambda r: r["sequential"] / r["stack"]),
        "host_share": median(lambda r: 1 - r["stack_engine"] / r["stack"]),
        "tangent_host_share": median(lambda r: 1 - r["tangent_engine"] / r["tangent"]),
        "engine_seconds": median(lambda r: r["stack_engine"]),
        "limit_seconds": median(lambda r: r["stack_limit"]),
        "tangent_engine_seconds": median(lambda r: r["tangent_engine"]),
        "tangent_limit_seconds": median(lambda r: r["tangent_limit"]),
        "largest_scalar_difference": difference,
        "repeats": len(rounds),
    }


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    schemes = {}
    for scheme in arguments.quantize:
        with tempfile.TemporaryDirectory() as name:
            save_random_model(Path(name, "model"), arguments.model, arguments.layers)
            schemes[scheme] = bench(arguments, scheme, Path(name, "model"), Path(name))
    first = schemes[arguments.quantize[0]]
    report({**first, "schemes": schemes, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
