"""`prge tune` from rows to an adapter: killed in any stage, and with few, equal or long rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prge.cli.settings import parse_settings
from server_export.tune import decisions
from server_export.tune.settings import TuneSettings
from server_export.tune.stages import tune
from tests.end_to_end.conftest import tune_arguments
from tests.verbs import REPOSITORY, prge
from tests.workshop import write_rows

pytestmark = pytest.mark.timeout(300)

# Files that appear in the stages after rows and plan, and the signal that ends the process then.
INSTANTS = {
    "before.json": signal.SIGKILL,
    "search/0.001-8/journal.jsonl": signal.SIGTERM,
    "search/0.01-8/metrics.jsonl": signal.SIGKILL,
    "search/0.03-8/journal.jsonl": signal.SIGINT,
    "run/checkpoints/step-*": signal.SIGTERM,
}


def end_after(pattern: str, folder: Path, arguments: list[object], signal_number: signal.Signals) -> str:
    """Start a tuning and end only its own process when a file exists; return its output."""
    command = [sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Background processes of a shell ignore Ctrl-C, and tests would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        until = time.monotonic() + 120
        while not any(folder.glob(pattern)):
            assert process.poll() is None and time.monotonic() < until, f"{pattern} never came"
            time.sleep(0.01)
        process.send_signal(signal_number)
        return process.communicate(timeout=60)[0]


def result_of(out: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((out.parent / "tune-result.json").read_text())
    return actual


def test_a_tuning_learns_and_reports_its_decisions(tuned: Path) -> None:
    result = result_of(tuned)
    assert result["score_after"]["loss"] < result["score_before"]["loss"]
    assert result["scored_rows"] == "dev"
    chosen = result["chosen"]
    assert {"estimator", "batch_size", "steps", "learning_rate"} <= chosen.keys()
    assert chosen["estimator"]["value"] == "exact" and chosen["steps"]["why"] == "given by the user"
    assert all(decision["why"] for decision in chosen.values())
    assert [each["right"] for each in result["samples"]["after"]] == ["no", "no", "yes"]
    assert result["next"].startswith(f"prge eval {tuned} --task ")
    assert {each["text"] for part in result["samples"].values() for each in part} <= {"no", "yes"}
    assert result["peak_mb"] > 10 and result["seconds"] > 0
    assert (tuned / "adapter" / "adapter_model.safetensors").is_file()
    report = (tuned / "report.html").read_text()
    assert "learning_rate" in report and chosen["learning_rate"]["why"].split(";")[0] in report


@pytest.mark.whole
def test_a_tuning_killed_in_every_stage_ends_with_the_same_bits(
    workshop: Path, tuned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = tune_arguments(workshop, out)
    for pattern, signal_number in INSTANTS.items():
        # The child process ends too: the next tuning starts at once, and no process holds the folder.
        output = end_after(pattern, out, arguments, signal_number)
        assert "in use" not in output
        assert (f"resume with: prge tune --resume {out}" in output) == (signal_number is signal.SIGINT)
        arguments = ["tune", "--resume", out]
    prge(*arguments, cwd=tmp_path)
    for name in ("adapter/adapter_model.safetensors", "run/final/adapter_model.safetensors"):
        assert (out / name).read_bytes() == (tuned / name).read_bytes()
    assert json.loads((out / "after.json").read_text()) == json.loads((tuned / "after.json").read_text())


def test_other_settings_in_its_folder_are_refused(workshop: Path, tuned: Path) -> None:
    done = prge(*tune_arguments(workshop, tuned), "--rank", 4, "--batch-size", 1, check=False)
    assert done.returncode == 2
    assert "batch_size was None, is 1" in done.stderr and "rank was None, is 4" in done.stderr
    assert f"prge tune --resume {tuned}" in done.stderr


def test_a_finished_tuning_is_not_repeated(tuned: Path) -> None:
    journal = (tuned / "run" / "journal.jsonl").read_bytes()
    begin = time.monotonic()
    done = prge("tune", "--resume", tuned)
    assert "$ prge run" not in done.stdout and "$ prge eval" not in done.stdout
    assert time.monotonic() - begin < 30
    assert (tuned / "run" / "journal.jsonl").read_bytes() == journal


def test_a_damaged_record_is_an_error(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned, tmp_path / "out")
    (tmp_path / "out" / "tune.json").write_text('{"settings": {}}')
    done = prge("tune", "--resume", tmp_path / "out", check=False)
    assert done.returncode == 2 and "it lacks a part" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.whole
def test_equal_rows_have_no_development_part(workshop: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "equal.jsonl", [{"prompt": "aa", "completion": " bb"}] * 12)
    arguments = ["--bundle", workshop / "bundle", "--steps", 4, "--out", tmp_path / "out"]
    done = prge("tune", rows, *arguments, "--json", tmp_path / "tune-result.json")
    assert "no dev rows can be split off: all rows are equal" in done.stdout
    result = result_of(tmp_path / "out")
    assert result["score_after"] is None
    assert "no development rows" in result["chosen"]["learning_rate"]["why"]


@pytest.mark.whole
def test_a_very_long_row_is_split(workshop: Path, tmp_path: Path) -> None:
    """The long row has a hundred thousand tokens, none of which is lost."""
    texts = ["aa bb " * 17_000, "cc dd", "dd cc"]
    rows = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    dev = write_rows(tmp_path / "dev.jsonl", [{"text": "aa bb"}])
    arguments = ["--bundle", workshop / "bundle", "--dev", dev, "--steps", 3, "--out", tmp_path / "out"]
    done = prge("tune", rows, *arguments, "--learning-rate", 0.01)
    assert "split into several examples: 1 row (1)" in done.stderr + done.stdout
    facts = json.loads((tmp_path / "out" / "tune.json").read_text())["found"]["facts"]
    assert facts["longest"] <= 32 and facts["targets"] > 100_000


def one_class(workshop: Path, folder: Path) -> Path:
    rows = [json.loads(line) for line in (workshop / "train.jsonl").read_text().splitlines()]
    return write_rows(folder / "one.jsonl", [row for row in rows if row["label"] == 0])


@pytest.mark.whole
def test_rows_of_one_class_teach_that_class(workshop: Path, tmp_path: Path) -> None:
    rows = one_class(workshop, tmp_path)
    arguments = ["--bundle", workshop / "bundle", "--task", workshop / "task.yaml", "--out", tmp_path / "out"]
    prge("tune", rows, *arguments, "--dev", rows, "--steps", 16, "--learning-rate", 0.03,
         "--json", tmp_path / "tune-result.json")  # fmt: skip
    result = result_of(tmp_path / "out")
    assert result["score_after"]["accuracy"] == 1
    assert result["score_after"]["loss"] < result["score_before"]["loss"]


@pytest.mark.whole
def test_an_encoder_learns_from_a_few_rows(workshop: Path, encoder: Path, tmp_path: Path) -> None:
    lines = [{"text": text, "label": label} for text, label in (("aa", 0), ("bb", 1), ("cc", 0), ("dd", 1))]
    rows = write_rows(tmp_path / "rows.jsonl", lines)
    arguments = [
        "--bundle", encoder, "--task", workshop / "task.yaml", "--out", tmp_path / "out", "--steps", 4,
    ]  # fmt: skip
    arguments += ["--dev", rows, "--learning-rate", 0.01, "--json", tmp_path / "tune-result.json"]
    done = prge("tune", rows, *arguments)
    result = result_of(tmp_path / "out")
    # Development rows may select step 0, the start.
    assert result["score_after"]["loss"] <= result["score_before"]["loss"]
    assert "2 different rows" in result["chosen"]["head_folds"]["why"]
    before, after = result["samples"]["before"], result["samples"]["after"]
    assert [each["right"] for each in before] == ["no", "yes", "no"]
    assert [each["prompt"] for each in after] == ["aa ?", "bb ?", "cc ?"]
    assert "\n  right   'yes'" in done.stdout


@pytest.mark.whole
def test_an_empty_completion_is_reported_with_its_row(workshop: Path, tmp_path: Path) -> None:
    """The message names the user's file before any work; the same folder accepts the corrected command."""
    lines = [{"question": f"a{n}", "completion": " bb" if n % 7 else ""} for n in range(1, 9)]
    rows, out = write_rows(tmp_path / "rows.jsonl", lines), tmp_path / "out"
    arguments = ["tune", rows, "--model", workshop / "model", "--dev", rows, "--out", out, "--steps", 2]
    output = "its columns are question, completion"
    columns = ["--columns", "prompt=question", "completion=completion"]
    for more, message in (
        ([], output),
        (columns, f"{rows} has rows that can't be used:\n  - row 7: its comp"),
    ):
        done = prge(*arguments, *more, check=False)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
        assert not out.exists()
    done = prge(
        *arguments, *columns, "--on-bad-row", "skip", "--learning-rate", 0.01, "--target-modules", "o_proj"
    )
    assert f"left out 1 row of {rows}:\n  row 7: its completion is empty" in done.stdout


