"""A folder of `prge tune` works as a bundle, an adapter or a run of other verbs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verbs import REPOSITORY, prge

pytestmark = pytest.mark.timeout(300)


def answer(*arguments: object) -> dict[str, object]:
    result: dict[str, object] = json.loads(
        prge("generate", *arguments, "--prompt", "aa bb ?", "--max-tokens", 8, "--json").stdout
    )
    return result


def test_a_tuned_model_generates_under_its_name(workshop: Path, tuned: Path) -> None:
    result = answer(tuned)
    assert result["adapter"] == "letters" and result["text"] == answer("--bundle", tuned)["text"]
    assert result["text"] == answer(workshop / "bundle", "--adapter", tuned)["text"]
    plain = answer(tuned, "--adapter", "base")
    assert plain["adapter"] == "base" and plain["text"] == answer(workshop / "bundle")["text"]
    conversation = prge("chat", tuned, "--temperature", 0, "--max-tokens", 2, input="aa\n/adapter\n/quit\n")
    assert "letters (speaks)" in conversation.stderr


def test_a_tuned_folder_is_scored_with_its_adapter(workshop: Path, tuned: Path, tmp_path: Path) -> None:
    arguments = [
        "--data",
        workshop / "dev.jsonl",
        "--task",
        workshop / "task.yaml",
        "--json",
        tmp_path / "a.json",
    ]

    def loss(*named: object) -> float:
        prge("eval", *named, *arguments)
        return float(json.loads((tmp_path / "a.json").read_text())["loss"])

    assert loss(tuned) == loss(workshop / "bundle", "--adapter", tuned / "run") < loss(workshop / "bundle")
    after = json.loads((tuned / "after.json").read_text())
    assert loss("--bundle", tuned) == pytest.approx(after["loss"])


def test_a_server_lists_a_tuned_model_by_its_name(tuned: Path) -> None:
    command = [sys.executable, "-m", "prge.cli.main", "serve", str(tuned), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "models: letters, base\n"
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_tuned_folder_is_published_and_reported(tuned: Path, tmp_path: Path) -> None:
    prge("publish", tuned, "--out", tmp_path / "adapter")
    weights = "adapter_model.safetensors"
    assert (tmp_path / "adapter" / weights).read_bytes() == (tuned / "adapter" / weights).read_bytes()
    prge("report", tuned, "--out", tmp_path / "report.html")
    assert "learning_rate" in (tmp_path / "report.html").read_text()
    assert json.loads(prge("inspect", tuned, "--json").stdout)["chain"]


def test_an_unfinished_tuning_is_refused_with_the_command_that_resumes_it(
    tuned: Path, tmp_path: Path
) -> None:
    unfinished = Path(shutil.copytree(tuned, tmp_path / "unfinished"))
    shutil.rmtree(unfinished / "run/final")
    for verb in (["generate", "--prompt", "aa"], ["chat"], ["serve"], ["publish", "--out", tmp_path / "x"]):
        done = prge(verb[0], unfinished, *verb[1:], check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "is a tuning that has no trained adapter yet" in done.stderr
        assert f"Finish it with `prge tune --resume {unfinished}`" in done.stderr
    assert answer(unfinished, "--adapter", "base")["adapter"] == "base"
