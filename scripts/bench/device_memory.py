"""What an engine costs on a device besides the model: resident memory and time to load, in fresh processes.

    python scripts/bench/device_memory.py --json memory.json
    python scripts/bench/device_memory.py --bundles tinyllama --only-bundles
    python scripts/bench/device_memory.py --copies 8 4 2 1

Every figure is of a child that imports what `prge run` imports, opens a program and its tokenizer where it
has one, loads it on one engine and runs it twice. The model's are anonymous memory that this adds (packed
weights, workspace, values) and resident pages of the program's file (weights read where they lie, such
as the table of embeddings). All else is the engine's overhead: interpreter, packages, libraries. Medians of
`--repeats` children. The keys at the top are the worst of the programs under `programs`.

`peak_rss_over_weights` is the peak without what the process held before it loaded the program, over the size
of the file, which is all weights but for a thousandth. `--copies` gives a curve instead: the large model as a
P-RGE program of 4 queries, whose 8 copies are processed so many at a time; seconds are those of a whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports import report

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "server_export" / "demo_data" / "model"
DEMO = (
    "--target-modules o_proj down_proj --queries 4 --batch-size 4 --sequence-length 32 --positions 2".split()
)
LARGE = "smollm2-135m"
EXPORT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from device_memory import export_large
export_large(Path(sys.argv[2]), None if sys.argv[3] == "None" else int(sys.argv[3]), int(sys.argv[4]))
"""
ENGINES = ("native", "torch")
MIB = 1 << 20


def measure(folder: Path, engine: str, threads: int) -> dict[str, float]:
    """Load a program in this process on an engine, and run it twice."""
    begin = time.perf_counter()
    import device_runner.run  # noqa: F401, what the driver holds
    from device_runner.engines.base import probing_inputs
    from device_runner.engines.choice import Backend
    from prge.bundle import Bundle, open_bundle
    from prge.contract import Contract
    from prge.rows.tokenizer import bundle_tokenizer

    if (folder / "contract.json").is_file():
        contract = Contract.from_json(json.loads((folder / "contract.json").read_text()))
        bundle, kept = Bundle(folder, contract, {}), None
    else:
        bundle = open_bundle(folder)
        kept = bundle_tokenizer(bundle)
    inputs = probing_inputs(bundle.contract)
    backend = Backend(engine)
    backend.engine.set_threads(threads)
    before = memory()
    ready = time.perf_counter()
    loaded = backend.engine.load(bundle, threads, check=False)
    done = time.perf_counter()
    loaded.forward(inputs)
    first = time.perf_counter()
    loaded.forward(inputs)
    last = time.perf_counter()
    after = memory()
    mapped = mapped_bytes(bundle.program)
    del kept
    model = after["RssAnon"] - before["RssAnon"]
    return {
        "overhead_mb": (after["VmRSS"] - model - mapped) / MIB,
        "model_mb": model / MIB,
        "model_mapped_mb": mapped / MIB,
        "peak_mb": after["VmHWM"] / MIB,
        "peak_rss_over_weights": (after["VmHWM"] - before["VmRSS"]) / bundle.program.stat().st_size,
        "import_seconds": ready - begin,
        "load_seconds": done - ready,
        "first_forward_seconds": first - done,
        "forward_seconds": last - first,
        "torch_imported": float("torch" in sys.modules),
    }


def memory() -> dict[str, int]:
    """Memory of this process in bytes, as /proc/self/status has it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def mapped_bytes(path: Path) -> int:
    """Resident bytes of this process's mappings of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a mapping's first line: addresses, rights, ..., path
            inside = line.endswith(f" {path.resolve()}")
        elif inside and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def in_children(folder: Path, engine: str, threads: int, repeats: int) -> dict[str, float]:
    """Medians of `measure` in processes of their own."""
    command = [sys.executable, __file__, "--measure", str(folder), engine, "--threads", str(threads)]
    found = [json.loads(_output(command).splitlines()[-1]) for _ in range(repeats)]
    return {name: round(statistics.median(child[name] for child in found), 4) for name in found[0]}


