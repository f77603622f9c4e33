"""Measure CPU seconds and peak memory of a program in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# getrusage's peak includes the parent's; this one begins with the process.
_PEAK = "next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('VmHWM'))"


@dataclass(frozen=True)
class ProgramCost:
    """Cost of a program, and the peak memory of its preparation before it."""

    seconds: float
    peak_bytes: int
    before_bytes: int

    @property
    def above_bytes(self) -> int:
        """Memory of the program beyond its preparation's peak."""
        return self.peak_bytes - self.before_bytes


def measure_program(preparation: str, program: str) -> ProgramCost:
    """Run and measure Python statements after a preparation that isn't measured."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    source = "\n".join(
        [
            "import time",
            preparation,
            f"before, start = {_PEAK}, time.process_time()",
            program,
            f"print(time.process_time() - start, {_PEAK}, before)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    seconds, peak, before = done.stdout.split()[-3:]
    return ProgramCost(float(seconds), int(peak), int(before))
