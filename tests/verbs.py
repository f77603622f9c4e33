"""Call verbs as a user does, but in this process: starting another one with PyTorch takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest import mock

from prge.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[1]


def prge(
    *arguments: object, check: bool = True, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run one verb and return its exit code and output, including its children's."""
    command = list(map(str, arguments))
    with (
        tempfile.TemporaryFile("w+") as input_file,
        tempfile.TemporaryFile("w+") as output_file,
        tempfile.TemporaryFile("w+") as errors_file,
    ):
        input_file.write(input)
        input_file.seek(0)
        with (
            _standard("stdin", input_file),
            _standard("stdout", output_file),
            _standard("stderr", errors_file),
        ):
            code = _called(command, cwd)
        outputs = [_content(stream) for stream in (output_file, errors_file)]
    if check and code:
        raise AssertionError(f"prge {' '.join(command)} ended with {code}\n{outputs[0]}\n{outputs[1]}")
    return subprocess.CompletedProcess(command, code, *outputs)


def _called(command: list[str], cwd: Path | None) -> int:
    """Run a verb and return its exit code; restore folder, environment and signals."""
    here, terminate = Path.cwd(), signal.getsignal(signal.SIGTERM)
    os.chdir(cwd or here)
    try:
        with mock.patch.dict(os.environ, {"PYTHONPATH": str(REPOSITORY)}):
            return main(command)
    finally:
        os.chdir(here)
        signal.signal(signal.SIGTERM, terminate)


@contextmanager
def _standard(name: str, stream: IO[str]) -> Iterator[None]:
    """Replace a standard stream, also for children and the engine."""
    number = ("stdin", "stdout", "stderr").index(name)
    kept = os.dup(number)
    os.dup2(stream.fileno(), number)
    try:
        with mock.patch.object(sys, name, stream):
            yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _content(stream: IO[str]) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
