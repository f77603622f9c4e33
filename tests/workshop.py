"""A tiny model with its bundle and rows, shared by most tests of real programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.tiny_models import save_model
from tests.verbs import prge


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def export(model: Path, bundle: Path, *arguments: object) -> Path:
    """Export a model for rows of 32 tokens."""
    prge(
        "export", "--model", model, "--out", bundle, "--target-modules", "all-linear", "--rank", 2,
        "--sequence-length", 32, *arguments,
    )  # fmt: skip
    return bundle


def bits(run: Path) -> list[bytes]:
    """Return the bytes of a run's journal and adapter."""
    return [(run / name).read_bytes() for name in ("journal.jsonl", "final/adapter_model.safetensors")]


FolderBuilder = Callable[[str, Callable[[Path], object]], Path]


def fill_workshop(folder: Path) -> None:
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
