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
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from processes import Server, answering
from reports import in_turns, median, parser_of, report, shape_of
from timing import export, folder_bytes, random_model, timed_step

from server_export.model.random_models import CONFIGURATIONS

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
    shape = ["--quantize", scheme, "--batch-size", rows, "--sequence-length", tokens]
    export(model, folder, *shape, "--estimator", estimator, *ESTIMATORS[estimator], checkout=checkout)
    command = [sys.executable, "-c", MONOLITH, str(folder), estimator, *map(str, sizes)]
    paths = f"{checkout}{os.pathsep}{checkout / 'scripts' / 'bench'}"
    with answering(command, {"PYTHONPATH": paths}, checkout) as server:
        yield server


def compared(steps: dict[str, Timed], repeats: int) -> dict[str, float]:
    """The chain, and where there is one the program of the whole model, in turns."""
    rounds = in_turns(steps, repeats)
    seconds = [{name: found[0] for name, found in each.items()} for each in rounds]
    figures = {f"{name}_seconds": median(seconds, name) for name in steps}
    if "monolith" in steps:
        losses = [rounds[0][name][1] for name in ("chain", "monolith")]
        figures["chain_over_monolith"] = median(seconds, "chain", over="monolith")
        figures["loss_difference"] = abs(losses[0] - losses[1])
    return figures


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
            steps: dict[str, Timed] = {"chain": step.with_loss}
            with ExitStack() as stack:
                if arguments.monolith is not None:
                    sizes, checkout = [rows, tokens, arguments.threads], arguments.monolith.resolve()
                    one = monolith(checkout, model, folder / "one", scheme, estimator, sizes)
                    steps["monolith"] = stack.enter_context(one)
                shapes[f"{rows}x{tokens}"] = compared(steps, arguments.pairs)
    return figures


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__, quantize=["8da4w", "fp32"], threads=2, pairs=20)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(2, 64), (1, 16)])
    parser.add_argument("--monolith", type=Path, help="checkout to compare with")
    arguments = parser.parse_args()
    with random_model(arguments.model, arguments.layers) as folder:
        schemes = {
            scheme: bench(arguments, scheme, folder / "model", folder) for scheme in arguments.quantize
        }
    report({"schemes": schemes}, arguments)


if __name__ == "__main__":
    main()
