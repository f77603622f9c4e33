"""`prge tune --on android`: runs on a phone, through the real adb if there is one."""

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
# Fewest runs of so short a tuning: one to measure the pace, one for each learning rate, and the final run.
MIN_RUNS = 6


@dataclass
class Workstation:
    """A computer with a phone: its serial, prge's folder on it, and how commands are started."""

    serial: str
    folder: Path
    environment: Mapping[str, str]
    prefix: Sequence[str] = field(default_factory=list)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start `prge` with these arguments, in a session of its own."""
        command = [*self.prefix, sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def prge(self, *arguments: object, code: int = 0) -> str:
        """Run `prge`, and return its output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == code, output
        return output

    def runs(self) -> list[str]:
        """Return the names of the runs on the phone."""
        return sorted(path.name for path in (self.folder / "runs").glob("*"))


@pytest.fixture(scope="module", params=["a script", pytest.param("adb", marks=pytest.mark.whole)])
def workstation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workstation]:
    """Yield a script instead of adb with this machine's Python, and the real adb with a real runtime."""
    if request.param == "adb":
        daemon: Daemon = request.getfixturevalue("daemon")
        folder: Path = request.getfixturevalue("phone")
        yield Workstation(SERIAL, folder, daemon.environment, daemon.network.computer)
    else:
        phone = FakePhone(tmp_path_factory.mktemp("fake") / "phone")
        yield Workstation("fake", phone.folder, {"PRGE_ADB": str(phone.adb), "PYTHONPATH": str(REPOSITORY)})
        end_jobs(phone.folder)


@pytest.fixture(scope="module")
def inputs(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a bundle, `rows.jsonl` and `test.jsonl`."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "bundle").symlink_to(workshop / "bundle")
    rows = [{"prompt": f"{a}{b}", "completion": f" {b}{a}"} for a in "abcdef" for b in "ghijk"]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "test.jsonl", rows[:3])
    return folder


def arguments_of(inputs: Path, workstation: Workstation, out: Path) -> list[object]:
    return [
        "tune", "--bundle", inputs / "bundle", "--data", inputs / "rows.jsonl",
        "--test", inputs / "test.jsonl", "--out", out, "--steps", STEPS, "--threads", 1,
        "--on", f"android:{workstation.serial}", "--phone-folder", workstation.folder,
        "--json", out.with_suffix(".json"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(inputs: Path, workstation: Workstation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted tuning, with its output in `output.txt`."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    output = workstation.prge(*arguments_of(inputs, workstation, out))
    (out / "output.txt").write_text(output)
    return out


def test_runs_are_on_the_phone_and_the_result_is_here(workstation: Workstation, tuned: Path) -> None:
    result = json.loads(tuned.with_suffix(".json").read_text())
    assert result["score_after"]["loss"] < result["score_before"]["loss"]
    assert result["scored_rows"] == "test"
    phone = json.loads((tuned / "tune.json").read_text())["found"]["phone"]
    assert phone["serial"] == workstation.serial and phone["flops"] > 1e6
    memory = result["chosen"]["memory"]
    assert memory["value"] == phone["free_bytes"] // 2 and "the phone has free" in memory["why"]
    runs = [*tuned.glob("search/*"), tuned / "run"]
    assert len(runs) >= MIN_RUNS
    for run in runs:
        bundle = parse_yaml((run / "config.yaml").read_text())["bundle"]
        assert bundle.startswith(f"{workstation.folder}/bundles/")
        assert not (run / "log.txt").exists()
    assert (tuned / "adapter" / "adapter_model.safetensors").is_file()
    assert (tuned / "report.html").is_file()


def test_only_the_final_run_stays_on_the_phone(workstation: Workstation, tuned: Path) -> None:
    (name,) = (run for run in workstation.runs() if run.startswith(str(name_of(tuned))))
    assert f"prge android chat {name}" in (tuned / "output.txt").read_text()


def test_the_bundle_is_pushed_once(workstation: Workstation, tuned: Path) -> None:
    """The whole bundle was on the phone before the first run was pulled, and was not written again."""
    runs = [*tuned.glob("search/*"), tuned / "run"]
    (bundle,) = {parse_yaml((run / "config.yaml").read_text())["bundle"] for run in runs}
    files = [path for path in Path(bundle).rglob("*") if path.is_file()]
    first = tuned / "search" / "pilot" / "run.json"
    assert files and max(path.stat().st_ctime for path in files) < first.stat().st_ctime


def test_test_rows_stay_here(workstation: Workstation, tuned: Path) -> None:
    names = [path.name.partition("-")[2] for path in (workstation.folder / "data").iterdir()]
    assert {"train.jsonl", "dev.jsonl"} <= {*names} and "test.jsonl" not in names


@pytest.mark.whole
def test_a_run_that_continued_without_this_machine_is_continued(
    inputs: Path, workstation: Workstation, tuned: Path, tmp_path: Path
) -> None:
    """A tuning that is killed during two of its runs ends in the same bits, and repeats no run."""
    out = tmp_path / "out"
    arguments = arguments_of(inputs, workstation, out)
    short = min(path.name for path in tuned.glob("search/*-*"))
    for run in (short, "run"):
        process = workstation.start(*arguments)
        until = time.monotonic() + 400
        while not (workstation.folder / "runs" / f"{name_of(out)}-{run}" / "journal.jsonl").is_file():
            assert process.poll() is None and time.monotonic() < until, f"{run} never came"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        arguments = ["tune", "--resume", out]
    workstation.prge(*arguments)
    for file in ("adapter/adapter_model.safetensors", "run/journal.jsonl"):
        assert (out / file).read_bytes() == (tuned / file).read_bytes(), file


def name_of(out: Path) -> str | None:
    """Return the prefix of the names of a tuning's runs on the phone, once it is known."""
    path = out / "tune.json"
    results = json.loads(path.read_text())["found"] if path.is_file() else {}
    return results.get("name_on_phone")


def test_a_phone_that_lacks_something_is_refused_at_once(
    inputs: Path, workstation: Workstation, tmp_path: Path
) -> None:
    arguments = arguments_of(inputs, workstation, tmp_path / "out")
    output = workstation.prge(*arguments, "--phone-folder", tmp_path / "bare", code=2)
    assert "The phone can't train: runtime" in output and "prge android push runtime" in output
    assert not (tmp_path / "out" / "rows").exists()


def test_another_phone_is_not_used(inputs: Path, workstation: Workstation, tmp_path: Path) -> None:
    output = workstation.prge(
        *arguments_of(inputs, workstation, tmp_path / "out"), "--on", "android:other", code=2
    )
    assert "There is no device other" in output
    assert "--on is 'ios', must be android or android:SERIAL" in workstation.prge(
        *arguments_of(inputs, workstation, tmp_path / "out"), "--on", "ios", code=2
    )
