"""`prge guide`, and forward-only runs on the bundle that it made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from prge.files.bundle import open_bundle
from prge.files.peft import read_lora
from prge.learning.estimators.guide import GUIDE, guide_of
from tests.verbs import prge

AXES = 3


@pytest.fixture(scope="module")
def guided(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("guided") / "bundle"
    shutil.copytree(workshop / "bundle", bundle)
    done = prge("guide", *words(workshop, bundle), "--data", workshop / "train.jsonl")
    modules = open_bundle(bundle).chain.modules
    numbers = sum(module.rank * AXES for module in modules)
    assert f"directions have {numbers:,} random numbers" in done.stdout
    return bundle


def words(workshop: Path, bundle: Path) -> list[object]:
    return [
        "--bundle", bundle, "--model", workshop / "model", "--task", workshop / "task.yaml", "--axes", AXES,
    ]  # fmt: skip


@pytest.mark.parametrize("estimator", ["tangent", "antithetic"])
def test_a_run_stays_on_its_axes_and_is_replayed_from_its_journal(
    guided: Path, workshop: Path, tmp_path: Path, estimator: str
) -> None:
    out = tmp_path / "run"
    prge(
        "run", "--bundle", guided, "--train", workshop / "train.jsonl", "--task", workshop / "task.yaml",
        "--out", out, "--estimator", estimator, "--optimizer", "adam-norm", "--learning-rate", 0.02,
        "--steps", 12, "--threads", 1,
    )  # fmt: skip
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 12 and np.isfinite(losses).all() and len({*losses}) == 12
    guide, adapter = guide_of(open_bundle(guided)), read_lora(out / "final")
    assert guide is not None
    for name, axes in guide.axes.items():
        lora_b = adapter.lora_b[name]
        assert lora_b.any()
        np.testing.assert_allclose(axes.T @ np.linalg.pinv(axes.T) @ lora_b, lora_b, atol=1e-5)
    shutil.rmtree(out / "checkpoints")
    assert "the same bits" in prge("replay", out, "--out", tmp_path / "replayed").stdout


def test_rows_that_cant_be_used_leave_the_bundle_as_it_was(
    guided: Path, workshop: Path, tmp_path: Path
) -> None:
    before = (guided / GUIDE).read_bytes()
    (tmp_path / "other.jsonl").write_text(json.dumps({"other": "a"}) + "\n")
    done = prge("guide", *words(workshop, guided), "--data", tmp_path / "other.jsonl", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (guided / GUIDE).read_bytes() == before
