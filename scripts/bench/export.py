"""Measure exports: seconds, peak memory, and sizes of programs and weights, by model.

    python scripts/bench/export.py --models smollm2-135m tinyllama-1.1b llama-3.1-8b --json export.json

A model is an architecture with random weights, written to a temporary folder in bfloat16 shard by shard.
Every export is a `prge export` in a process of its own. It rounds to nearest, since random weights can't be
calibrated (`--rounding gptq` does it anyway). Prints JSON: by model `seconds`, `processor_seconds` of all
threads, `peak_rss_mb`, `program_bytes` and `weights_bytes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reports import make_parser, report_models
from timing import export, folder_bytes

from prge.formats.signatures import ROLES
from server_export.checkpoint.random_models import CONFIGURATIONS


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, float]:
    """Measure one export."""
    bundle, flags = folder / "bundle", ["--quantize", arguments.quantize, "--roles", *arguments.roles]
    flags += ["--rounding", arguments.rounding]
    return {
        **export(folder / "model", bundle, *flags),
        "program_bytes": folder_bytes(bundle / "programs"),
        "weights_bytes": folder_bytes(bundle / "weights"),
    }


def main() -> None:
    """Parse the flags, export and print JSON."""
    parser = make_parser(__doc__, quantize="8da4w", rounding="nearest")
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
