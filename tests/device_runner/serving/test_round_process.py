"""Tests of the process of a round: paused and continued, killed at any time, and never orphaned."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device_runner.serving.feedback_index import FeedbackIndex
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.rounds import Round, round_outcome
from device_runner.session.plan import resolve_settings
from device_runner.session.settings import RunSettings
from prge.data.readers.feedback import AnswerRecord, append_feedback, remove_rows
from prge.errors import RunError
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.formats.run_folder import is_held, run_lock
from prge.formats.signatures import BACKWARD
from tests.device_runner.numpy_device import Device
from tests.refusals import raises
from tests.verbs import REPOSITORY

# A server that starts the process of a round, stops it, and waits.
SERVER = """
import pickle, sys, time
from pathlib import Path

from device_runner.serving.round_process import RoundProcess
from prge.formats.run_folder import run_lock

RoundProcess.words = "-c", sys.argv[3]
with run_lock(Path(sys.argv[2])) as lock:
    process = RoundProcess(pickle.loads(Path(sys.argv[1]).read_bytes()), lock)
    process.pause(True)
    print("stopped", flush=True)
    time.sleep(60)
"""
CHILD = """
import sys
from device_runner.serving import round_process, rounds
from tests.device_runner.numpy_device import Device
rounds.open_engine = Device(has_backward=True).open_engine
sys.platform = {platform!r}
round_process.main()
"""


class NumpyRound(RoundProcess):
    words = (str(Path(__file__).with_name("round_child.py")),)


@pytest.fixture
def round(tmp_path: Path) -> Round:
    """Return a round of many steps."""
    Device(has_backward=True).write_bundle(tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    feedback = tmp_path / "learn/feedback.jsonl"
    feedback.parent.mkdir()
    answers = [
        AnswerRecord(str(number), "m", "", {"prompt": f"a {number}"}, " No", {}) for number in range(4)
    ]
    append_feedback(feedback, [each.to_feedback(correction=" Yes") for each in answers])
    index = FeedbackIndex(feedback)
    while index.read_on():
        pass
    entries = index.entries(index.keys)
    index.close()
    folder = feedback.parent / "rounds/0001"
    settings = RunSettings(bundle.folder, feedback, folder, steps=60, batch_size=2, save_steps=10)
    start = Adapter.zeros(bundle.chain.modules)
    rows = entries[:3], entries[3:], entries[:0]
    plan = resolve_settings(settings, bundle).with_date()
    return Round(1, plan, BACKWARD, start, start, feedback, *rows, 0.5, 0.02, False, None, None)


def outcome(process: RoundProcess) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (result := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def until(is_so: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def journal(round: Round) -> bytes:
    path = round.settings.out / "journal.jsonl"
    return path.read_bytes() if path.is_file() else b""


def bits(round: Round) -> bytes:
    return (round.settings.out / "final/adapter_model.safetensors").read_bytes()


def state(process: int) -> str:
    """Return the state letter of a process, such as T for stopped; empty if there is no process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_child_runs_a_round_like_this_process(round: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    process = NumpyRound(round)
    result = outcome(process)
    assert result["status"] in ("served", "refused") and result["steps"] == 60
    assert process.peak_bytes > 10e6 and process.cpu_seconds >= 0
    process.end()
    expected = bits(round)
    here = replace(round, settings=replace(round.settings, out=round.settings.out.with_name("here")))
    monkeypatch.setattr("device_runner.serving.rounds.open_engine", Device(has_backward=True).open_engine)
    assert round_outcome(here, print) == result and bits(here) == expected


def test_the_process_of_a_round_is_paused_and_continued(round: Round) -> None:
    process = NumpyRound(round)
    until(lambda: journal(round).count(b"step") > 5)
    for _ in range(2):
        process.pause(True)
    time.sleep(0.05)
    before = journal(round)
    time.sleep(0.3)
    assert journal(round) == before and process.poll() is None
    process.pause(False)
    assert outcome(process)["steps"] == 60
    process.end()


@pytest.mark.whole
def test_a_round_killed_repeatedly_ends_with_the_same_bits(round: Round) -> None:
    process = NumpyRound(round)
    expected = outcome(process), bits(round)
    other = replace(round, settings=replace(round.settings, out=round.settings.out.with_name("other")))
    for steps in (1, 20, 40):
        process = NumpyRound(other)
        until(lambda: journal(other).count(b"step") >= steps)  # noqa: B023
        process.pause(steps == 20)  # also one that is stopped
        process.end()
    process = NumpyRound(other)
    assert (outcome(process), bits(other)) == expected


def test_a_process_that_was_killed_is_reported(round: Round) -> None:
    process = NumpyRound(round)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [number] = [each for each in children if b"round_child" in Path(f"/proc/{each}/cmdline").read_bytes()]
    os.kill(int(number), signal.SIGKILL)
    with raises(RunError, "round-process-ended", containing="SIGKILL"):
        outcome(process)
    process.end()


def test_missing_rows_and_bundles_are_reported(round: Round) -> None:
    process = NumpyRound(
        replace(round, settings=replace(round.settings, bundle=round.settings.out / "nothing"))
    )
    result = outcome(process)
    assert result["status"] == "problem" and "nothing" in result["problem"]
    remove_rows(round.feedback, lambda number, fields, line: number == 1)
    assert outcome(NumpyRound(round)) == {"status": "changed"}


@contextmanager
def server(round: Round, folder: Path, platform: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a server, and the id of its stopped child."""
    path = folder / "round"
    path.write_bytes(pickle.dumps(round))
    command = [sys.executable, "-c", SERVER, path, round.feedback.parent, CHILD.format(platform=platform)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    # A test's parent that adopts orphans must be of another session, as the system's init is.
    options: Any = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*map(str, command)], env=environment, **options) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "stopped\n"
            [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield process, int(child)
        finally:
            process.kill()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_paused_process_ends_with_its_server(round: Round, tmp_path: Path, platform: str) -> None:
    """This holds also if the system does not kill the child of a process that ended."""
    with server(round, tmp_path, platform) as (process, child):
        until(lambda: state(child) == "T")
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: state(child) in ("", "Z"), 5)


def test_no_server_starts_before_another_ones_process_has_ended(round: Round, tmp_path: Path) -> None:
    folder = round.feedback.parent
    with server(round, tmp_path, "linux") as (process, child):
        os.kill(child, signal.SIGSTOP)
        with raises(RunError, "run-in-use", containing=str(process.pid)), run_lock(folder):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with run_lock(folder):
            assert state(child) in ("", "Z")
    assert not is_held(folder)
