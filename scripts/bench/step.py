"""Compare a training step's time with its matrix products alone, and measure the gain of batching copies.

    python scripts/bench/step.py --model smollm2-135m --queries 4 --batch-size 2 --seq-len 64 --json out.json

Steps and their `limit`, the products of scripts/bench/products.py, run in turns in one process; figures are
medians of ratios of seconds in the engine. Prints JSON: the keys of the first scheme at the top, every scheme
under `schemes`. Speedups compare with one call for each copy, as in MeZO: `inner_speedup` of calls with two
copies, one pair, `outer_speedup` of two calls, each with one copy of all pairs, and `parallel_speedup` of one
call with all copies.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from products import Call as ProductsCall
from products import Products, load_products
from reports import make_parser, measure_in_turns, report
from timing import TimedStep, export, random_model, timed_step

from prge.engine import Call, Engine, FloatArray
from server_export.checkpoint.random_models import CONFIGURATIONS


def bench(arguments: argparse.Namespace, scheme: str, model: Path, folder: Path) -> dict[str, Any]:
    """Measure one quantization scheme."""
    shape = (arguments.batch_size, arguments.seq_len)
    adapter = ["--target-modules", *arguments.target_modules, "--rank", str(arguments.rank)]
    length = ["--sequence-length", str(arguments.seq_len), "--roles", "forward", "jvp"]
    export(model, folder / "bundle", "--quantize", scheme, *adapter, *length)

    def step(estimator: Any) -> TimedStep:
        return timed_step(folder / "bundle", estimator, *shape, arguments.threads, arguments.queries)

    def limit(values: int, is_tangent: bool) -> Products:
        call = ProductsCall(values, *shape, is_tangent)
        products_folder = folder / f"limit-{values}-{is_tangent}"
        products_folder.mkdir()
        return load_products(
            arguments.model,
            arguments.layers,
            scheme,
            call,
            arguments.target_modules,
            arguments.rank,
            products_folder,
        )

    queries = arguments.queries
    steps: dict[str, Any] = {
        **{"forward": step("antithetic"), "jvp": step("tangent")},
        "sequential": with_copies_a_call(step("antithetic"), 1),
        "inner": with_copies_a_call(step("antithetic"), 2),
        "outer": with_copies_a_call(step("antithetic"), queries),
        **{"forward_limit": limit(2 * queries, False), "jvp_limit": limit(1 + queries, True)},
    }
    return summarize_rounds(measure_in_turns(steps, arguments.repeats))


class FewCopiesACall:
    """Implements prge.engine.Engine by another one, with at most `copies` copies of the adapter in a call."""

    def __init__(self, inner: Engine, copies: int) -> None:
        self._inner, self._copies = inner, copies
        self.model, self.jvp, self.vjp = inner.model, inner.jvp, inner.vjp

    @property
    def seconds(self) -> float:
        """See Engine."""
        return self._inner.seconds

    def forward(self, call: Call) -> FloatArray:
        """See Engine."""
        starts = range(0, len(call.adapters), self._copies)
        calls = [replace(call, adapters=call.adapters[start : start + self._copies]) for start in starts]
        return np.concatenate([self._inner.forward(each) for each in calls])


def with_copies_a_call(step: TimedStep, copies: int) -> TimedStep:
    """Return the same step with at most `copies` copies of the adapter in a call."""
    return replace(step, opened=replace(step.opened, engine=FewCopiesACall(step.opened.engine, copies)))


def summarize_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds with seconds and measurements of steps, and seconds of their limits."""

    def median(names: str, over: str = "") -> float:
        return statistics.median(_seconds(r, names) / (_seconds(r, over) if over else 1) for r in rounds)

    projected_gradients = [
        (each["forward"][1].projected_gradients, each["sequential"][1].projected_gradients) for each in rounds
    ]
    return {
        "forward_over_limit": median("forward engine", over="forward_limit"),
        "jvp_over_limit": median("jvp engine", over="jvp_limit"),
        "parallel_speedup": median("sequential", over="forward"),
        "inner_speedup": median("sequential", over="inner"),
        "outer_speedup": median("sequential", over="outer"),
        "host_share": 1 - median("forward engine", over="forward"),
        "jvp_host_share": 1 - median("jvp engine", over="jvp"),
        "engine_seconds": median("forward engine"),
        "limit_seconds": median("forward_limit"),
        "jvp_engine_seconds": median("jvp engine"),
        "jvp_limit_seconds": median("jvp_limit"),
        "largest_scalar_difference": max(
            float(np.abs(one - other).max()) for one, other in projected_gradients
        ),
        "repeats": len(rounds),
    }


def _seconds(figures_by_name: Mapping[str, Any], name: str) -> float:
    """Return the seconds of a step or limit; with `engine` after the name, of a step's engine."""
    step, _, part = name.partition(" ")
    if part:
        return float(figures_by_name[step][1].engine_seconds)
    return float(
        figures_by_name[step][0] if isinstance(figures_by_name[step], tuple) else figures_by_name[step]
    )


def main() -> None:
    """Parse the flags, measure and print JSON."""
    shape = {"queries": 4, "batch_size": 2, "seq_len": 64, "rank": 8, "threads": 2, "repeats": 15}
    modules = ["q_proj", "v_proj"]
    parser = make_parser(__doc__, quantize=["fp32", "8da4w"], target_modules=modules, **shape)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    arguments = parser.parse_args()
    schemes = {}
    for scheme in arguments.quantize:
        with random_model(arguments.model, arguments.layers) as folder:
            schemes[scheme] = bench(arguments, scheme, folder / "model", folder)
    report({**schemes[arguments.quantize[0]], "schemes": schemes}, arguments)


if __name__ == "__main__":
    main()
