"""Which loops of P-RGE to run in one call: queries, the two copies of a query, both, or none as MeZO does.

    python scripts/bench/loops.py --model smollm2-135m --quantize 8da4w --json loops.json

A step of q queries takes 2q copies of the adapter. `both` computes all in one call, `outer` the queries in
one call and the signs one after the other, `inner` both signs of a query in one call and the queries one
after the other, `mezo` one copy a call. It is `--copies` of `prge run`, on one bundle; a step's scalars are
the same. All four take turns in one process. Prints JSON by scheme, queries and tokens of a row: median
seconds of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reports import in_turns, median, parser_of, report
from timing import export, random_model, timed_step

from server_export.model.random_models import CONFIGURATIONS


def copies_of(queries: int) -> dict[str, int]:
    """Copies in one call, by which loops run in it."""
    return {"both": 2 * queries, "outer": queries, "inner": 2, "mezo": 1}


def step_seconds(bundle: Path, batch: int, tokens: int, queries: int, threads: int, repeats: int) -> Any:
    """Median seconds of a step by which loops run in one call."""
    # What is the same call is measured once.
    steps = {
        copies: timed_step(bundle, "antithetic", batch, tokens, threads, queries, copies).seconds
        for copies in set(copies_of(queries).values())
    }
    rounds = in_turns(steps, repeats)
    return {loops: median(rounds, copies) for loops, copies in copies_of(queries).items()}


def main() -> None:
    """Read the flags, measure, print JSON."""
    sizes = {"queries": [1, 4, 16], "seq_lens": [16, 64, 256]}
    parser = parser_of(__doc__, quantize=["8da4w", "fp32"], threads=2, repeats=9, batch_size=1, **sizes)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    arguments = parser.parse_args()
    schemes: dict[str, Any] = {}
    shape = (arguments.threads, arguments.repeats)
    with random_model(arguments.model, arguments.layers) as folder:
        for scheme in arguments.quantize:
            bundle, length = folder / scheme, str(max(arguments.seq_lens))
            flags = ["--quantize", scheme, "--roles", "stack", "--sequence-length", length]
            export(folder / "model", bundle, *flags)
            schemes[scheme] = {
                f"q={queries}": {
                    str(tokens): step_seconds(bundle, arguments.batch_size, tokens, queries, *shape)
                    for tokens in arguments.seq_lens
                }
                for queries in arguments.queries
            }
    report({"schemes": schemes}, arguments)


if __name__ == "__main__":
    main()
