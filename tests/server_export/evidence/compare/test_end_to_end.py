"""The real command on the demo's model: killed, continued, and its results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
STEPS = 120


def start(out: Path) -> subprocess.Popen[str]:
    """Start a comparison of two engine methods."""
    arguments = [
        "--preset", "demo", "--out", out, "--json", out.with_suffix(".json"),
        "--methods", "p-rge-q1", "tangent", "--seeds", 5, "--search-trials", 1,
        "--learning-rates", '{"p-rge-q1": 0.01, "tangent": 0.01}',
        "--budget", "steps", "--budget-value", STEPS, "--evaluation-growth", 5,
        "--dev-limit", 40, "--test-limit", 40,
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "prge.cli.main", "compare", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def curve(result: dict[str, Any], method: str) -> list[float]:
    return [point["loss"] for point in result["methods"][method]["runs"][0]["curve"]]


@pytest.mark.whole
def test_a_killed_comparison_continues(tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    run = out / "runs/p-rge-q1-5/run"
    first = start(out)
    deadline = time.monotonic() + 400
    journal = run / "journal.jsonl"
    while not (journal.is_file() and journal.read_bytes().count(b'"type":"step"') >= 5):
        assert first.poll() is None, first.stdout and first.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(out)
    output, _ = second.communicate(timeout=400)
    assert second.returncode == 0, output
    log = (run.parent / "output.txt").read_text()
    assert "$ prge run --resume" in log
    result = json.loads((out / "result.json").read_text())
    assert curve(result, "p-rge-q1")[-1] < curve(result, "p-rge-q1")[0]
    figures = json.loads(out.with_suffix(".json").read_text())["methods"]["tangent"]
    assert figures["peak_mb"]["mean"] > 0
    assert figures["activation_mb"]["mean"] > 0
    assert figures["test_accuracy"]["seeds"] == 1
    assert (out / "report.html").read_text(encoding="utf-8").count("<svg ") == 2
