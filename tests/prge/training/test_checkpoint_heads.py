"""Classes of rows in the order of a checkpoint's own head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prge.training.checkpoint_heads import load_bundle_task, load_head

LABELS = ("NEGATIVE", "positive")


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        ('{positive: " good", negative: " bad"}', ("negative", "positive")),
        ('{b: " Positive", a: " Negative"}', ("a", "b")),
        ('{"1": " good", "0": " bad"}', ("0", "1")),
        # The task doesn't name exactly the classes of the head, so its own order stays.
        ('{"2": " good", "1": " bad"}', ("2", "1")),
        ('{positive: " good", other: " bad"}', ("positive", "other")),
        ('{positive: " good", negative: " bad", neutral: " so"}', ("positive", "negative", "neutral")),
    ],
)
def test_classes_come_in_the_order_of_the_head(tmp_path: Path, words: str, classes: tuple[str, ...]) -> None:
    (tmp_path / "task.yaml").write_text(f'name: own\ntemplate: "{{text}}"\nlabel_words: {words}\n')
    bundle: Any = SimpleNamespace(labels=LABELS, adapter=tmp_path)
    task = load_bundle_task(bundle, tmp_path / "task.yaml")
    assert task is not None and task.classes == classes
    without: Any = SimpleNamespace(labels=(), adapter=tmp_path)
    assert load_head(without, tmp_path, task, len(classes)) is None
    assert load_head(bundle, tmp_path, None, 2) is None
