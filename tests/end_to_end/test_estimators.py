"""Every verb on a bundle with different estimators, queries and batch sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verbs import prge
from tests.workshop import write_rows

ESTIMATORS = ("tangent", "antithetic", "fzoo", "exact")
CHOICES = 6


@pytest.fixture(scope="module")
def bundle(workshop: Path) -> Path:
    return workshop / "bundle"


@pytest.fixture(scope="module")
def data(workshop: Path) -> list[object]:
    train, dev, task = (workshop / name for name in ("train.jsonl", "dev.jsonl", "task.yaml"))
    return ["--train", train, "--dev", dev, "--task", task]


@pytest.fixture(scope="module")
def runs(bundle: Path, data: list[object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a finished run of each estimator."""
    folder = tmp_path_factory.mktemp("chain runs")
    for name in ESTIMATORS:
        prge(
            "run", "--bundle", bundle, *data, "--out", folder / name, "--steps", 6, "--estimator", name,
            "--eval-steps", 3, "--learning-rate", 0.01, "--keep-gradients",
        )  # fmt: skip
    return {name: folder / name for name in ESTIMATORS}


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows and a task of questions with more candidates than a batch has sequences.

    The candidates have too few common tokens to be branches of one sequence.
    """
    folder = tmp_path_factory.mktemp("quiz")
    texts = [" ".join([letter * 2] * 6) for letter in "abcdef"]
    assert len(texts) == CHOICES
    write_rows(folder / "rows.jsonl", [{"text": "a", "choices": texts, "label": n} for n in range(CHOICES)])
    (folder / "task.yaml").write_text(
        'name: quiz\ntemplate: "{text}"\nchoices_column: choices\ncolumns: {label: label}\nmetric: accuracy\n'
    )
    return folder


@pytest.mark.parametrize(("estimator", "rows"), [("tangent", 5), ("antithetic", 8), ("exact", 3)])
def test_a_batch_has_room_for_all_candidates_of_a_row(
    quiz: Path, bundle: Path, tmp_path: Path, estimator: str, rows: int
) -> None:
    arguments = ["--bundle", bundle, "--task", quiz / "task.yaml"]
    trained = [*arguments, "--train", quiz / "rows.jsonl", "--steps", 2, "--estimator", estimator]
    prge("run", *trained, "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run/run.json").read_text())
    assert summary["train"]["forward_passes"] == 2 * CHOICES * rows
    prge("eval", *arguments, "--data", quiz / "rows.jsonl", "--adapter", tmp_path / "run")


def test_a_batch_counts_rows_whatever_their_candidates(quiz: Path, bundle: Path, tmp_path: Path) -> None:
    arguments = [
        "--bundle", bundle, "--task", quiz / "task.yaml", "--train", quiz / "rows.jsonl", "--steps", 1,
    ]  # fmt: skip
    arguments += ["--estimator", "exact", "--optimizer", "sgd"]
    out = tmp_path / "run"
    prge("run", *arguments, "--out", out, "--batch-size", 2)
    assert "1 steps of 2 examples" in (out / "log.txt").read_text()
    assert json.loads((out / "run.json").read_text())["train"]["forward_passes"] == 2 * CHOICES * 3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_replay_ends_with_the_same_bits(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert "the same bits" in prge("replay", runs[name], "--out", tmp_path / "replayed").stdout


def test_a_baseline_takes_a_batch_with_room_for_all_candidates(
    quiz: Path, workshop: Path, bundle: Path, tmp_path: Path
) -> None:
    arguments = ["--bundle", bundle, "--model", workshop / "model", "--method", "backprop-lora-fa"]
    arguments += ["--task", quiz / "task.yaml", "--train", quiz / "rows.jsonl", "--steps", 2]
    prge("baseline", *arguments, "--out", tmp_path / "run")
    prge("baseline", *arguments, "--out", tmp_path / "two", "--batch-size", 2)
    rows = [
        json.loads((tmp_path / name / "run.json").read_text())["train"]["forward_passes"]
        for name in ("run", "two")
    ]
    assert rows[1] == 2 * rows[0]