def export_demo(folder: Path) -> None:
    """Write the demo's bundle."""
    _output([sys.executable, "-m", "prge.cli", "export", "--model", DEMO_MODEL, "--out", folder, *DEMO])


def export_large(folder: Path, layers: int | None, copies: int = 8) -> None:
    """Write a program of SmolLM2-135M's shape with random int4 weights, and its contract."""
    from random_model import random_model

    from server_export.lower.lowering import lower
    from server_export.lower.method_graphs import export_programs
    from server_export.model.program import build_program
    from server_export.settings import ExportConfig

    config = ExportConfig(
        model=LARGE,
        out=folder,
        target_modules=["q_proj", "v_proj"],
        estimator="antithetic",
        queries=4,
        copies=copies,
        batch_size=1,
        sequence_length=64,
        positions=4,
        quantize="8da4w",
    )
    built = build_program(config, random_model(LARGE, layers))
    folder.mkdir(parents=True)
    lower(export_programs(built)).write(folder / "program.pte")
    (folder / "contract.json").write_text(json.dumps(built.contract.to_json()))


def curve(copies: list[int], layers: int | None, base: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Memory and time of a step of the large model, by how many of its 8 copies run in one call."""
    found: dict[str, Any] = {}
    for count in copies:
        folder = base / f"{LARGE}-{count}-copies"
        if not folder.is_dir():
            _output([sys.executable, "-c", EXPORT, ROOT / "scripts", folder, str(layers), count])
        figures = in_children(folder, "native", threads, repeats)
        calls = -(-8 // count)
        found[str(count)] = {
            "calls": calls,
            "step_seconds": round(calls * figures["forward_seconds"], 4),
            **{name: figures[name] for name in ("model_mb", "peak_mb", "peak_rss_over_weights")},
        }
    return found


def _output(command: Sequence[object]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> int:
    """Export what is missing, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--folder", type=Path, help="keeps the exported programs; those in it are used again")
    parser.add_argument("--layers", type=int, help="makes the large model shallower; 0: leave it out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="children a figure")
    parser.add_argument("--bundles", type=Path, nargs="+", default=[], help="measures these too")
    parser.add_argument("--only-bundles", action="store_true", help="measures nothing else")
    parser.add_argument("--copies", type=int, nargs="+", help="measures the curve of these instead")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, engine = arguments.measure
        print(json.dumps(measure(Path(folder), engine, arguments.threads)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        base.mkdir(parents=True, exist_ok=True)
        if arguments.copies:
            found = curve(arguments.copies, arguments.layers, base, arguments.threads, arguments.repeats)
            report({"threads": arguments.threads, "copies": found}, arguments.json)
            return 0
        folders = {path.name: path for path in arguments.bundles}
        if not arguments.only_bundles:
            folders["demo"] = base / "demo"
            if not folders["demo"].is_dir():
                export_demo(folders["demo"])
        if not arguments.only_bundles and arguments.layers != 0:
            name = LARGE if arguments.layers is None else f"{LARGE}-{arguments.layers}-layers"
            folders[f"{name}-8da4w"] = base / name
            if not folders[f"{name}-8da4w"].is_dir():
                # In a process of its own, so that its memory is free when the figures are taken.
                layers = "None" if arguments.layers is None else str(arguments.layers)
                _output([sys.executable, "-c", EXPORT, ROOT / "scripts", base / name, layers, 8])
        programs = {
            name: {
                engine: in_children(folder, engine, arguments.threads, arguments.repeats)
                for engine in ENGINES
            }
            | {"program_mb": round((folder / "program.pte").stat().st_size / MIB, 2)}
            for name, folder in folders.items()
        }
    figures = {
        "native_overhead_mb": max(found["native"]["overhead_mb"] for found in programs.values()),
        "torch_overhead_mb": max(found["torch"]["overhead_mb"] for found in programs.values()),
        "peak_rss_over_weights": max(found["native"]["peak_rss_over_weights"] for found in programs.values()),
        "load_seconds_native": max(found["native"]["load_seconds"] for found in programs.values()),
        "threads": arguments.threads,
        "programs": programs,
    }
    report(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
