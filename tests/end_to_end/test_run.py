"""`prge run` and related verbs on a real bundle, as a user calls them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prge.formats.peft import read_arrays
from tests.verbs import REPOSITORY, prge


@pytest.fixture(scope="module")
def done(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run."""
    out = tmp_path_factory.mktemp("runs") / "done"
    prge(
        "run", "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl",
        "--dev", workshop / "dev.jsonl", "--task", workshop / "task.yaml", "--out", out, "--steps", 12,
        "--eval-steps", 4, "--save-steps", 5, "--learning-rate", 0.01, "--estimator", "tangent",
    )  # fmt: skip
    return out


def test_a_run_folder_has_all_its_files(done: Path) -> None:
    names = {path.name for path in done.iterdir()}
    assert names >= {*"config.yaml journal.jsonl metrics.jsonl checkpoints final run.json log.txt".split()}
    summary = json.loads((done / "run.json").read_text())
    assert summary["run"]["status"] == "completed"
    assert summary["train"]["steps"] == 12
    assert summary["train"]["forward_passes"] == 12 * 4 * (1 + 4)
    assert summary["train"]["memory"]["peak_bytes"] > 0
    log = (done / "log.txt").read_text()
    assert "] <- label" in log
    assert "24 rows, 24 examples" in log


def test_shards_are_trained_on_like_the_whole_file(done: Path, workshop: Path, tmp_path: Path) -> None:
    lines = (workshop / "train.jsonl").read_text().splitlines(keepends=True)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "a b.jsonl").write_text("".join(lines[:10]))
    (shards / "c.jsonl").write_text("".join(lines[10:]))
    arguments: list[object] = [
        "--bundle", workshop / "bundle", "--dev", workshop / "dev.jsonl", "--task", workshop / "task.yaml",
        "--steps", 12, "--eval-steps", 4, "--save-steps", 5, "--learning-rate", 0.01,
        "--estimator", "tangent",
    ]  # fmt: skip
    trained = ["--train", "a b.jsonl", "c.jsonl", "--out", tmp_path / "run"]
    output = prge("run", *arguments, *trained, cwd=shards).stderr
    whole, sharded = (
        (run / "final/adapter_model.safetensors").read_bytes() for run in (done, tmp_path / "run")
    )
    assert sharded == whole
    assert "a b.jsonl and c.jsonl" in output + (tmp_path / "run/log.txt").read_text()
    # Resume works from another folder, and not with other rows.
    prge("run", "--resume", tmp_path / "run", cwd=tmp_path)
    (shards / "c.jsonl").write_text("".join(lines[11:]))
    assert prge("run", "--resume", tmp_path / "run", "--steps", 14, check=False).returncode == 2
    (shards / "c.jsonl").write_text('{"text": 1, "label": 7}\n')
    bad = prge("run", *arguments, *trained[:-1], tmp_path / "bad", cwd=shards, check=False)
    assert bad.returncode == 2 and "row 1 of c.jsonl: " in bad.stderr


def test_no_other_argument_is_taken_for_the_bundle(done: Path, workshop: Path, tmp_path: Path) -> None:
    """`eval` accepts its bundle without a flag, and rows from several files."""
    scored: dict[str, float] = {}
    for name, files in (("twice", ("dev", "train")), ("dev", ("dev",)), ("train", ("train",))):
        out = tmp_path / f"{name}.json"
        prge(
            "eval", "--bundle", workshop / "bundle", "--task", workshop / "task.yaml", "--json", out,
            "--predictions", tmp_path / "lines.jsonl",
            "--data", *(workshop / f"{each}.jsonl" for each in files),
        )  # fmt: skip
        scored[name] = json.loads(out.read_text())["loss"]
        lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
        scored[f"{name} rows"] = len(lines)
        if name == "twice":
            row_sources = {(line["file"], line["row"]) for line in lines}
            assert len(row_sources) == len(lines) and (str(workshop / "train.jsonl"), 1) in row_sources
    total = sum(scored[name] * scored[f"{name} rows"] for name in ("dev", "train"))
    assert scored["twice rows"] == scored["dev rows"] + scored["train rows"]
    assert np.isclose(scored["twice"], total / scored["twice rows"], rtol=1e-6)
    stray = prge("eval", "--bundle", workshop / "bundle", "--adapter", done, "other", check=False)
    assert stray.returncode == 2 and "'other' stands alone" in stray.stderr


def test_lora_a_stays_unchanged(done: Path, workshop: Path) -> None:
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
    result = json.loads((tmp_path / "eval.json").read_text())
    records = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    assert result["accuracy"] == max(record["accuracy"] for record in evaluations)
    assert any(result["loss"] == pytest.approx(record["loss"], abs=1e-6) for record in evaluations)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert result["accuracy"] == np.mean([row["prediction"] == row["label"] for row in rows])


def test_ctrl_c_saves_and_resumes(run_arguments: list[object], tmp_path: Path, done: Path) -> None:
    command = [sys.executable, "-m", "prge.cli.main", "run", *map(str, run_arguments), "--steps", "4000"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as process:
        journal = tmp_path / "run/journal.jsonl"
        while not (journal.is_file() and b'"type":"step"' in journal.read_bytes()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "run/run.json").read_text())["run"]["status"] == "interrupted"
    steps = journal.read_bytes().count(b'"type":"step"')
    assert (tmp_path / f"run/checkpoints/step-{steps:06d}").is_dir()


def test_a_folder_with_a_run_is_not_overwritten(run_arguments: list[object], done: Path) -> None:
    again = prge("run", *run_arguments, "--out", done, check=False)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr and "--resume" in again.stderr


def test_resuming_a_finished_run_changes_nothing(done: Path) -> None:
    before = (done / "final/adapter_model.safetensors").read_bytes()
    prge("run", "--resume", done)
    assert (done / "final/adapter_model.safetensors").read_bytes() == before
    assert json.loads((done / "run.json").read_text())["run"]["status"] == "completed"


def test_a_run_can_be_resumed_from_any_folder(workshop: Path, tmp_path: Path) -> None:
    arguments = ["--bundle", "bundle", "--train", "train.jsonl", "--task", "task.yaml", "--steps", 3]
    prge("run", *arguments, "--out", tmp_path / "run", cwd=workshop)
    prge("run", "--resume", "run", cwd=tmp_path)


def test_a_run_starts_from_an_adapter(run_arguments: list[object], done: Path, tmp_path: Path) -> None:
    prge("run", *run_arguments, "--adapter", done, "--steps", 2)
    out = prge("replay", tmp_path / "run", "--out", tmp_path / "replayed").stdout
    assert "the same bits" in out
