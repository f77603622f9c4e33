"""`--memory`: predicted and measured memory of processes, and refusals of too little memory.

A child process is measured from start to end, as the system does: ru_maxrss is VmHWM.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.formats.bundle import open_bundle
from prge.formats.signatures import BACKWARD
from prge.training.costs import minimum_memory
from tests.verbs import REPOSITORY
from tests.workshop import write_rows

Arguments = list[object]
# A prediction is an upper bound, but a close one.
MIN_SHARE, MAX_SHARE = 0.97, 1.6


# The system counts memory from before exec, so a small process starts the verb.
_SHIM = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
os._exit(os.waitstatus_to_exitcode(status) % 256)
"""


def child(*arguments: object, code: int = 0) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a verb in its own process, and return its output and peak memory in bytes."""
    command = [
        sys.executable, "-S", "-u", "-c", _SHIM, sys.executable, "-m", "prge.cli.main", *map(str, arguments),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )
    assert done.returncode == code, done.stdout
    done.stdout, _, kilobytes = done.stdout.rstrip("\n").rpartition("\n")
    return done, int(kilobytes) * 1024


def needed(message: str) -> int:
    """Return the minimum memory in a refusal, in bytes."""
    match = re.search(r"needs at least ([\d,]+) MB", message)
    assert match, message
    return int(match[1].replace(",", "")) * 10**6


@pytest.fixture
def verbs(workshop: Path, tmp_path: Path) -> dict[str, Callable[[], Arguments]]:
    """Return functions that make the arguments of every verb that runs an engine."""
    bundle = ["--bundle", workshop / "bundle"]
    task = ["--task", workshop / "task.yaml"]
    out = tmp_path / "out"
    train = ["--train", workshop / "train.jsonl", *task, "--out", out, "--steps", 2, "--threads", 1]
    (tmp_path / "reward.yaml").write_text("rewards: [{rule: contains, words: [a]}]")
    reward = ["--reward", tmp_path / "reward.yaml", "--max-completion-length", 16]
    prompts = ["--train", workshop / "train.jsonl", *reward, *train[4:]]
    fleet = [*train[:-4], "--devices", 2, "--rounds", 1, "--examples", 2]
    return {
        "run": lambda: ["run", *bundle, *train],
        "run es": lambda: ["run", *bundle, *prompts, "--objective", "es"],
        "run grpo": lambda: ["run", *bundle, *prompts, "--dev", workshop / "dev.jsonl", "--beta", 0.1],
        "eval": lambda: ["eval", *bundle, "--data", workshop / "dev.jsonl", *task],
        "eval by a reward": lambda: ["eval", *bundle, "--data", workshop / "dev.jsonl", *reward],
        "generate": lambda: ["generate", *bundle, "--prompt", "aa", "--max-tokens", 4],
        "fleet simulate": lambda: ["fleet", "simulate", *bundle, *fleet],
    }


@pytest.mark.parametrize(
    "verb", ["run", "run es", "run grpo", "eval", "eval by a reward", "generate", "fleet simulate"]
)
def test_too_little_memory_is_refused_with_the_minimum_which_suffices(
    verbs: dict[str, Callable[[], Arguments]], verb: str, tmp_path: Path
) -> None:
    arguments = verbs[verb]()
    refused, _ = child(*arguments, "--memory", "20MB", code=2)
    assert "--memory 20 MB is too little:" in refused.stdout and "Traceback" not in refused.stdout
    files = [path.name for path in (tmp_path / "out").rglob("*")] if (tmp_path / "out").exists() else []
    assert set(files) <= {"run.lock"}
    min_bytes = needed(refused.stdout)
    done, peak = child(*arguments, "--memory", min_bytes)
    assert peak <= min_bytes
    assert f"MB at most, of the {min_bytes / 1e6:,.0f} MB of --memory" in done.stdout
    assert peak >= min_bytes / MAX_SHARE


def test_chat_refuses_too_little_memory(workshop: Path) -> None:
    refused, _ = child("chat", workshop / "bundle", "--memory", "20MB", code=2)
    assert "--memory 20 MB is too little:" in refused.stdout


def test_serve_refuses_too_little_memory(workshop: Path, tmp_path: Path) -> None:
    arguments: Arguments = ["serve", workshop / "bundle", "--port", 0, "--memory", "20MB"]
    for more in ([], ["--learn", tmp_path / "learn"]):
        refused, _ = child(*arguments, *more, code=2)
        assert "--memory 20 MB is too little:" in refused.stdout


def test_a_tuning_refuses_too_little_memory_before_its_export(workshop: Path, tmp_path: Path) -> None:
    arguments = ["tune", "--model", workshop / "model", "--data", workshop / "train.jsonl"]
    arguments += ["--task", workshop / "task.yaml", "--out", tmp_path / "out"]
    refused, _ = child(*arguments, "--memory", "20MB", code=2)
    assert "--memory 20 MB is too little:" in refused.stdout and needed(refused.stdout) > 20e6
    assert "prge export" not in refused.stdout and not (tmp_path / "out").exists()


def test_a_run_that_needed_more_memory_than_predicted_reports_that(
    verbs: dict[str, Callable[[], Arguments]], tmp_path: Path
) -> None:
    """A prediction of zero simulates a wrong prediction."""
    script = (
        "import sys; from device_runner import run; from prge.cli.main import main; "
        "from prge.training import costs; costs.RunMemory.total_starting_from = lambda *_: 1; "
        "run.resident_bytes = lambda: 0; sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    arguments = [*map(str, verbs["run"]()), "--memory", "30MB"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "more than the 30 MB of --memory" in done.stderr + done.stdout
    assert "more than the 30 MB of --memory" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize(("batch", "tokens"), [(1, 32), (4, 16)])
def test_the_predicted_memory_of_a_run_is_what_it_needs(
    workshop: Path, tmp_path: Path, batch: int, tokens: int
) -> None:
    """The minimum that `prge inspect` and tunings predict covers the whole process."""
    text = "abcdefgh" * 8
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text[at : at + tokens]} for at in range(8)])
    predicted = minimum_memory(open_bundle(workshop / "bundle"), BACKWARD, batch, tokens)
    arguments: Arguments = [
        "run", "--bundle", workshop / "bundle", "--train", rows, "--out", tmp_path / "out",
    ]  # fmt: skip
    arguments += ["--steps", 6, "--batch-size", batch, "--overflow", "truncate", "--max-dropped", 1]
    _, peak = child(*arguments, "--memory", predicted)
    assert MIN_SHARE * peak <= predicted <= MAX_SHARE * peak
    memory = json.loads((tmp_path / "out" / "run.json").read_text())["train"]["memory"]
    assert memory["peak_bytes"] == pytest.approx(peak, rel=0.02)
