"""The grid of benchmarks: which cells it runs and in what order, what it keeps, how it goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

# Writes what the grid reads, and its call beside it; fails where it is told to.
STEP_BENCH = """
import json, pathlib, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
root = pathlib.Path(__file__).parent
with open(root / "calls", "a") as calls:
    calls.write(" ".join(flags[f"--{n}"] for n in ("model", "layers", "seq-len", "queries", "batch-size",
                                                   "quantize", "repeats")) + "\\n")
pathlib.Path(flags["--json"]).write_text("{")
if flags["--seq-len"] == (root / "fails").read_text():
    sys.exit("no memory")
keys = ("stack_over_limit", "tangent_over_limit", "parallel_speedup", "parallel_speedup_possible",
        "host_share", "tangent_host_share", "peak_rss_over_weights")
figures = {key: 1 + number / 8 for number, key in enumerate(keys)}
figures |= {"engine_seconds": 2.0, "tangent_engine_seconds": 1.5, "repeats": 3, "other": 1}
pathlib.Path(flags["--json"]).write_text(json.dumps(figures))
"""

SMALL = "--models tinyllama-1.1b smollm2-135m --layers 2 --seq-lens 16 --queries 4 8 --depths --batch-sizes 1"


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A folder with the script and a benchmark that answers at once."""
    shutil.copy(REPOSITORY / "scripts" / "bench" / "grid.py", tmp_path)
    (tmp_path / "step.py").write_text(STEP_BENCH, encoding="utf-8")
    (tmp_path / "fails").write_text("never", encoding="utf-8")
    (tmp_path / "calls").touch()
    return tmp_path


def start(grid: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, grid / "grid.py", "--out", grid / "out", *SMALL.split(), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "", "MPLCONFIGDIR": str(grid)},
    )


def calls(grid: Path) -> list[str]:
    return (grid / "calls").read_text(encoding="utf-8").splitlines()


def test_bases_come_first_then_the_axes_of_each_model(grid: Path) -> None:
    pytest.importorskip("matplotlib")
    child = start(grid, "--repeats", "3", "--markdown")
    assert child.returncode == 0, child.stderr
    settings = ["64 4 1", "16 4 1", "64 8 1"]
    expected = [
        f"{model} 2 {settings[at]} {scheme} 3"
        for model, at in [
            ("tinyllama-1.1b", 0),
            ("smollm2-135m", 0),
            *(("tinyllama-1.1b", at) for at in (1, 2)),
            *(("smollm2-135m", at) for at in (1, 2)),
        ]
        for scheme in ("fp32", "8da4w")
    ]
    assert calls(grid) == expected
    cells = json.loads((grid / "out" / "grid.json").read_text(encoding="utf-8"))
    assert len(cells) == 12
    assert cells[0] == {
        **{"model": "tinyllama-1.1b", "layers": 2, "seq_len": 64, "queries": 4, "batch_size": 1},
        **{"scheme": "fp32", "stack_over_limit": 1.0, "tangent_over_limit": 1.125},
        **{"parallel_speedup": 1.25, "parallel_speedup_possible": 1.375, "tangent_over_stack": 0.75},
        **{"host_share": 1.5, "tangent_host_share": 1.625, "peak_rss_over_weights": 1.75},
        **{"engine_seconds": 2.0, "tangent_engine_seconds": 1.5, "repeats": 3},
    }
    table = child.stdout.splitlines()
    assert len(table) == 2 + len(cells) and len({line.count("|") for line in table}) == 1
    assert (grid / "out" / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_cell_is_told_and_tried_again_the_others_stay(grid: Path) -> None:
    pytest.importorskip("matplotlib")
    (grid / "fails").write_text("16", encoding="utf-8")
    child = start(grid)
    assert child.returncode == 1
    assert (
        "tinyllama-1.1b-layers2-seq16-queries4-batch1-fp32: failed with status 1: no memory" in child.stderr
    )
    assert "4 cells failed" in child.stderr
    assert len(calls(grid)) == 12
    assert len(json.loads((grid / "out" / "grid.json").read_text(encoding="utf-8"))) == 8
    assert not list((grid / "out").glob("*.part"))

    (grid / "fails").write_text("never", encoding="utf-8")
    assert start(grid).returncode == 0
    assert [call.split()[2] for call in calls(grid)[12:]] == ["16"] * 4


def test_no_cell_begins_after_the_time_nor_for_a_plot_alone(grid: Path) -> None:
    for words in (["--minutes", "0"], ["--plot-only"]):
        child = start(grid, *words)
        assert child.returncode == 0, child.stderr
        assert "no axis has two cells: no figure" in child.stderr
        assert calls(grid) == []


def test_what_a_call_costs_whatever_its_size_is_gained_once() -> None:
    pytest.importorskip("executorch")
    from roofline import possible_speedup

    # Without it the products alone decide; a measured time below their roofline is noise.
    assert possible_speedup(8, 1.0, 4.0, 0.0) == possible_speedup(8, 1.0, 4.0, -0.5) == 2.0
    assert possible_speedup(8, 1.0, 4.0, 1.0) == 8 * 2 / 5
    # A call that costs nothing but itself: as many times as fast as it has copies.
    assert possible_speedup(8, 0.0, 0.0, 1.0) == 8.0
