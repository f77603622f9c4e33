"""Compare `prge estimate` with measured memory and file sizes.

    python scripts/bench/estimate.py --models smollm2-135m:8 qwen2.5-0.5b:4 --json estimate.json

The models are architectures with random weights; the number of layers after a colon makes them shallower.
Each is exported by `prge export`; steps run in processes of their own, with all weights loaded or, with the
bound `least`, with as few as possible. The estimate uses the outline of the model. Prints JSON: the ratio of
estimate to measurement for every figure, and the worst ratio of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import drop_from_cache, start_method
from reports import make_parser, parse_shape, report
from serve import ENGINE
from timing import all_weights_bytes, export, folder_bytes, minimum_loaded_bytes, random_model

from prge.cli.subprocesses import output_of
from prge.formats.bundle import open_bundle
from prge.training.costs import StepShape, bundle_costs, estimate_run_memory
from prge.training.estimators.table import ESTIMATORS

THREADS, QUERIES = 1, 4


def compare(scheme: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare one export and its runs with the estimate."""
    model, bundle, cache = (folder / name for name in ("model", "bundle", "cache"))
    flags = ["--quantize", scheme, "--sequence-length", arguments.longest]
    peak = export(model, bundle, *flags)["peak_rss_mb"] * 1e6
    # Freshly written files are cached in larger blocks than files that are read page by page.
    drop_from_cache(bundle / "weights")
    pairs: dict[str, tuple[float, float]] = {}
    bounds = {"": None, "least": minimum_loaded_bytes(bundle), "weights": all_weights_bytes(bundle)}
    opened = open_bundle(bundle)
    chain, (outline, weights) = opened.chain, bundle_costs(opened)
    output = output_of("estimate", "--json", "--model", model, *flags, "--estimator", "exact")
    estimated = json.loads(output)
    for method, (estimator, bound) in ENGINE.items():
        for rows, tokens in arguments.shapes:
            entry = ESTIMATORS[estimator]
            copies, directions = entry.copies(QUERIES), entry.directions(QUERIES)
            sizes = (rows, tokens, tokens - 1, chain.vocabulary_size)
            shape = StepShape(entry.role, *sizes, copies=copies, queries=directions)
            expected = estimate_run_memory(outline, shape, weights, chain.roles, "native", bounds[bound])
            step_sizes = (rows, tokens, THREADS, QUERIES)
            with start_method(method, folder, *step_sizes) as first_process:
                first_process.take_step()
            with start_method(method, folder, *step_sizes) as step:
                memory = step.memory(3)
            name = f"{method}_{rows}x{tokens}"
            # These processes have no tokenizer.
            pairs[f"anonymous_{name}"] = expected.anonymous - expected.tokenizer, memory.anonymous_mb * 1e6
            pairs[f"resident_{name}"] = expected.total - expected.tokenizer, memory.peak_rss_mb * 1e6
    pairs |= {
        "programs": (estimated["programs_bytes"], folder_bytes(bundle / "programs")),
        "weights": (estimated["weights_bytes"], folder_bytes(bundle / "weights")),
        "packed": (estimated["packed_bytes"], folder_bytes(cache / "prge" / "packed")),
        "export_memory": (estimated["export"]["peak_bytes"], peak),
    }
    return {
        name: {
            "estimated": round(estimate, 4),
            "measured": round(measurement, 4),
            "ratio": round(estimate / measurement, 3),
        }
        for name, (estimate, measurement) in pairs.items()
    }


def main() -> None:
    """Parse the flags, compare and print JSON."""
    parser = make_parser(__doc__, models=["smollm2-135m"], quantize=["fp32", "8da4w"])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(4, 64), (1, 256)])
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    bundles = []
    for name in arguments.models:
        architecture, _, layers = name.partition(":")
        for scheme in arguments.quantize:
            with random_model(architecture, int(layers) if layers else arguments.layers) as folder:
                figures = compare(scheme, arguments, folder)
            bundles.append({"model": name, "quantize": scheme, "figures": figures})
            print(name, scheme, {key: pair["ratio"] for key, pair in figures.items()}, file=sys.stderr)
    worst = {
        name: max((each["figures"][name]["ratio"] for each in bundles), key=lambda ratio: abs(ratio - 1))
        for name in bundles[0]["figures"]
    }
    report({"worst_ratio": worst, "bundles": bundles}, arguments)


if __name__ == "__main__":
    main()
