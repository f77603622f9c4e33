"""Real bundles and their rows, exported once for all end-to-end tests of a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.tiny_models import SHALLOW, save_model
from tests.verbs import prge


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def export(model: Path, bundle: Path, *words: object) -> Path:
    """Export a model for rows of 32 tokens."""
    prge(
        "export", "--model", model, "--out", bundle, "--target-modules", "all-linear", "--rank", 2,
        "--sequence-length", 32, *words,
    )  # fmt: skip
    return bundle


Made = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def workshop(made_once: Made) -> Path:
    """A folder with `model` of two blocks, `bundle`, `train.jsonl`, `dev.jsonl` and `task.yaml`."""
    return made_once("workshop", _fill_workshop)


def _fill_workshop(folder: Path) -> None:
    save_model(folder / "model", "llama")
    export(folder / "model", folder / "bundle")
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"text": f"{words[i % 4]} {words[i // 4 % 4]}", "label": i % 4 // 2} for i in range(40)]
    write_rows(folder / "train.jsonl", rows[:24])
    write_rows(folder / "dev.jsonl", rows[24:])
    (folder / "task.yaml").write_text(
        'name: letters\ntemplate: "{text} ?"\nlabel_words: {0: " no", 1: " yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )


@pytest.fixture(scope="session")
def upper_bundle(workshop: Path, made_once: Made) -> Path:
    """The workshop's model with int4 weights and an adapter on its upper block alone, for exact gradients."""
    upper = ["--adapt-layers", "top:1", "--quantize", "8da4w", "--roles", "back"]
    return made_once("upper", lambda folder: export(workshop / "model", folder / "upper", *upper)) / "upper"


@pytest.fixture(scope="session")
def encoder(made_once: Made) -> Path:
    """The bundle of a tiny BERT."""

    def fill(folder: Path) -> None:
        save_model(folder / "model", "bert", **SHALLOW["bert"])
        export(folder / "model", folder / "bundle", "--roles", "tangent", "back")

    return made_once("encoder", fill) / "bundle"


@pytest.fixture
def run_words(workshop: Path, tmp_path: Path) -> list[object]:
    """Words of a short `prge run` into `tmp_path / "run"`."""
    return [
        "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", tmp_path / "run", "--steps", 12, "--evaluate-every", 4,
        "--checkpoint-every", 5, "--learning-rate", 0.01,
    ]  # fmt: skip
