"""Measure the step time of a bundle's chain of programs, by estimator and batch shape.

    python scripts/bench/chain.py --model smollm2-135m --quantize 8da4w fp32 --pairs 10 --json chain.json

A model with random weights is exported with all roles. All estimators take the same steps on the same rows,
in turns; figures are medians over `--pairs` rounds. Prints JSON by scheme, estimator and shape (rows x
tokens): `chain_seconds`, and `over_antithetic`, the ratio to a P-RGE step; and by scheme seconds, peak memory
and sizes of the export.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reports import make_parser, measure_in_turns, median, parse_shape, report
from timing import export, folder_bytes, random_model, timed_step

from server_export.checkpoint.random_models import CONFIGURATIONS

ESTIMATORS: tuple[Any, ...] = ("tangent", "antithetic", "exact")


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Measure all estimators and shapes with one scheme."""
    longest = max(tokens for _, tokens in arguments.shapes)
    bundle = folder / scheme
    exported = export(folder / "model", bundle, "--quantize", scheme, "--sequence-length", str(longest))
    exported |= {f"{name}_bytes": folder_bytes(bundle / name) for name in ("programs", "weights")}
    estimators: dict[str, Any] = {estimator: {} for estimator in ESTIMATORS}
    for rows, tokens in arguments.shapes:
        steps = {
            each: timed_step(bundle, each, rows, tokens, arguments.threads).seconds for each in ESTIMATORS
        }
        rounds = measure_in_turns(steps, arguments.pairs)
        for estimator, shapes in estimators.items():
            shapes[f"{rows}x{tokens}"] = {
                "chain_seconds": median(rounds, estimator),
                "over_antithetic": median(rounds, estimator, over="antithetic"),
            }
    return {"export": exported, "estimators": estimators}


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, quantize=["8da4w", "fp32"], threads=2, pairs=20)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(2, 64), (1, 16)])
    arguments = parser.parse_args()
    with random_model(arguments.model, arguments.layers) as folder:
        schemes = {scheme: bench(arguments, scheme, folder) for scheme in arguments.quantize}
    report({"schemes": schemes}, arguments)


if __name__ == "__main__":
    main()
