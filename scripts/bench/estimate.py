"""What `prge estimate` says of memory and files against what is.

    python scripts/bench/estimate.py --models smollm2-135m:8 qwen2.5-0.5b:4 --json estimate.json

Every model is exported by `prge export` in a process of its own; runs are processes as of device_memory.py,
with all weights loaded or, bound `least`, with as few as may be. The estimate comes from the configuration
alone. Prints JSON: estimated over measured of every figure, and the worst of each. The models are folders, or
architectures with random weights, made shallower by a number of layers after a colon. The torch engine takes
gigabytes for a model, so it is measured where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from device_memory import in_children
from processes import forget
from reports import parser_of, report, shape_of
from timing import export, folder_bytes, least_memory, random_model

from prge.verbs.starting import answer_of


def compare(model: Path, scheme: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    bundle, cache = folder / "bundle", folder / "cache"
    same = ["--quantize", scheme, "--sequence-length", str(arguments.longest)]
    peak = export(model, bundle, *same)["peak_rss_mb"] * 2**20
    # What was written a moment ago lies in the cache in larger pieces than what is read page by page.
    forget(bundle / "weights")
    bounds: dict[str, list[object]] = {"all": [], "least": ["--memory", least_memory(bundle)]}
    pairs: dict[str, tuple[float, float]] = {}
    for estimator in arguments.estimators:
        for rows, tokens in arguments.shapes:
            step = ["--estimator", estimator, "--batch-size", rows]
            for bound, memory in bounds.items():
                told = ["--model", model, *same, *step, "--tokens", tokens, *memory]
                estimated = json.loads(answer_of("estimate", "--json", *told))
                for engine in arguments.engines:
                    words = [*step, "--seq-len", tokens, "--engine", engine]
                    found = in_children(bundle, bound, words, XDG_CACHE_HOME=str(cache))
                    expected, name = estimated["run_memory"][engine], f"{engine}_{estimator}_{rows}x{tokens}"
                    for size, key, measured in (
                        ("anonymous", "anonymous_bytes", "anonymous_mb"),
                        ("resident", "total_bytes", "peak_rss_mb"),
                    ):
                        pairs[f"{size}_{name}_{bound}"] = (expected[key], found[measured] * 1e6)
    pairs |= {
        "programs": (estimated["programs_bytes"], folder_bytes(bundle / "programs")),
        "weights": (estimated["weights_bytes"], folder_bytes(bundle / "weights")),
        "packed": (estimated["packed_bytes"], folder_bytes(cache / "prge" / "packed")),
        "export_memory": (estimated["export"]["peak_bytes"], peak),
    }
    return {
        name: {"estimated": round(ours, 4), "measured": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        for name, (ours, theirs) in pairs.items()
        if theirs
    }


def main() -> None:
    """Read the flags, compare, print JSON."""
    models, estimators = ["smollm2-135m"], ["tangent", "antithetic", "exact"]
    parser = parser_of(
        __doc__, models=models, quantize=["fp32", "8da4w"], estimators=estimators, engines=["native"]
    )
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(4, 64), (1, 256)])
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    arguments = parser.parse_args()
    found = []
    for name in arguments.models:
        for scheme in arguments.quantize:
            with ExitStack() as stack:
                if Path(name).is_dir():
                    model, folder = Path(name), Path(stack.enter_context(tempfile.TemporaryDirectory()))
                else:
                    architecture, _, layers = name.partition(":")
                    depth = int(layers) if layers else arguments.layers
                    folder = stack.enter_context(random_model(architecture, depth))
                    model = folder / "model"
                figures = compare(model, scheme, arguments, folder)
            found.append({"model": name, "quantize": scheme, "figures": figures})
            print(name, scheme, {key: pair["ratio"] for key, pair in figures.items()}, file=sys.stderr)
    ratios: dict[str, list[float]] = {}
    for entry in found:
        for name, figure in entry["figures"].items():
            ratios.setdefault(name, []).append(figure["ratio"])
    worst = {name: max(each, key=lambda ratio: abs(ratio - 1)) for name, each in sorted(ratios.items())}
    report({"worst_ratio": worst, "bundles": found}, arguments)


if __name__ == "__main__":
    main()
