"""What an engine costs on a device besides the model: resident memory and time to load, in fresh processes.

    python scripts/bench_device_memory.py --json memory.json

Each figure is of a child that imports what `prge run` imports, opens a bundle, loads its program and runs it once.
Anonymous memory that loading and the first forward add is the model's: packed weights, workspace, values. All
else is the engine's overhead: the interpreter, its packages, the libraries and the mapped file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

DEMO_MODEL = ROOT / "server_export" / "demo_data" / "model"
DEMO = "--target-modules o_proj down_proj --queries 4 --batch-size 4 --sequence-length 32 --positions 2"
MIB = 1 << 20


def measure(bundle: Path, engine: str, threads: int) -> dict[str, float]:
    """In a fresh process: load a bundle's program on an engine and run it once."""
    begin = time.perf_counter()
    import device_runner.run  # noqa: F401  what the driver holds
    from device_runner.engine_base import probing_inputs
    from device_runner.engines import choose
    from device_runner.tokenizer import bundle_tokenizer
    from prge.bundle import open_bundle

    opened = open_bundle(bundle)
    tokenizer = bundle_tokenizer(opened)
    inputs = probing_inputs(opened.contract)
    backend = choose(engine)  # type: ignore[arg-type]
    backend.set_threads(threads)
    ready = time.perf_counter()
    before = status()
    loaded = backend.load(opened, threads, check=False)
    done = time.perf_counter()
    loaded.forward(inputs)
    first = time.perf_counter()
    loaded.forward(inputs)
    after = status()
    del tokenizer
    model = after["RssAnon"] - before["RssAnon"]
    return {
        "resident_mb": after["VmRSS"] / MIB,
        "peak_mb": after["VmHWM"] / MIB,
        "model_mb": model / MIB,
        "overhead_mb": (after["VmRSS"] - model) / MIB,
        "import_seconds": ready - begin,
        "load_seconds": done - ready,
        "forward_seconds": first - done,
        "torch_imported": float("torch" in sys.modules),
    }


def status() -> dict[str, int]:
    """Memory of this process in bytes, as /proc/self/status has it."""
    fields = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in fields if value.endswith(" kB")}


def in_child(bundle: Path, engine: str, threads: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    words = [sys.executable, __file__, "--measure", str(bundle), engine, str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def export_demo(folder: Path) -> Path:
    """The demo's bundle."""
    words = ["export", "--model", DEMO_MODEL, "--out", folder, *DEMO.split()]
    subprocess.run([sys.executable, "-m", "prge.cli", *map(str, words)], check=True, cwd=ROOT)
    return folder


def export_smollm2(folder: Path, layers: int | None) -> Path:
    """A bundle of SmolLM2-135M's shape with random int4 weights, as a stack program."""
    from safetensors.numpy import load_file  # noqa: F401  fails early where the export side is missing

    from scripts.random_models import random_model
    from server_export.export import write_checked_bundle

    return write_checked_bundle(folder, random_model("smollm2-135m", layers))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--demo", type=Path, help="the demo's bundle, instead of exporting it")
    parser.add_argument("--smollm2", type=Path, help="a bundle of SmolLM2-135M's shape; made where there is none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        bundle, engine, threads = arguments.measure
        print(json.dumps(measure(Path(bundle), engine, int(threads))))
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
