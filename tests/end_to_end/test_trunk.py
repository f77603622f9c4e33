"""A run on a bundle with a trunk: every row goes through the trunk once, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

from prge.journal import Journal
from tests.end_to_end.conftest import export, prge

pytestmark = [pytest.mark.export, pytest.mark.slow]

# 24 rows of 16 texts, 4 a step: an epoch is 6 steps.
TEXTS, STEPS, BATCH = 16, 18, 4


def train(bundle: Path, workshop: Path, out: Path, *words: object) -> str:
    """Run 3 epochs; what the run said at its end."""
    prge(
        "run", "--bundle", bundle, "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--steps", STEPS, "--evaluate-every", 9,
        "--learning-rate", 0.01, "--threads", 1, *words,
    )  # fmt: skip
    return (out / "log.txt").read_text()


def scalars(run: Path) -> np.ndarray:  # type: ignore[type-arg]
    with Journal(run / "journal.jsonl") as journal:
        records = [journal.step(step) for step in range(journal.steps)]
        return np.array([record["scalars"] for record in records if record is not None])


def files(run: Path) -> list[Path]:
    return sorted((run / "trunk_cache").iterdir())


@pytest.fixture(scope="module", params=["trunk_bundle", "stack_trunk_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def run(bundle: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a cache that has room for all rows."""
    out = tmp_path_factory.mktemp("runs") / "run"
    train(bundle, workshop, out)
    return out


def test_the_first_epoch_computes_and_the_others_read(run: Path) -> None:
    reused = STEPS * BATCH - TEXTS
    assert f"trunk: {TEXTS} rows computed, {reused} from the cache" in (run / "log.txt").read_text()
    assert len(files(run)) == TEXTS


def test_a_cache_changes_no_bit(run: Path, bundle: Path, workshop: Path, tmp_path: Path) -> None:
    said = train(bundle, workshop, tmp_path / "run", "--trunk-cache-bytes", 0)
    computed = int(said.partition("trunk: ")[2].split()[0])
    # Equal rows of one call are computed once all the same.
    assert TEXTS < computed <= STEPS * BATCH
    assert files(tmp_path / "run") == []
    assert np.array_equal(scalars(tmp_path / "run"), scalars(run))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "run/final" / name).read_bytes() == (run / "final" / name).read_bytes()


def test_scalars_are_those_of_the_program_that_was_not_cut(
    run: Path, bundle: Path, deep_model: Path, workshop: Path, tmp_path: Path
) -> None:
    contract = json.loads((bundle / "manifest.json").read_text())["contract"]
    estimator = "tangent" if contract["kind"] == "tangent" else "antithetic"
    whole = export(
        deep_model, tmp_path / "whole", "--estimator", estimator, "--adapt-layers", "top:1"
    )  # fmt: skip
    train(whole, workshop, tmp_path / "run")
    np.testing.assert_allclose(scalars(tmp_path / "run"), scalars(run), atol=1e-6)
    assert np.abs(scalars(run)).max() > 1e-2


def test_damaged_and_missing_rows_are_computed_again(
    run: Path, bundle: Path, workshop: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(bundle, workshop, out)
    first, second, *_ = files(out)
    first.write_bytes(first.read_bytes()[:-4] + b"\x00\x01\x02\x03")
    second.unlink()
    journal = (out / "journal.jsonl").read_bytes()
    # As if it had been killed after its last checkpoint: all but the first steps are measured again.
    lines = journal.splitlines(keepends=True)
    steps = [index for index, line in enumerate(lines) if b'"step"' in line and b'"scalars"' in line]
    (out / "journal.jsonl").write_bytes(b"".join(lines[: steps[2]]))
    prge("run", "--resume", out)
    assert np.array_equal(scalars(out), scalars(run))
    assert (out / "journal.jsonl").read_bytes() == journal
    assert "trunk: 2 rows computed" in (out / "log.txt").read_text()


def test_a_small_cache_changes_the_time_and_nothing_else(
    run: Path, bundle: Path, workshop: Path, tmp_path: Path
) -> None:
    room = 3 * files(run)[0].stat().st_size
    train(bundle, workshop, tmp_path / "run", "--trunk-cache-bytes", room)
    assert len(files(tmp_path / "run")) == 3
    assert np.array_equal(scalars(tmp_path / "run"), scalars(run))


def test_float16_takes_half_and_stays_close(run: Path, bundle: Path, workshop: Path, tmp_path: Path) -> None:
    train(bundle, workshop, tmp_path / "run", "--trunk-cache-dtype", "float16")
    assert files(tmp_path / "run")[0].stat().st_size < 0.6 * files(run)[0].stat().st_size
    found, expected = scalars(tmp_path / "run")[0], scalars(run)[0]
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())


def test_a_bundle_without_trunk_has_no_precision_to_choose(workshop: Path, tmp_path: Path) -> None:
    done = prge(
        "run", "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--task",
        workshop / "task.yaml", "--out", tmp_path / "run", "--trunk-cache-dtype", "float16", check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "the bundle has no trunk" in done.stderr
