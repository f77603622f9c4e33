"""Time of a step on a chain of small programs, as it is and over that on one program of the whole model.

    python scripts/bench/chain.py --model smollm2-135m --quantize 8da4w fp32 --json chain.json
    python scripts/bench/chain.py --monolith CHECKOUT --json chain.json

A model with random weights is exported with all roles. CHECKOUT is a working tree of a commit whose exports
make one program of the whole model for an estimator and a shape, such as 6c5eaad. Both take the same steps
on the same rows, in turns, each in a process of its own; figures are medians. Prints JSON by scheme,
estimator and shape (rows x tokens): seconds, with a checkout also those of the one program,
`chain_over_monolith`, and how far apart their losses are; and by scheme seconds, peak memory and sizes of
the chain's export.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import Server, serving
from reports import circumstances, parser_of, report
from timing import export, folder_bytes, timed_step

from server_export.model.random_models import CONFIGURATIONS, save_random_model

ESTIMATORS: dict[Any, list[str]] = {
    "tangent": ["--queries", "4"],
    "antithetic": ["--queries", "4"],
    "exact": [],
}
# With the modules of the other checkout.
MONOLITH = """
import sys
from pathlib import Path
from chain import timed_step
folder, estimator, *sizes = sys.argv[1:]
step = timed_step(Path(folder), estimator, *map(int, sizes))
for line in sys.stdin:
    seconds, measurement = step()
    print(seconds, measurement.loss, flush=True)
"""

Timed = Callable[[], tuple[float, float]]


@contextmanager
def monolith(
    checkout: Path, model: Path, folder: Path, scheme: str, estimator: str, sizes: list[int]
) -> Iterator[Server]:
    """A step on one program of the whole model, made and taken by a checkout: seconds and loss of a call.

    `sizes` are rows, tokens, threads.
    """
    rows, tokens, _ = map(str, sizes)
    shape = [
        "--quantize",
        scheme,
        "--batch-size",
        rows,
        "--sequence-length",
        tokens,
        "--estimator",
        estimator,
    ]
    export(model, folder, *shape, *ESTIMATORS[estimator], checkout=checkout)
    command = [sys.executable, "-c", MONOLITH, str(folder), estimator, *map(str, sizes)]
    paths = f"{checkout}{os.pathsep}{checkout / 'scripts' / 'bench'}"
    with serving(command, {"PYTHONPATH": paths}, checkout) as server:
        yield server


def compared(chain: Timed, other: Timed | None, repeats: int) -> dict[str, float]:
    """Both in turns, and in turns which goes first."""
    steps = [chain] if other is None else [chain, other]
    losses = [step()[1] for step in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats):
        for index in range(len(steps)) if repeat % 2 else reversed(range(len(steps))):
            seconds[index].append(steps[index]()[0])
    found = {"chain_seconds": statistics.median(seconds[0])}
    if other is None:
        return found
    return {
        "chain_over_monolith": statistics.median(a / b for a, b in zip(*seconds, strict=True)),
        **found,
        "monolith_seconds": statistics.median(seconds[1]),
        "loss_difference": abs(losses[0] - losses[1]),
    }


def bench(arguments: argparse.Namespace, scheme: str, model: Path, folder: Path) -> dict[str, Any]:
    """All estimators and shapes with one scheme."""
    longest = max(tokens for _, tokens in arguments.shapes)
    bundle = folder / "chain"
    exported = export(model, bundle, "--quantize", scheme, "--sequence-length", str(longest))
    figures: dict[str, Any] = {"export": exported, "estimators": {}}
    exported |= {f"{name}_bytes": folder_bytes(bundle / name) for name in ("programs", "weights")}
    for estimator in arguments.estimators:
        shapes = figures["estimators"][estimator] = {}
        for rows, tokens in arguments.shapes:
            step = timed_step(bundle, estimator, rows, tokens, arguments.threads)

            def chain(step: Callable[[], Any] = step) -> tuple[float, float]:
                seconds, measurement = step()
                return seconds, measurement.loss

            if arguments.monolith is None:
                shapes[f"{rows}x{tokens}"] = compared(chain, None, arguments.pairs)
                continue
            sizes = [rows, tokens, arguments.threads]
            checkout = arguments.monolith.resolve()
            with monolith(checkout, model, folder / "one", scheme, estimator, sizes) as other:
                shapes[f"{rows}x{tokens}"] = compared(chain, other, arguments.pairs)
    return figures


def shape_of(text: str) -> tuple[int, int]:
    """Rows and tokens of `2x64`."""
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--quantize", nargs="+", default=["8da4w", "fp32"])
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(2, 64), (1, 16)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--monolith", type=Path, help="checkout to compare with")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(folder / "model", arguments.model, arguments.layers)
        schemes = {
            scheme: bench(arguments, scheme, folder / "model", folder) for scheme in arguments.quantize
        }
    report({"schemes": schemes, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
