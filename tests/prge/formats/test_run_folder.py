"""Records of a run survive a kill, and its folder has one owner."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.errors import RunError
from prge.formats.run_folder import (
    FINAL,
    LOCK,
    LOG,
    METRICS,
    SUMMARY,
    RunLog,
    as_run_error,
    check_new_run,
    environment,
    is_held,
    read_metrics,
    run_lock,
    write_summary,
)
from tests.refusals import raises


def step(n: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": n, "loss": 1 / (n + 1), **more}


def test_every_metric_is_written_at_once_as_a_line_of_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.metric(step(0))
    log.metric({"event": "evaluation", "step": 0, "loss": np.float32(0.5), "forward_passes": np.int64(8)})
    # The file is read before the log is closed.
    lines = (tmp_path / "run" / METRICS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"event": "step", "step": 0, "loss": 1.0},
        {"event": "evaluation", "step": 0, "loss": 0.5, "forward_passes": 8},
    ]
    log.close()


def test_infinite_numbers_and_nan_become_null(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.metric(
            {"event": "step", "step": 0, "loss": float("nan"), "projected_gradients": np.array([np.inf, 1.0])}
        )
    assert read_metrics(tmp_path) == [
        {"event": "step", "step": 0, "loss": None, "projected_gradients": [None, 1.0]}
    ]


def test_a_resume_drops_an_incomplete_line_and_records_after_the_step(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for n in range(5):
            log.metric(step(n))
    with (tmp_path / METRICS).open("a", encoding="utf-8") as stream:
        stream.write('{"event": "step", "st')
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    with RunLog(tmp_path, keep_through=2) as log:
        assert log.last("step") == step(2)
        assert log.last("evaluation") is None
        log.metric(step(3, again=True))
    assert read_metrics(tmp_path) == [step(0), step(1), step(2), step(3, again=True)]


@pytest.mark.parametrize("torn", ["{", '{"event": "step", "step": 1}', "3\n", "\n"])
def test_an_incomplete_last_line_is_ignored(tmp_path: Path, torn: str) -> None:
    (tmp_path / METRICS).write_text(json.dumps(step(0)) + "\n" + torn, encoding="utf-8")
    assert read_metrics(tmp_path) == [step(0)]
    with RunLog(tmp_path) as log:
        log.metric(step(1))
    assert read_metrics(tmp_path) == [step(0), step(1)]


ODD = [
    "{ not json",
    "{}",
    "[" * 100_000,
    '{"event": "step", "step": "1"}',
    '{"event": "step", "step": true}',
    '{"event": "step", "step": -1}',
    '{"event": ["step"], "step": 1}',
    '{"event": "step", "step": 1, "loss": "low"}',
    '{"event": "step", "step": 1, "forward_passes": [8]}',
    '{"event": "step", "step": 1, "seconds": NaN}',
    '{"event": "step", "step": 1, "forward_passes": ' + "9" * 4000 + "}",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda line: line[:40])
def test_an_invalid_record_is_an_error_for_charts_but_not_for_a_resume(tmp_path: Path, odd: str) -> None:
    first, last = json.dumps(step(0)), json.dumps(step(1))
    (tmp_path / METRICS).write_text(f"{first}\n{odd}\n{last}\n", encoding="utf-8")
    with raises(RunError, "metrics-damaged", containing="line 2"):
        read_metrics(tmp_path)
    with RunLog(tmp_path, keep_through=1) as log:
        log.metric(step(2))
    assert read_metrics(tmp_path) == [step(0), step(1), step(2)]
    assert "left out 1 lines that are not records" in (tmp_path / LOG).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [METRICS, LOG, LOCK])
@pytest.mark.parametrize("file_type", ["link", "pipe", "device"])
@pytest.mark.timeout(10)
def test_links_pipes_and_devices_are_refused_without_blocking(
    tmp_path: Path, name: str, file_type: str
) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_bytes(b"kept")
    folder.mkdir()
    if file_type == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target if file_type == "link" else "/dev/full")
    with raises(RunError, "write-failed", containing=name):
        if name == LOCK:
            with run_lock(folder):
                raise AssertionError("the lock is held")
        RunLog(folder)
    assert target.read_bytes() == b"kept"
    if name == METRICS:
        with raises(RunError, "run-unreadable"):
            read_metrics(folder)


def test_a_run_folder_is_private(tmp_path: Path) -> None:
    """A run's log quotes rows, and its journal has values computed from rows."""
    RunLog(tmp_path / "run").close()
    with run_lock(tmp_path / "other"):
        pass
    modes = {(tmp_path / name).stat().st_mode & 0o777 for name in ("run", "other")}
    assert modes == {0o700}


