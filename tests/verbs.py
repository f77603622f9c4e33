"""Verbs as a user calls them, in this process: starting another with PyTorch takes seconds."""

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
    *words: object, check: bool = True, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """One verb of the command line, and what it and its children said."""
    command = list(map(str, words))
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        given.write(input)
        given.seek(0)
        with _standard("stdin", given), _standard("stdout", out), _standard("stderr", errors):
            code = _called(command, cwd)
        said = [_content(stream) for stream in (out, errors)]
    if check and code:
        raise AssertionError(f"prge {' '.join(command)} ended with {code}\n{said[0]}\n{said[1]}")
    return subprocess.CompletedProcess(command, code, *said)


def _called(command: list[str], cwd: Path | None) -> int:
    """The exit code of a verb, which leaves folder, environment and signals as they are."""
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
    """Let a standard file be this one, for children and the engine too."""
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
