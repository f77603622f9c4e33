"""`prge run` and its neighbours on a real bundle, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prge.files.peft import read_arrays
from tests.verbs import REPOSITORY, prge


@pytest.fixture(scope="module")
def done(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "done"
    prge(
        "run", "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl",
        "--dev", workshop / "dev.jsonl", "--task", workshop / "task.yaml", "--out", out, "--steps", 12,
        "--evaluate-every", 4, "--checkpoint-every", 5, "--learning-rate", 0.01, "--estimator", "tangent",
    )  # fmt: skip
    return out


def test_a_run_folder_holds_everything(done: Path) -> None:
    names = {path.name for path in done.iterdir()}
    assert names >= {
        "config.yaml",
        "journal.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "final",
        "run.json",
        "log.txt",
    }
    summary = json.loads((done / "run.json").read_text())
    assert summary["run"]["status"] == "completed"
    assert summary["train"]["steps"] == 12
    assert summary["train"]["rows"] == 12 * 4 * (1 + 4)
    assert summary["train"]["memory"]["peak_bytes"] > 0


def test_the_log_shows_a_decoded_sample(done: Path) -> None:
    log = (done / "log.txt").read_text()
    assert "] <- label" in log
    assert "24 rows, 24 examples" in log


def test_lora_a_is_what_it_was(done: Path, workshop: Path) -> None:
    before = read_arrays(workshop / "bundle/adapter/adapter_model.safetensors")
    after = read_arrays(done / "final/adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert np.array_equal(array, after[name]) == ("lora_A" in name), name


def test_eval_repeats_the_last_evaluation_of_the_run(done: Path, workshop: Path, tmp_path: Path) -> None:
    prge(
        "eval", "--bundle", workshop / "bundle", "--data", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--adapter", done,
        "--json", tmp_path / "eval.json", "--predictions", tmp_path / "rows.jsonl",
    )  # fmt: skip
    found = json.loads((tmp_path / "eval.json").read_text())
    records = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    assert found["accuracy"] == max(record["accuracy"] for record in evaluations)
    assert any(found["loss"] == pytest.approx(record["loss"], abs=1e-6) for record in evaluations)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found["accuracy"] == np.mean([row["prediction"] == row["label"] for row in rows])


@pytest.mark.parametrize(
    "words",
    [
        ["--share-directions"],
        ["--clip", 0.5, "--calls", 2, "--optimizer", "momentum", "--schedule", "cosine"],
    ],
)
def test_tangents(run_words: list[object], words: list[object], tmp_path: Path) -> None:
    prge("run", *run_words, "--estimator", "tangent", *words)
    assert "the same bits" in prge("replay", tmp_path / "run", "--out", tmp_path / "replayed").stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--estimator", "fzoo", "--memory", "1000000", "--optimizer", "sgd"],
        ["--optimizer", "momentum", "--schedule", "cosine", "--calls", 2],
        ["--queries", 3, "--copies", 2, "--warmup", 2, "--schedule", "linear"],
    ],
)
def test_differences_and_optimizers(run_words: list[object], words: list[object], tmp_path: Path) -> None:
    prge("run", *run_words, "--estimator", "antithetic", *words)
    assert (tmp_path / "run/final/adapter_model.safetensors").is_file()


def test_ctrl_c_saves_and_resumes(run_words: list[object], tmp_path: Path, done: Path) -> None:
    command = [sys.executable, "-m", "prge.cli", "run", *map(str, run_words), "--steps", "4000"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as process:
        journal = tmp_path / "run/journal.jsonl"
        while not (journal.is_file() and b'"kind":"step"' in journal.read_bytes()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "run/run.json").read_text())["run"]["status"] == "interrupted"
    steps = journal.read_bytes().count(b'"kind":"step"')
    assert (tmp_path / f"run/checkpoints/step-{steps:06d}").is_dir()


def test_two_runs_in_one_folder(run_words: list[object], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prge.cli", "run", *map(str, run_words), "--steps", "4000"]
    with subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=REPOSITORY
    ) as first:
        while not (tmp_path / "run/journal.jsonl").is_file():
            assert first.poll() is None
            time.sleep(0.02)
        second = prge("run", *run_words, check=False)
        assert second.returncode == 2
        assert f"is in use by process {first.pid}" in second.stderr
        first.kill()


def test_a_folder_with_a_run_is_not_overwritten(run_words: list[object], done: Path) -> None:
    again = prge("run", *run_words, "--out", done, check=False)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr and "--resume" in again.stderr


def test_resume_with_changed_settings_names_every_one(done: Path, workshop: Path) -> None:
    again = prge(
        "run",
        "--resume",
        done,
        "--learning-rate",
        0.5,
        "--steps",
        99,
        "--train",
        workshop / "dev.jsonl",
        check=False,
    )
    assert again.returncode == 2
    for part in ("learning_rate was 0.01, is 0.5", "steps was 12, is 99", "the train is another one"):
        assert part in again.stderr


def test_resume_of_a_finished_run_changes_nothing(done: Path) -> None:
    before = (done / "final/adapter_model.safetensors").read_bytes()
    prge("run", "--resume", done)
    assert (done / "final/adapter_model.safetensors").read_bytes() == before
    assert json.loads((done / "run.json").read_text())["run"]["status"] == "completed"


def test_a_run_can_be_resumed_from_any_folder(workshop: Path, tmp_path: Path) -> None:
    words = ["--bundle", "bundle", "--train", "train.jsonl", "--task", "task.yaml", "--steps", 3]
    prge("run", *words, "--out", tmp_path / "run", cwd=workshop)
    prge("run", "--resume", "run", cwd=tmp_path)


def test_an_adapter_to_start_from(run_words: list[object], done: Path, tmp_path: Path) -> None:
    prge("run", *run_words, "--adapter", done, "--steps", 2)
    out = prge("replay", tmp_path / "run", "--out", tmp_path / "replayed").stdout
    assert "the same bits" in out


def test_the_driver_imports_no_compiler(workshop: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from device_runner.run import main
main({[str(word) for word in _words(workshop, tmp_path / "imports")]!r})
unwanted = set(["executorch.exir", "transformers", "torch._dynamo", "server_export"])
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, env=os.environ)


def _words(workshop: Path, out: Path) -> list[object]:
    return [
        "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--steps", 2,
    ]  # fmt: skip