def test_log_lines_begin_with_the_time(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.text("first")
    with RunLog(tmp_path) as log:
        log.text("second")
    lines = (tmp_path / LOG).read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["first", "second"]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 ", lines[0])


def test_a_full_disk_is_reported_with_the_folder_and_keeps_complete_lines(tmp_path: Path) -> None:
    """A limit on the file size simulates a full disk: it accepts a part of a line."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from prge.formats.run_folder import RunLog\n"
        "from prge.errors import RunError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "log = RunLog(Path(sys.argv[1]))\n"
        "try:\n"
        "    [log.metric({'event': 'step', 'step': n}) for n in range(9)]\n"
        "except RunError as error:\n"
        "    print(error); log.close()"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True, timeout=60
    )
    assert str(tmp_path) in child.stdout
    assert "Free some storage" in child.stdout
    assert (tmp_path / METRICS).stat().st_size == 100 > 3 * len('{"event": "step", "step": 0}\n')
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (errno.ENOSPC, "storage-full"),
        (errno.EACCES, "write-refused"),
        (errno.EROFS, "write-refused"),
    ],
)
def test_failed_writes_are_reported_with_a_remedy(code: int, problem: str) -> None:
    with raises(RunError, problem, containing="runs/a/log.txt"), as_run_error(Path("runs/a")):
        raise OSError(code, os.strerror(code), "runs/a/log.txt")
    with raises(RunError, problem, containing=os.strerror(code)) as caught, as_run_error(Path("runs/a")):
        raise OSError(code, os.strerror(code))
    assert "runs/a" in caught.value.what and caught.value.remedy


def test_a_folder_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with raises(RunError, "write-failed"):
        RunLog(tmp_path / "run")


def test_summary_has_three_blocks_and_is_replaced_whole(tmp_path: Path) -> None:
    for status in ("running", "finished"):
        write_summary(tmp_path, {"status": status, "out": tmp_path}, {"loss": np.float64("nan"), "steps": 3})
    content = json.loads((tmp_path / SUMMARY).read_text(encoding="utf-8"))
    assert list(content) == ["run", "train", "meta"]
    assert content["run"] == {"status": "finished", "out": str(tmp_path)}
    assert content["train"] == {"loss": None, "steps": 3}
    assert content["meta"].keys() == environment().keys()
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]


def test_failed_summary_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, {"status": "running"}, {}, {})
    before = (tmp_path / SUMMARY).read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with raises(RunError, "storage-full"):
        write_summary(tmp_path, {"status": "finished"}, {}, {})
    assert (tmp_path / SUMMARY).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]


def test_environment_has_versions_without_importing() -> None:
    code = (
        "import sys; from prge.formats.run_folder import environment; found = environment(); "
        "assert not {'torch', 'numpy', 'executorch'} & set(sys.modules); print(found['versions']['numpy'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout.strip() == np.__version__
    result = environment()
    assert result["python"] == sys.version.split()[0]
    assert result["cpu"]["count"] == os.cpu_count()
    assert result["cpu"]["model"]


@contextmanager
def owner(folder: Path, first: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """Start another process that locks a run folder."""
    code = (
        "import os, sys, time; from pathlib import Path; from prge.formats.run_folder import run_lock\n"
        f"with run_lock(Path(sys.argv[1])):\n    {first}\n    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder


def test_only_one_process_can_lock_a_run_folder(tmp_path: Path) -> None:
    with owner(tmp_path) as holder:
        with (
            raises(RunError, "run-in-use", containing=str(holder.pid)) as caught,
            run_lock(tmp_path),
        ):
            raise AssertionError("two owners")
        assert caught.value.remedy
        holder.kill()
        holder.wait()
    # The killed owner's lock is released, and the file names the new owner.
    with run_lock(tmp_path):
        assert (tmp_path / LOCK).read_text(encoding="ascii") == f"{os.getpid()}\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_locking_waits_for_a_child_of_a_killed_owner(tmp_path: Path) -> None:
    with owner(tmp_path, "if os.fork() == 0: time.sleep(0.5); os._exit(0)") as holder:
        holder.kill()
        holder.wait()
        assert is_held(tmp_path)
        with run_lock(tmp_path):
            assert is_held(tmp_path)


def test_a_file_that_is_not_a_lock_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("yarn lockfile v1")
    with raises(RunError, "lock-foreign"), run_lock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == "yarn lockfile v1"
    for content in ("", "123\n", "99999999\n"):
        (tmp_path / LOCK).write_text(content)
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_new_run_needs_a_folder_without_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    (tmp_path / LOCK).touch()
    check_new_run(tmp_path)
    check_new_run(tmp_path / "none")
    (tmp_path / FINAL).symlink_to("nowhere")
    with raises(RunError, "folder-occupied", containing=FINAL):
        check_new_run(tmp_path)


def test_a_failed_block_leaves_no_lock_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a/b/run"
    for error in (RunError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), run_lock(folder):
            assert (folder / LOCK).is_file()
            raise error
        assert [*tmp_path.iterdir()] == []
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError), run_lock(folder):
        raise RunError("no")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_lock_file_stays_if_it_existed_or_the_block_created_files(tmp_path: Path) -> None:
    with pytest.raises(RunError), run_lock(tmp_path / "run"):
        (tmp_path / "run/journal.jsonl").write_text("")
        raise RunError("no")
    assert (tmp_path / "run" / LOCK).is_file()
    (tmp_path / "run/journal.jsonl").unlink()
    with pytest.raises(RunError), run_lock(tmp_path / "run"):
        raise RunError("no")
    assert (tmp_path / "run" / LOCK).is_file()
    with run_lock(tmp_path / "other"):
        pass
    assert (tmp_path / "other" / LOCK).is_file()


def test_while_locks_are_removed_at_most_one_process_holds_a_folder(tmp_path: Path) -> None:
    """Each process writes a mark while it holds the lock; two holders would see each other's mark."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from prge.errors import RunError; from prge.formats.run_folder import run_lock\n"
        "run, mark, held = Path(sys.argv[1]), Path(sys.argv[2]), 0\n"
        "while held < 150:\n"
        "    try:\n"
        "        with run_lock(run):\n"
        "            os.close(os.open(mark, os.O_CREAT | os.O_EXCL)); held += 1; mark.unlink()\n"
        "            raise RunError('refused')\n"
        "    except RunError as error:\n"
        "        assert str(error) == 'refused' or 'is in use' in str(error), error\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a/run"), str(tmp_path / "mark")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, message = process.communicate(timeout=120)
        assert process.returncode == 0, message
    assert not (tmp_path / "mark").exists()
