"""`python -m server_export.evidence.compare.idle`: peak memory of a runner that does nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

from prge.cli import VERBS
from prge.host.memory import PeakMemory


def idle_memory() -> int | None:
    """Peak bytes of such a process; None where the system doesn't tell."""
    command = [sys.executable, "-m", __name__]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak: int | None = json.loads(done.stdout)["peak_bytes"]
    return peak


def main() -> None:
    """Import what a run imports, and print the peak as JSON."""
    importlib.import_module(VERBS["run"].module)
    print(json.dumps(PeakMemory().report()))


if __name__ == "__main__":
    main()
