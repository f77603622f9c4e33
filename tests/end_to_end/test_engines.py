"""A whole run on each engine gives the same bits, and the native engine's process never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compilers import needs_compiler
from tests.verbs import REPOSITORY, prge
from tests.workshop import bits

pytestmark = needs_compiler
# Exits with 3 if anything imported a module that a phone doesn't have.
WITHOUT_TORCH = """
import sys
from prge.cli.main import main
code = main()
heavy = {"torch", "executorch.exir", "transformers", "server_export"} & set(sys.modules)
sys.exit(3 if heavy else code)
"""


def native(*arguments: object) -> str:
    """Run a verb that must not import torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [[], ["--estimator", "exact"]], ids=["tangent", "exact"])
def test_a_run_without_torch_has_the_bits_of_a_run_with_torch(
    run_arguments: list[object], tmp_path: Path, options: list[object]
) -> None:
    native("run", *run_arguments, *options)
    other = ["--out", tmp_path / "other"]
    prge("run", *run_arguments, *options, *other, "--engine", "torch")
    assert bits(tmp_path / "run") == bits(tmp_path / "other")
    engines = [
        json.loads((tmp_path / run / "run.json").read_text())["run"]["engine"] for run in ("run", "other")
    ]
    assert engines == ["native", "torch"]


def test_scoring_and_probing_need_no_torch(workshop: Path) -> None:
    rows = ["--task", workshop / "task.yaml", "--data", workshop / "dev.jsonl"]
    result = native("eval", "--bundle", workshop / "bundle", *rows, "--engine", "native")
    assert result == prge("eval", "--bundle", workshop / "bundle", *rows, "--engine", "torch").stdout


def test_a_run_may_be_resumed_with_the_other_engine(run_arguments: list[object], tmp_path: Path) -> None:
    prge("run", *run_arguments, "--engine", "torch")
    journal = (tmp_path / "run/journal.jsonl").read_bytes()
    native("run", "--resume", tmp_path / "run", "--engine", "native")
    assert (tmp_path / "run/journal.jsonl").read_bytes() == journal
    assert json.loads((tmp_path / "run/run.json").read_text())["run"]["engine"] == "native"
