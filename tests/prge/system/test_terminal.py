"""Closed, full or unread standard streams don't end the work, and their descriptors aren't reused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.system.terminal import write_text
from tests.terminals import Terminal

# Writes to both streams, opens a file, and writes the file's descriptor to it.
WORK = """
import os, sys
from pathlib import Path
from prge.system.terminal import best_effort, flush, open_standard_files
open_standard_files()
with open(sys.argv[1], "w") as stream:
    for each in (sys.stdout, sys.stderr):
        for _ in range(3):
            with best_effort(each):
                print("how it goes", file=each, flush=True)
    os.write(2, b"the engine says")
    os.write(1, b"the engine says")
    stream.write(f"number {stream.fileno()}, done")
flush(sys.stdout), flush(sys.stderr)
sys.exit(7)
"""


def _close() -> None:
    os.close(1)
    os.close(2)


def _full() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def _unread() -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("refuse", [_close, _full, _unread])
def test_the_work_continues_and_keeps_its_exit_code(tmp_path: Path, refuse: Callable[[], None]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(tmp_path / "file")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=refuse,
        check=False,
    )
    assert done.returncode == 7
    number, _, rest = (tmp_path / "file").read_text().removeprefix("number ").partition(",")
    assert int(number) > 2
    assert rest == " done"


def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    code = "from prge.system.terminal import open_standard_files as f; f(); print('gr\\u00fcn\\udc80')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout == b"gr\\xfcn\\udc80\n"


def test_control_characters_are_escaped_only_on_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        write_text(stream, "a\x1b[2J\tb\r\n\x9b")
    assert terminal.getvalue() == "a\\x1b[2J\tb\\r\n\\x9b"
    assert file.getvalue() == "a\x1b[2J\tb\r\n\x9b"