@pytest.mark.whole
def test_rates_that_diverge_in_the_search_are_not_chosen(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decisions, "RATES", (0.01, 1e30))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    arguments = tune_arguments(workshop, tmp_path / "out")[1:]
    result = tune(parse_settings(TuneSettings, [*map(str, arguments)], "prge tune"))
    assert result["chosen"]["learning_rate"]["value"] < 1
    assert result["score_after"]["loss"] < result["score_before"]["loss"]
    assert "loss of development rows inf" in capfd.readouterr().out


@pytest.mark.whole
@pytest.mark.parametrize(
    ("size", "output", "left"),
    [
        ("200k", "too little room", set()),
        # Earlier decisions are kept for a resume with more room; no partial bundle is left.
        ("900k", "No space left", {"config.yaml", "rows", "run.lock", "settings", "tune.json"}),
    ],
)
def test_a_full_disk_is_reported_and_leaves_no_bundle(
    workshop: Path, small_disk: Callable[[str], Path], size: str, output: str, left: set[str]
) -> None:
    disk = small_disk(size)
    arguments = ["--model", workshop / "model", "--task", workshop / "task.yaml", "--init", "random"]
    done = prge("tune", workshop / "train.jsonl", *arguments, "--out", disk / "out", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert output in done.stderr
    assert {path.name for path in (disk / "out").glob("*")} == left


@pytest.mark.whole
def test_a_rate_at_which_every_run_diverges_is_no_candidate(workshop: Path, tmp_path: Path) -> None:
    """If the user sets such a rate, the message of the final run has a remedy."""
    arguments = [*tune_arguments(workshop, tmp_path / "out"), "--learning-rate", 1e30]
    done = prge(*arguments, check=False)
    assert done.returncode == 2 and "The final run diverged" in done.stderr
    assert "Give a --learning-rate below 1e+30" in done.stderr
    prge("tune", "--resume", tmp_path / "out", "--learning-rate", 0.01)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_missing_model_is_reported_at_once(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    begin = time.monotonic()
    arguments = ["--model", "nobody/nothing", "--task", workshop / "task.yaml", "--out", tmp_path / "out"]
    done = prge("tune", workshop / "train.jsonl", *arguments, check=False)
    assert done.returncode == 2 and "nobody/nothing" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - begin < 60


def test_missing_rows_leave_no_files(workshop: Path, tmp_path: Path) -> None:
    arguments = ["--bundle", workshop / "bundle", "--out", tmp_path / "out"]
    done = prge("tune", tmp_path / "none.jsonl", *arguments, check=False)
    assert done.returncode == 2 and "none.jsonl" in done.stderr
    assert not (tmp_path / "out" / "rows").exists()
