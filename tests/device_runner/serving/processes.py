"""Servers in processes of their own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.verbs import REPOSITORY


@contextmanager
def server_process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a Python script that prints its host and port, and yield its URL; killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://{process.stdout.readline().strip()}"
        finally:
            process.kill()
