"""A slice of the attack: the real code with a seed and few cases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kills import differences

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models and bundles, which the first attack creates."""
    return tmp_path_factory.mktemp("attack")


def attack(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the attack as a user does."""
    command = [sys.executable, "scripts/attack/run.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("part", "cases"),
    [
        ("kills", 1),
        ("files", 40),
        ("inputs", 20),
        ("network_clients", 4),
        ("network_devices", 1),
        ("feedback", 3),
        ("settings", 20),
    ],
)
def test_attacks_cause_no_failure(work: Path, part: str, cases: int) -> None:
    arguments = ["--work", work, "--kinds", "decoder", "--only", part, "--cases", cases, "--processes", 1]
    done = attack(*arguments, "--json", work / "attack.json", "--minutes", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((work / "attack.json").read_text())
    assert report["failures"] == []
    if part == "kills":
        assert report["kills"] >= 6
    elif part == "network_clients":
        assert report["counts"]["server requests"] >= 20 * cases
    elif part == "network_devices":
        assert sum(report["parts"][part]["verdicts"].values()) >= 90
    else:
        assert sum(report["parts"][part]["verdicts"].values()) >= cases - 1
    assert not (work / "failures").exists()


def test_a_run_with_another_result_is_detected(tmp_path: Path) -> None:
    """The comparison of killed runs detects a changed bit, record, count and checkpoint."""
    whole = tmp_path / "whole"
    (whole / "final").mkdir(parents=True)
    (whole / "checkpoints" / "step-000004").mkdir(parents=True)
    (whole / "checkpoints" / "step-000004" / "state.json").write_text("{}")
    (whole / "final" / "adapter_model.safetensors").write_bytes(b"weights")
    (whole / "journal.jsonl").write_text("{}\n")
    (whole / "metrics.jsonl").write_text('{"event": "step", "step": 1, "forward_passes": 8}\n')
    summary = {
        "run": {"status": "completed"},
        "train": {"steps": 1, "forward_passes": 8, "trained_values": 3},
    }
    (whole / "run.json").write_text(json.dumps(summary))
    same = Path(shutil.copytree(whole, tmp_path / "same"))
    assert differences(whole, same) == ""
    changes = {
        "final/adapter_model.safetensors": "weightt",
        "journal.jsonl": "{}\n{}\n",
        "metrics.jsonl": '{"event": "step", "step": 1, "forward_passes": 9}\n',
        "run.json": json.dumps({**summary, "train": {**summary["train"], "forward_passes": 9}}),
        "checkpoints/step-000004/state.json": "[]",
        "checkpoints/step-000005": "{}",
        ".run.json.partial": "{}",
    }
    for name, content in changes.items():
        other = Path(shutil.copytree(whole, tmp_path / "other"))
        (other / name).write_text(content)
        assert differences(whole, other), name
        shutil.rmtree(other)


@pytest.mark.whole
def test_a_busy_machine_tries_every_part_once(work: Path, tmp_path: Path) -> None:
    """Every part is tried, however little time there is; a part that can't be tried is a failure."""
    arguments = ["--work", work, "--kinds", "decoder", "--only", "files", "inputs", "--minutes", 0]
    done = attack(*arguments, "--json", tmp_path / "attack.json")
    report = json.loads((tmp_path / "attack.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(report["parts"]) == ["files", "inputs"] and report["files"] == report["inputs"] == 1
