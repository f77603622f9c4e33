"""An encoder with its classification head on the device: fit, fine-tune, score, replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prge.formats.peft import read_arrays
from tests.verbs import prge


def _arguments(encoder: Path, workshop: Path, out: Path) -> list[object]:
    return [
        "--bundle", encoder, "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--steps", 6, "--eval-steps", 3,
        "--divergence-ratio", 1e9,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--head-folds", 4], ["--head-folds", 0], ["--head-learning-rate", 0.01]], ids=str
)
def test_fit_train_replay(encoder: Path, workshop: Path, tmp_path: Path, arguments: list[object]) -> None:
    prge("run", *_arguments(encoder, workshop, tmp_path / "run"), *arguments)
    final = tmp_path / "run/final"
    head = read_arrays(final / "head.safetensors")
    assert head["weight"].shape == (2, 64) and head["bias"].shape == (2,)
    records = [
        json.loads(line)["record"] for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()
    ]
    fitted = next(record for record in records if record["type"] == "head")
    assert len(fitted["folds"]) == (arguments[1] if arguments[0] == "--head-folds" else 0)
    assert ("head_gradient" in records[-2]) == (arguments[0] == "--head-learning-rate")
    assert "the same bits" in prge("replay", tmp_path / "run", "--out", tmp_path / "replayed").stdout
    replayed = read_arrays(tmp_path / "replayed/head.safetensors")
    assert all(np.array_equal(head[name], replayed[name]) for name in head)


def test_an_encoder_is_scored_with_the_head_of_its_run(encoder: Path, workshop: Path, tmp_path: Path) -> None:
    prge("run", *_arguments(encoder, workshop, tmp_path / "run"))
    arguments = ["--bundle", encoder, "--data", workshop / "dev.jsonl", "--task", workshop / "task.yaml"]
    prge("eval", *arguments, "--adapter", tmp_path / "run", "--json", tmp_path / "eval.json")
    assert 0 <= json.loads((tmp_path / "eval.json").read_text())["accuracy"] <= 1
    alone = prge("eval", *arguments, check=False)
    assert alone.returncode == 2 and "has no head.safetensors" in alone.stderr


def test_heads_of_another_run_are_used_if_they_were_fitted_on_the_same_rows(
    encoder: Path, workshop: Path, tmp_path: Path
) -> None:
    arguments, journal = (
        _arguments(encoder, workshop, tmp_path / "first")[:-2],
        tmp_path / "first" / "journal.jsonl",
    )
    assert "heads: fitted on 24 rows" in prge("run", *arguments).stderr
    for name, more in (("same", []), ("others", ["--head-folds", 4]), ("fewer", ["--train-limit", 20])):
        output = prge("run", *arguments, *more, "--heads-of", journal, "--out", tmp_path / name).stderr
        assert (f"heads: those of {journal}" in output) == (name == "same")
        assert ("heads: fitted on" in output) == (name != "same")
    final = "final/adapter_model.safetensors"
    assert (tmp_path / "same" / final).read_bytes() == (tmp_path / "first" / final).read_bytes()
    done = prge("run", *arguments, "--heads-of", "nothing", "--out", tmp_path / "none", check=False)
    assert done.returncode == 2 and "--heads-of is nothing, which doesn't exist" in done.stderr
