"""Tests of how a server finds, reads, streams and stops runs: within its folder and within bounds."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from device_runner.serving.page import runs, stopping, tail
from device_runner.serving.page.runs import Runs
from device_runner.serving.page.static import translator
from device_runner.serving.page.stopping import process_state
from device_runner.serving.page.tail import LineReader, RunFollower, ThinnedRecords
from device_runner.serving.protocol import RequestError
from prge.errors import RunError
from prge.formats.run_folder import run_lock
from tests.device_runner.reporting.run_folders import learn_from_reward, write_run
from tests.refusals import raises


def list_runs(root: Path) -> list[dict[str, Any]]:
    return asyncio.run(Runs(root).list_runs())["data"]


def make_follower(folder: Path) -> RunFollower:
    return RunFollower(folder, lambda: None)


def snapshot(run: RunFollower) -> dict[str, Any]:
    return run.snapshot("en", str)


def status_of_stop(root: Path, name: str) -> int:
    with pytest.raises(RequestError) as caught:
        asyncio.run(Runs(root).stop(name))
    return caught.value.status


def test_runs_are_those_below_a_folder_or_the_folder_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "first")
    write_run(tmp_path / "tuned" / "search" / "0.01-4", status="running")
    (tmp_path / "a" / "first" / "checkpoints" / "journal.jsonl").parent.mkdir()
    result = {each["run"]: each["status"] for each in list_runs(tmp_path)}
    assert result == {"a/first": "completed", "tuned/search/0.01-4": "killed"}
    assert [(each["run"], each["name"]) for each in list_runs(tmp_path / "a" / "first")] == [(".", "first")]
    with raises(RunError, "folder-missing", containing=str(tmp_path / "none")):
        Runs(tmp_path / "none")


@pytest.mark.parametrize(
    "name",
    ["..", "../secret", "a/../../secret", "/etc", "{root}/../secret", "linked", "elsewhere/secret", "a\0b",
     "x" * 5000, "none", ""],
)  # fmt: skip
def test_folders_elsewhere_are_not_runs(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    write_run(tmp_path / "secret")
    write_run(root / "a")
    (root / "linked").symlink_to(tmp_path / "secret")
    (root / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(RequestError) as caught:
        Runs(root).folder_of(name.replace("{root}", str(root)))
    assert caught.value.status == 404
    assert [each["run"] for each in list_runs(root)] == ["a"]


def test_a_name_that_is_not_unicode_hides_only_itself(tmp_path: Path) -> None:
    write_run(tmp_path / os.fsdecode(b"\xff"))
    write_run(tmp_path / "\u202ea\n")
    assert [each["run"] for each in list_runs(tmp_path)] == ["\u202ea\n"]
    (only,) = list_runs(tmp_path / os.fsdecode(b"\xff"))
    assert json.dumps(only, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl", "samples.jsonl", "run.lock"])
def test_a_run_with_a_link_in_it_is_not_shown(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "runs" / "a")
    (tmp_path / "secret").write_text("{}")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    assert list_runs(tmp_path / "runs") == []
    with pytest.raises(RequestError):
        Runs(tmp_path / "runs").folder_of("a")


def test_a_folder_of_thousands_is_searched_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_RUNS", 3)
    for number in range(5):
        write_run(tmp_path / str(number))
    result = asyncio.run(Runs(tmp_path).list_runs())
    assert len(result["data"]) == 3 and result["cut"]
    monkeypatch.setattr(runs, "MAX_ENTRIES", 2)
    assert asyncio.run(Runs(tmp_path).list_runs())["cut"]


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = LineReader(path)
    assert lines.new() == (False, [])
    path.write_bytes(b"a\nb\nc")
    assert lines.new() == (True, [b"a\n", b"b\n"])
    with path.open("ab") as stream:
        stream.write(b"d\ne\n")
    assert lines.new() == (False, [b"cd\n", b"e\n"])
    assert lines.new() == (False, [])
    path.write_bytes(b"x\n")
    assert lines.new() == (True, [b"x\n"])
    other = tmp_path / "other"
    other.write_bytes(b"y\nz\n")
    other.replace(path)
    assert lines.new() == (True, [b"y\n", b"z\n"])


def test_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("pipe", "link"):
        assert LineReader(tmp_path / name).new() == (False, [])


def test_many_records_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MAX_RECORDS", 8)
    thinned = ThinnedRecords()
    for step in range(1, 101):
        thinned.add({"step": step})
        steps = [each["step"] for each in thinned.records]
        assert steps[0] == 1 and steps[-1] == step and len(steps) <= 9
    gaps = {later - earlier for earlier, later in pairwise(steps[:-1])}
    assert len(gaps) == 1


@pytest.mark.whole
def test_a_hundred_megabytes_of_metrics_are_read_in_chunks(tmp_path: Path) -> None:
    """A large file is read in chunks, and its records are thinned."""
    folder = write_run(tmp_path / "run")
    line = (
        '{"event": "step", "step": %d, "loss": 2.5, "forward_passes": 4, "seconds": 1.5, "padding": "'
        + "x" * 180
        + '"}\n'
    )
    with (folder / "metrics.jsonl").open("w") as stream:
        for start in range(0, 400_000, 1000):
            stream.write("".join(line % step for step in range(start, start + 1000)))
    assert (folder / "metrics.jsonl").stat().st_size > 100e6
    run, reads, longest = make_follower(folder), 0, 0.0
    while True:
        started = time.monotonic()
        result, reads = snapshot(run), reads + 1
        longest = max(longest, time.monotonic() - started)
        if not run.has_more:
            break
    assert result["steps"] == 399_999 and 20 < reads < 40 and longest < 3
    assert sum(each["event"] == "step" for each in run.read().metrics) <= tail.MAX_RECORDS + 1
    assert sum(len(each["svg"]) for each in result["pictures"]) < 200_000


def test_an_endless_line_is_not_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MAX_BYTES", 1000)
    folder = write_run(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write("x" * 5000 + '\n{"event": "step", "step": 7, "loss": 1.0}\n')
    run = make_follower(folder)
    for _ in range(10):
        result = snapshot(run)
    assert result["steps"] == 7
    assert result["problems"] == ["metrics.jsonl: 6 malformed lines"]
    (german,) = run.snapshot("de", translator("de"))["problems"]
    assert german == "metrics.jsonl: 6 fehlerhafte Zeilen"


@pytest.mark.parametrize(
    "config",
    ["steps: .inf", "steps: -5", f"steps: {10**4000}", "steps: [1]", "&a [*a]", "learning_rate: .nan"],
)
def test_unusable_settings_and_figures_of_a_run_are_left_out(tmp_path: Path, config: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text(config)
    summary = {"run": {"status": ["x"]}, "train": {"memory": {"peak_bytes": 1e300}, "best": {"loss": []}}}
    (folder / "run.json").write_text(json.dumps(summary))
    result = snapshot(make_follower(folder))
    json.dumps(result, allow_nan=False)
    assert result["planned"] is None and result["left"] is None and result["memory"] is None


def test_a_run_that_learns_from_a_reward_shows_its_reward(tmp_path: Path) -> None:
    follower = make_follower(learn_from_reward(write_run(tmp_path / "run")))
    result = snapshot(follower)
    assert (result["reward"], result["score"], result["value"]) == (0.8, "reward", 0.8)
    pictures = follower.snapshot("de", translator("de"))["pictures"]
    assert [picture["caption"] for picture in pictures] == [
        "Mittlere Belohnung. Die blasse Linie zeigt die Belohnung jedes Schritts.",
        "Anteil der Antworten, die ihre Aufgabe lösen.",
        "Mittlere Länge der Antworten.",
        "Abweichung vom Adapter am Anfang.",
    ]
    assert "Tokens je Antwort" in pictures[2]["svg"]


def test_samples_are_the_first_answer_and_the_newest(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "samples.jsonl").open("a") as stream:
        for step in range(30, 100, 10):
            stream.write(json.dumps({"step": step, "prompt": "Once", "text": "x" * 5000}) + "\n")
        for number in range(50):
            stream.write(json.dumps({"step": 0, "prompt": [number], "text": ""}) + "\n")
    samples = snapshot(make_follower(folder))["samples"]
    assert [each["step"] for each in samples[0]["answers"]] == [0, 70, 80, 90]
    assert len(samples) == tail.MAX_PROMPTS and len(samples[0]["answers"][1]["text"]) == 2000


LOCK_SCRIPT = """
import os, signal, sys
from pathlib import Path
from prge.formats.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"signalled\\n"))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lock_holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that locks the run folder tmp_path/run."""
    write_run(tmp_path / "run", status="running")
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", LOCK_SCRIPT, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_gets_one_signal_to_stop(tmp_path: Path, lock_holder: subprocess.Popen[str]) -> None:
    assert process_state(tmp_path / "run") == (True, lock_holder.pid)
    result = snapshot(make_follower(tmp_path / "run"))
    assert result["status"] == "running" and result["can_stop"] and result["memory"] > 5e6
    served = Runs(tmp_path)
    asyncio.run(served.stop("run"))
    assert lock_holder.stdout is not None and lock_holder.stdout.readline() == "signalled\n"
    with pytest.raises(RequestError) as caught:
        asyncio.run(served.stop("run"))
    assert (caught.value.status, caught.value.code) == (409, "run_not_stopped")
    lock_holder.kill()
    lock_holder.wait()
    assert process_state(tmp_path / "run") == (False, None)
    assert status_of_stop(tmp_path, "run") == 409


def test_a_lock_that_names_another_process_harms_nobody(
    tmp_path: Path, lock_holder: subprocess.Popen[str]
) -> None:
    other = write_run(tmp_path / "other", status="running")
    for content in (f"{lock_holder.pid}\n", "1\n", "-1\n", "0\n", "x", f"{os.getpid()}\n", "9" * 20):
        (other / "run.lock").write_text(content)
        assert process_state(other) == (False, None), content
        assert status_of_stop(tmp_path, "other") == 409


def test_a_run_that_takes_no_step_yet_or_is_this_process_is_not_stopped(
    tmp_path: Path, lock_holder: subprocess.Popen[str]
) -> None:
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**summary, "run": {"status": "stopped early"}}))
    assert status_of_stop(tmp_path, "run") == 409
    own = write_run(tmp_path / "own", status="running")
    with run_lock(own):
        assert process_state(own) == (True, None)
        assert status_of_stop(tmp_path, "own") == 409


def test_without_proc_a_run_is_listed_but_cannot_be_stopped(
    tmp_path: Path, lock_holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "PROCESSES", tmp_path / "none")
    assert process_state(tmp_path / "run") == (True, None)
    assert status_of_stop(tmp_path, "run") == 409


def test_streams_are_bounded_and_share_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    opened_runs: list[weakref.ref[RunFollower]] = []

    def opening(folder: Path, temperature: Callable[[], float | None]) -> RunFollower:
        run = RunFollower(folder, temperature)
        opened_runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(runs, "RunFollower", opening)

    async def read() -> None:
        served = Runs(tmp_path)
        opened = [await served.follow("run", "en") for _ in range(runs.MAX_STREAMS)]
        with pytest.raises(RequestError) as caught:
            await served.follow("run", "de")
        assert caught.value.status == 429
        first = [await anext(events) for events, _ in opened[:3]]
        assert len(set(first)) == 1 and json.loads(first[0].removeprefix("data: "))["steps"] == 40
        opened.pop()[1]()
        opened.append(await served.follow("run", "en"))
        served.close()
        while opened:
            events, leave = opened.pop()
            assert [each async for each in events] == []
            leave()
        del events, leave
        gc.collect()
        assert [each() for each in opened_runs] == [None]

    asyncio.run(read())


@pytest.mark.parametrize("became", ["nothing", "a link", "a link to itself", "a file"])
def test_the_stream_of_a_deleted_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, became: str
) -> None:
    monkeypatch.setattr(runs, "SECONDS", 0.01)
    secret, folder = write_run(tmp_path / "secret"), write_run(tmp_path / "runs" / "run")

    async def read() -> None:
        events, _ = await Runs(tmp_path / "runs").follow("run", "en")
        assert (await anext(events)).startswith("data: {")
        shutil.rmtree(folder)
        if became == "a file":
            folder.touch()
        elif became != "nothing":
            folder.symlink_to(secret if became == "a link" else folder)
        assert [each async for each in events] == []

    asyncio.run(read())
