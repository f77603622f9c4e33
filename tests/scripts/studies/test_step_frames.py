"""The files and frames of one exact step are counted by running one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.compilers import needs_compiler

SCRIPT = Path(__file__).parents[3] / "scripts/studies/step_frames.py"


@needs_compiler
def test_a_step_runs_from_the_loop_to_the_engine(workshop: Path) -> None:
    arguments = ["--bundle", workshop / "bundle", "--train", workshop / "train.jsonl"]
    command = [sys.executable, SCRIPT, *arguments, "--task", workshop / "task.yaml"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["frames"][0] == "prge/training/loop.py:step"
    assert result["frames"][-1] == "device_runner/engines/native/runtime.py:run"
    assert {"device_runner/engines/forward.py", "prge/training/optimizers.py"} <= {*result["step_files"]}
    counts = result["counts"]
    assert counts["frames"] == len(result["frames"]) < counts["step_files"] < counts["run_files"]
