"""A run whose rows pay for their own length: the same numbers, the same bits after any interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

from prge.journal import Journal
from tests.end_to_end.conftest import export, prge, write_rows

pytestmark = [pytest.mark.export, pytest.mark.slow]

STEPS = 12


@pytest.fixture(scope="module")
def bundle(workshop: Path, deep_model: Path) -> Path:
    """A tangent program of the upper block, cut from what is below, for rows of 12 and 32 tokens."""
    words = ["--adapt-layers", "top:1", "--trunk-cache", "--lengths", 12]
    return export(deep_model, workshop / "lengths", *words)


@pytest.fixture(scope="module")
def rows(workshop: Path) -> Path:
    """A folder with rows of 4 to 20 tokens."""
    folder = workshop / "rows"
    folder.mkdir()
    texts = [" ".join(["ab", "cd", "ef"][: 1 + i % 3] * (1 + i % 2)) for i in range(36)]
    table: list[dict[str, object]] = [{"text": text, "label": i // 2 % 2} for i, text in enumerate(texts)]
    write_rows(folder / "train.jsonl", table[:24])
    write_rows(folder / "dev.jsonl", table[24:])
    return folder


def train(bundle: Path, workshop: Path, rows: Path, out: Path, *words: object) -> str:
    """Run some epochs; what the run said."""
    prge(
        "run", "--bundle", bundle, "--train", rows / "train.jsonl", "--dev", rows / "dev.jsonl", "--task",
        workshop / "task.yaml", "--out", out, "--steps", STEPS, "--evaluate-every", 6,
        "--checkpoint-every", 4, "--learning-rate", 0.01, "--threads", 1, *words,
    )  # fmt: skip
    return (out / "log.txt").read_text()


def scalars(run: Path) -> np.ndarray:  # type: ignore[type-arg]
    with Journal(run / "journal.jsonl", writable=False) as journal:
        records = [journal.step(step) for step in range(journal.steps)]
        return np.array([record["scalars"] for record in records if record is not None])


@pytest.fixture(scope="module")
def run(bundle: Path, workshop: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all lengths."""
    out = tmp_path_factory.mktemp("runs") / "run"
    said = train(bundle, workshop, rows, out)
    assert "every row is computed at" not in said
    return out


@pytest.fixture(scope="module")
def fixed(bundle: Path, workshop: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the longest alone, for want of memory."""
    out = tmp_path_factory.mktemp("runs") / "fixed"
    said = train(bundle, workshop, rows, out, "--program-bytes", 0)
    assert "every row is computed at 32 tokens: programs of all lengths need" in said
    return out


def test_scalars_are_those_of_the_longest(run: Path, fixed: Path) -> None:
    np.testing.assert_allclose(scalars(run)[:4], scalars(fixed)[:4], atol=1e-6)
    np.testing.assert_allclose(scalars(run), scalars(fixed), atol=1e-5)
    assert np.abs(scalars(run)).max() > 1e-2


def test_short_rows_are_kept_short(run: Path, fixed: Path) -> None:
    sizes = {path.stat().st_size for path in (run / "trunk_cache").iterdir()}
    assert len(sizes) > 1
    assert max(sizes) <= min(path.stat().st_size for path in (fixed / "trunk_cache").iterdir())


@pytest.mark.parametrize("cache", [True, False], ids=["with cache", "cache lost"])
def test_a_resumed_run_has_the_same_bits(run: Path, tmp_path: Path, cache: bool) -> None:
    """Whatever the memory that it is allowed then, and whatever is still in the cache."""
    out = tmp_path / "run"
    shutil.copytree(run, out)
    if not cache:
        shutil.rmtree(out / "trunk_cache")
    lines = (out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    steps = [index for index, line in enumerate(lines) if b'"scalars"' in line]
    (out / "journal.jsonl").write_bytes(b"".join(lines[: steps[5]]))
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > 5:
            shutil.rmtree(folder)
    shutil.rmtree(out / "final")
    prge("run", "--resume", out, "--program-bytes", 0)
    assert (out / "journal.jsonl").read_bytes() == (run / "journal.jsonl").read_bytes()
    name = "final/adapter_model.safetensors"
    assert (out / name).read_bytes() == (run / name).read_bytes()


def test_a_run_keeps_the_lengths_that_it_began_with(run: Path) -> None:
    done = prge("run", "--resume", run, "--lengths", 32, check=False)
    assert done.returncode != 0
    assert "lengths was [12, 32], is [32]" in done.stderr


def test_the_engines_agree_with_weights_shared_and_apart(
    run: Path, bundle: Path, workshop: Path, rows: Path, tmp_path: Path
) -> None:
    train(bundle, workshop, rows, tmp_path / "run", "--engine", "torch")
    assert (tmp_path / "run/journal.jsonl").read_bytes() == (run / "journal.jsonl").read_bytes()


def test_scores_come_in_the_order_of_the_rows(
    run: Path, bundle: Path, workshop: Path, rows: Path, tmp_path: Path
) -> None:
    found = []
    for name, words in (("all", []), ("longest", ["--program-bytes", "0"])):
        path = tmp_path / f"{name}.jsonl"
        prge(
            "eval", "--bundle", bundle, "--data", rows / "dev.jsonl", "--task", workshop / "task.yaml",
            "--adapter", run, "--predictions", path, *words,
        )  # fmt: skip
        found.append([json.loads(line) for line in path.read_text().splitlines()])
    assert [line["row"] for line in found[0]] == list(range(1, 13))
    np.testing.assert_allclose(*([line["loss"] for line in lines] for lines in found), atol=1e-5)
