"""`prge tune --on android`: runs take place on a phone, reached through the real adb where there is one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prge.formats.documents import parse_yaml
from tests.device_runner.android.daemons import REPOSITORY, SERIAL, Daemon, end_jobs
from tests.device_runner.android.fake_adb import FakePhone
from tests.workshop import write_rows

pytestmark = pytest.mark.timeout(600)

STEPS = 8
# Runs that a tuning of so few steps begins: ten steps for their time, one for each learning rate, the last.
FEWEST_RUNS = 6


@dataclass
class Workstation:
    """What reaches a phone: its serial, prge's folder there, and how commands are started here."""

    serial: str
    folder: Path
    environment: Mapping[str, str]
    prefix: Sequence[str] = field(default_factory=list)

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Begin `prge` with these words, in a session of its own."""
        command = [*self.prefix, sys.executable, "-m", "prge.cli.main", *map(str, words)]
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def prge(self, *words: object, code: int = 0) -> str:
        """Run `prge`, and return what it says."""
        process = self.start(*words)
        told, _ = process.communicate(timeout=500)
        assert process.returncode == code, told
        return told

    def runs(self) -> list[str]:
        """Runs that the phone has."""
        return sorted(path.name for path in (self.folder / "runs").glob("*"))


@pytest.fixture(scope="module", params=["a script", pytest.param("adb", marks=pytest.mark.whole)])
def workstation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workstation]:
    """A script in the place of adb with this machine's Python, and the real adb with a real runtime."""
    if request.param == "adb":
        daemon: Daemon = request.getfixturevalue("daemon")
        folder: Path = request.getfixturevalue("phone")
        yield Workstation(SERIAL, folder, daemon.environment, daemon.network.computer)
    else:
        phone = FakePhone(tmp_path_factory.mktemp("fake") / "phone")
        yield Workstation("fake", phone.folder, {"PRGE_ADB": str(phone.adb), "PYTHONPATH": str(REPOSITORY)})
        end_jobs(phone.folder)


@pytest.fixture(scope="module")
def place(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, `rows.jsonl` and `test.jsonl`."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "bundle").symlink_to(workshop / "bundle")
    rows = [{"prompt": f"{a}{b}", "completion": f" {b}{a}"} for a in "abcdef" for b in "ghijk"]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "test.jsonl", rows[:3])
    return folder


def words_of(place: Path, workstation: Workstation, out: Path) -> list[object]:
    return [
        "tune", "--bundle", place / "bundle", "--data", place / "rows.jsonl", "--test", place / "test.jsonl",
        "--out", out, "--steps", STEPS, "--threads", 1, "--on", f"android:{workstation.serial}",
        "--phone-folder", workstation.folder, "--json", out.with_suffix(".json"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(place: Path, workstation: Workstation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tuning that nothing disturbed, with what it said in `said.txt`."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    told = workstation.prge(*words_of(place, workstation, out))
    (out / "said.txt").write_text(told)
    return out


def test_runs_take_place_on_the_phone_and_the_result_lies_here(workstation: Workstation, tuned: Path) -> None:
    result = json.loads(tuned.with_suffix(".json").read_text())
    assert result["score_after"]["loss"] < result["score_before"]["loss"]
    assert result["scored_rows"] == "test"
    phone = json.loads((tuned / "tune.json").read_text())["found"]["phone"]
    assert phone["serial"] == workstation.serial and phone["flops"] > 1e6
    memory = result["chosen"]["memory"]
    assert memory["value"] == phone["free_bytes"] // 2 and "the phone has free" in memory["why"]
    runs = [*tuned.glob("search/*"), tuned / "run"]
    assert len(runs) >= FEWEST_RUNS
    for run in runs:
        bundle = parse_yaml((run / "config.yaml").read_text())["bundle"]
        assert bundle.startswith(f"{workstation.folder}/bundles/")
        assert not (run / "log.txt").exists()
    assert (tuned / "adapter" / "adapter_model.safetensors").is_file()
    assert (tuned / "report.html").is_file()


def test_the_last_run_alone_stays_on_the_phone(workstation: Workstation, tuned: Path) -> None:
    (name,) = (run for run in workstation.runs() if run.startswith(str(name_of(tuned))))
    assert f"prge android chat {name}" in (tuned / "said.txt").read_text()


def test_the_bundle_is_pushed_once(workstation: Workstation, tuned: Path) -> None:
    """All of it was there before the first run was pulled, and nothing of it was written since."""
    runs = [*tuned.glob("search/*"), tuned / "run"]
    (bundle,) = {parse_yaml((run / "config.yaml").read_text())["bundle"] for run in runs}
    files = [path for path in Path(bundle).rglob("*") if path.is_file()]
    first = tuned / "search" / "pilot" / "run.json"
    assert files and max(path.stat().st_ctime for path in files) < first.stat().st_ctime


def test_test_rows_stay_here(workstation: Workstation, tuned: Path) -> None:
    names = [path.name.partition("-")[2] for path in (workstation.folder / "data").iterdir()]
    assert {"train.jsonl", "dev.jsonl"} <= {*names} and "test.jsonl" not in names


@pytest.mark.whole
def test_a_run_that_went_on_without_this_machine_is_met_again(
    place: Path, workstation: Workstation, tuned: Path, tmp_path: Path
) -> None:
    """Killed while a run is going and while the last one is, it ends in the same bits, with no run twice."""
    out = tmp_path / "out"
    words = words_of(place, workstation, out)
    short = min(path.name for path in tuned.glob("search/*-*"))
    for run in (short, "run"):
        process = workstation.start(*words)
        until = time.monotonic() + 400
        while not (workstation.folder / "runs" / f"{name_of(out)}-{run}" / "journal.jsonl").is_file():
            assert process.poll() is None and time.monotonic() < until, f"{run} never came"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        words = ["tune", "--resume", out]
    workstation.prge(*words)
    for file in ("adapter/adapter_model.safetensors", "run/journal.jsonl"):
        assert (out / file).read_bytes() == (tuned / file).read_bytes(), file


def name_of(out: Path) -> str | None:
    """What the runs of a tuning are called on the phone, once that is known."""
    path = out / "tune.json"
    found = json.loads(path.read_text())["found"] if path.is_file() else {}
    return found.get("name_on_phone")


def test_a_phone_that_lacks_something_is_told_before_anything_is_done(
    place: Path, workstation: Workstation, tmp_path: Path
) -> None:
    words = words_of(place, workstation, tmp_path / "out")
    told = workstation.prge(*words, "--phone-folder", tmp_path / "bare", code=2)
    assert "the phone can't train: runtime" in told and "prge android push runtime" in told
    assert not (tmp_path / "out" / "rows").exists()


def test_another_phone_is_not_taken(place: Path, workstation: Workstation, tmp_path: Path) -> None:
    told = workstation.prge(*words_of(place, workstation, tmp_path / "out"), "--on", "android:other", code=2)
    assert "There is no device other" in told
    assert "--on is 'ios', must be android or android:SERIAL" in workstation.prge(
        *words_of(place, workstation, tmp_path / "out"), "--on", "ios", code=2
    )
