"""Backpropagation on the stock engine, as a user calls it."""

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

from prge.journal import Journal
from prge.peft import read_arrays
from tests.end_to_end.conftest import REPOSITORY, export, prge, write_rows
from tests.tiny_models import SHALLOW, save_model

pytestmark = pytest.mark.export


def words_of(workshop: Path, bundle: Path, out: Path, steps: int = 40) -> list[object]:
    return [
        "run", "--bundle", bundle, "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--steps", steps, "--evaluate-every", 20,
        "--checkpoint-every", 15, "--learning-rate", 0.02, "--threads", 1,
    ]  # fmt: skip


def losses(run: Path) -> list[float]:
    with Journal(run / "journal.jsonl", writable=False) as journal:
        return [record["loss"] for record in journal.records if record["kind"] == "evaluation"]


@pytest.fixture(scope="module")
def done(workshop: Path, exact_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; the bundle says which estimator."""
    out = tmp_path_factory.mktemp("runs") / "done"
    prge(*words_of(workshop, exact_bundle, out))
    return out


def test_it_learns_and_says_what_it_did(done: Path) -> None:
    before, *_, after = losses(done)
    assert after < 0.2 * before
    summary = json.loads((done / "run.json").read_text())
    assert summary["run"]["settings"]["estimator"] == "exact"
    assert summary["train"]["rows"] == 40 * 4 * 3
    steps = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert all(record["gradient_norm"] > 0 for record in steps if record["event"] == "step")


def test_replay_makes_the_same_bits(done: Path, tmp_path: Path) -> None:
    assert "the same bits" in prge("replay", done, "--out", tmp_path / "replayed").stdout
    first, second = (
        read_arrays(p / "adapter_model.safetensors") for p in (done / "final", tmp_path / "replayed")
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_killed_and_resumed_it_ends_in_the_same_bits(
    done: Path, workshop: Path, exact_bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "prge.cli", *map(str, words_of(workshop, exact_bundle, out))]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = out / "journal.jsonl"
    while process.poll() is None and not (
        journal.is_file() and journal.read_bytes().count(b'"step","step"') > 5
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    prge("run", "--resume", out)
    for name in ("final/adapter_model.safetensors", "journal.jsonl"):
        assert (out / name).read_bytes() == (done / name).read_bytes(), name


def test_calls_add_up_batches_and_clipping_shortens(
    workshop: Path, exact_bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    prge(*words_of(workshop, exact_bundle, out, steps=6), "--calls", 2, "--clip", 0.01)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = [record["gradient_norm"] for record in steps if record["event"] == "step"]
    np.testing.assert_allclose(norms, 0.01, rtol=1e-5)
    with Journal(out / "journal.jsonl", writable=False) as journal:
        record = journal.step(0)
    assert record is not None
    assert len(record["rows"]) == 8


def test_above_a_cached_trunk_quantized_and_as_long_as_the_rows(
    workshop: Path, exact_trunk_bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    prge(*words_of(workshop, exact_trunk_bundle, out, steps=60))
    before, *_, after = losses(out)
    assert after < 0.5 * before
    # There are 16 different rows.
    assert "trunk: 16 rows computed, 224 from the cache" in (out / "log.txt").read_text()


def test_an_encoder_learns_under_its_head(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert", **SHALLOW["bert"])
    bundle = export(tmp_path / "model", tmp_path / "bundle", "--estimator", "exact", "--classes", 2)
    letters = np.random.default_rng(0).integers(0, 20, (160, 6))
    write_rows(
        tmp_path / "train.jsonl",
        [
            {
                "text": " ".join(chr(97 + letter) for letter in row),
                "label": int(row[:2].sum() > row[2:4].sum()),
            }
            for row in letters
        ],
    )
    (tmp_path / "task.yaml").write_text(
        'name: letters\ntemplate: "{text}"\nlabel_words: {0: "no", 1: "yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )
    words = words_of(tmp_path, bundle, tmp_path / "run", steps=40)
    # The rows that it learns, by the head that they are learnt under: a head of random states can't do more.
    words[words.index("--dev") + 1] = tmp_path / "train.jsonl"
    words[words.index("--learning-rate") + 1] = 3e-4
    prge(*words, "--head-folds", 0, "--calls", 4)
    before, *_, after = losses(tmp_path / "run")
    assert after < 0.96 * before


def test_what_has_no_meaning_for_it_is_refused(workshop: Path, exact_bundle: Path, tmp_path: Path) -> None:
    words = words_of(workshop, exact_bundle, tmp_path / "run")
    for more, message in (
        (["--queries", 4], "--queries belongs to --estimator tangent, antithetic or one-sided"),
        (["--epsilon", 0.1], "--epsilon belongs to --estimator antithetic or one-sided"),
        (["--estimator", "tangent"], "the bundle's program is for exact"),
    ):
        refused = prge(*words, *more, check=False)
        assert refused.returncode == 2, more
        assert message in refused.stderr
    probed = prge(
        "probe",
        exact_bundle,
        "--data",
        workshop / "train.jsonl",
        "--task",
        workshop / "task.yaml",
        check=False,
    )
    assert probed.returncode == 2
    assert "there is nothing to probe" in probed.stderr
    assert not (tmp_path / "run").exists()


def test_inspect_shows_the_way_back_and_its_memory(exact_bundle: Path, workshop: Path) -> None:
    text = prge("inspect", exact_bundle).stdout
    assert "4 forward and backward: as much work as 8" in text
    assert "candidates of an example" in text
    exact, tangent = (
        json.loads(prge("inspect", folder, "--json").stdout) for folder in (exact_bundle, workshop / "bundle")
    )
    # The transposed weights are a part of the program, and of what a run takes.
    sizes = [report["lowering"]["constant_bytes"] for report in (exact, tangent)]
    assert sizes[0] > 1.3 * sizes[1]
    assert exact["memory"]["native"]["weights_bytes"] == sizes[0]
    assert exact["verification"]["workspace_bytes"]["forward"] > 0


def test_estimate_says_what_the_export_will_take(workshop: Path, exact_bundle: Path) -> None:
    found = prge(
        "estimate", "--model", workshop / "model", "--estimator", "exact", "--target-modules", "all-linear",
        "--rank", 2, "--batch-size", 4, "--sequence-length", 32, "--positions", 4, "--json", "--no-calibrate",
    ).stdout  # fmt: skip
    estimate = json.loads(found[found.index("{") :])
    assert estimate["step"]["rows"] == 12
    assert estimate["step"]["calls"] == 1
    size = (exact_bundle / "program.pte").stat().st_size
    assert 0.7 * size < estimate["program_bytes"] < 1.5 * size
