"""Tests of a server whose feedback file is large, locked by another process, or rewritten by one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prge.data.readers.feedback import AnswerRecord, read_feedback
from tests.device_runner.numpy_device import Device
from tests.device_runner.serving.processes import server_process
from tests.verbs import REPOSITORY

ROWS = 150_000
# Limits on the time of a response and of shutting down; a busy machine gets more for the slowest of many.
HEALTH, SLOWEST, END = 0.1, 0.5, 2.0


@dataclass
class Child:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    seconds: list[float] = field(default_factory=list)

    def ask(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def health(self) -> dict[str, Any]:
        begin = time.monotonic()
        status, result = self.ask("/health")
        self.seconds.append(time.monotonic() - begin)
        assert status == 200
        return result

    def check_health_until(self, is_so: Callable[[], bool]) -> None:
        """Send requests repeatedly; every response is fast after the client's first request."""
        self.health()
        self.seconds.clear()
        deadline = time.monotonic() + 120
        while not is_so():
            self.health()
            time.sleep(0.01)
            assert time.monotonic() < deadline
        assert statistics.median(self.seconds) < HEALTH and max(self.seconds) < SLOWEST, sorted(self.seconds)[
            -9:
        ]

    def answer(self) -> str:
        status, result = self.ask(
            "/v1/completions", {"model": "base", "prompt": "a dog", "max_tokens": 2, "seed": 1}
        )
        assert status == 200
        return str(result["id"])

    def end(self) -> float:
        """Return the seconds that shutting down takes."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        return time.monotonic() - begin


@contextmanager
def serving(folder: Path, every: int) -> Iterator[Child]:
    bundle = folder / "bundle"
    if not bundle.exists():
        Device(has_backward=True).write_bundle(bundle)
    script = Path(__file__).with_name("learning_child.py")
    with server_process(script, bundle, folder / "learn", every) as (process, url):
        yield Child(process, url)


def write_many(path: Path, count: int = ROWS) -> None:
    """Write a large amount of feedback."""
    path.parent.mkdir(exist_ok=True)
    row = AnswerRecord(
        "ID", "m", "0" * 16, {"prompt": "word " * 20 + "ID"}, " answer", {"seed": 1}
    ).to_feedback("good")
    line = json.dumps(row)
    path.write_text("".join(line.replace("ID", str(number)) + "\n" for number in range(count)))


def test_a_lock_that_another_process_holds(tmp_path: Path) -> None:
    with serving(tmp_path, 1000) as child, ThreadPoolExecutor(8) as pool:
        first, second = child.answer(), child.answer()
        path = tmp_path / "learn/feedback.jsonl"
        path.touch()
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)

            def judge(id: str) -> Future[tuple[int, dict[str, Any]]]:
                return pool.submit(child.ask, "/v1/feedback", {"id": id, "rating": "good"})

            waiting = judge(first)
            child.check_health_until(waiting.done)
            status, result = waiting.result()
            assert status == 503 and "another process holds its lock" in result["error"]["message"]
            assert child.health() == {"status": "degraded", "feedback": "failing", "learning": "ok"}
            fcntl.flock(stream, fcntl.LOCK_UN)
            assert judge(first).result()[0] == 200
            assert child.health()["status"] == "ok" and len(read_feedback(path)) == 1
            fcntl.flock(stream, fcntl.LOCK_EX)
            waiting = judge(second)
            time.sleep(0.3)
            assert not waiting.done() and child.end() < END


def test_the_event_loop_opens_no_file(tmp_path: Path) -> None:
    with serving(tmp_path, 3) as child:
        for _ in range(3):
            body = {"id": child.answer(), "correction": " Yes"}
            assert child.ask("/v1/feedback", body)[0] == 200
        child.check_health_until(
            lambda: child.ask("/v1/adapters")[1]["data"][-1]["status"] in ("served", "refused")
        )
        rollbacks = [child.ask("/v1/adapters/back", body) for body in ({}, {"version": 7}, {"version": 1})]
        assert [status for status, _ in rollbacks] in ([400, 409, 200], [400, 409, 409])
        child.end()
        assert child.process.stdout is not None
        output = child.process.stdout.read()
        assert "adapter 1 from 3 rows" in output and "event loop" not in output


@pytest.mark.whole
def test_a_file_of_150_000_rows_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "learn/feedback.jsonl"
    write_many(path)
    with serving(tmp_path, 10**6) as child:
        begin = time.monotonic()
        child.check_health_until(lambda: time.monotonic() - begin > 5)
        # The file is still being read, and more feedback is accepted.
        id = child.answer()
        assert child.ask("/v1/feedback", {"id": id, "rating": "good"})[0] == 200
        assert child.ask("/v1/adapters")[0] == 200
        assert child.end() < END


@pytest.mark.whole
def test_rows_are_deleted_while_a_server_runs(tmp_path: Path) -> None:
    path = tmp_path / "learn/feedback.jsonl"
    write_many(path)
    command = [sys.executable, "-m", "prge.cli.main", "rows", "forget", path, "--match", " 149999"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with serving(tmp_path, 10**6) as child, ThreadPoolExecutor(1) as pool:
        id = child.answer()
        forgetting = pool.submit(subprocess.run, [*map(str, command)], env=environment, check=True)
        child.check_health_until(forgetting.done)
        forgetting.result()
        assert child.ask("/v1/feedback", {"id": id, "rating": "good"})[0] == 200
        kept = path.read_text().splitlines()
        assert len(kept) == ROWS and " 149999" not in "".join(kept) and id in kept[-1]
        assert child.end() < END
