"""What `prge estimate` says of memory and files against what is.

    python scripts/bench/estimate.py --models smollm2-135m:8 qwen2.5-0.5b:4 --json estimate.json

The models are architectures with random weights, made shallower by a number of layers after a colon. Every
one is exported by `prge export`; steps are taken by processes of their own, with all weights loaded or, bound
`least`, with as few as may be. The estimate comes from the outline of the model. Prints JSON: estimated over
measured of every figure, and the worst of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import forget, serving
from reports import parser_of, report, shape_of
from serve import ENGINE
from timing import all_loaded, export, folder_bytes, least_loaded, random_model

from prge.cli.subprocesses import output_of
from prge.formats.bundle import open_bundle
from prge.training.costs import StepShape, bundle_costs, estimate_run_memory
from prge.training.estimators.table import ESTIMATORS

THREADS, QUERIES = 1, 4


def compare(scheme: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    model, bundle, cache = (folder / name for name in ("model", "bundle", "cache"))
    same = ["--quantize", scheme, "--sequence-length", arguments.longest]
    peak = export(model, bundle, *same)["peak_rss_mb"] * 2**20
    # What was written a moment ago lies in the cache in larger pieces than what is read page by page.
    forget(bundle / "weights")
    pairs: dict[str, tuple[float, float]] = {}
    bounds = {"": None, "least": least_loaded(bundle), "weights": all_loaded(bundle)}
    opened = open_bundle(bundle)
    chain, (outline, weights) = opened.chain, bundle_costs(opened)
    told = output_of("estimate", "--json", "--model", model, *same, "--estimator", "exact")
    estimated = json.loads(told)
    for method, (estimator, kind) in ENGINE.items():
        for rows, tokens in arguments.shapes:
            entry = ESTIMATORS[estimator]
            copies, directions = entry.copies(QUERIES), entry.directions(QUERIES)
            sizes = (rows, tokens, tokens - 1, chain.vocabulary_size)
            shape = StepShape(entry.role, *sizes, copies=copies, queries=directions)
            expected = estimate_run_memory(outline, shape, weights, chain.roles, "native", bounds[kind])
            served = (rows, tokens, THREADS, QUERIES)
            with serving(method, folder, *served) as packing:
                packing.answer()
            with serving(method, folder, *served) as step:
                found = step.memory(3)
            name = f"{method}_{rows}x{tokens}"
            # These processes have no tokenizer.
            pairs[f"anonymous_{name}"] = expected.anonymous - expected.tokenizer, found.anonymous_mb * 1e6
            pairs[f"resident_{name}"] = expected.total - expected.tokenizer, found.peak_rss_mb * 1e6
    pairs |= {
        "programs": (estimated["programs_bytes"], folder_bytes(bundle / "programs")),
        "weights": (estimated["weights_bytes"], folder_bytes(bundle / "weights")),
        "packed": (estimated["packed_bytes"], folder_bytes(cache / "prge" / "packed")),
        "export_memory": (estimated["export"]["peak_bytes"], peak),
    }
    return {
        name: {"estimated": round(ours, 4), "measured": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        for name, (ours, theirs) in pairs.items()
    }


def main() -> None:
    """Read the flags, compare, print JSON."""
    parser = parser_of(__doc__, models=["smollm2-135m"], quantize=["fp32", "8da4w"])
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(4, 64), (1, 256)])
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    found = []
    for name in arguments.models:
        architecture, _, layers = name.partition(":")
        for scheme in arguments.quantize:
            with random_model(architecture, int(layers) if layers else arguments.layers) as folder:
                figures = compare(scheme, arguments, folder)
            found.append({"model": name, "quantize": scheme, "figures": figures})
            print(name, scheme, {key: pair["ratio"] for key, pair in figures.items()}, file=sys.stderr)
    worst = {
        name: max((each["figures"][name]["ratio"] for each in found), key=lambda ratio: abs(ratio - 1))
        for name in found[0]["figures"]
    }
    report({"worst_ratio": worst, "bundles": found}, arguments)


if __name__ == "__main__":
    main()
