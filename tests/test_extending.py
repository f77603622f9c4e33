"""The code of docs/how-to/extend.md runs as it stands on the demo's model and the stock engine."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import REPOSITORY, prge

PAGE = (REPOSITORY / "docs/how-to/extend.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def code_with(text: str) -> str:
    """Return the only Python block that contains a text."""
    (block,) = (block for block in blocks("python") if text in block)
    return block


@pytest.mark.whole
def test_estimator_optimizer_and_task_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server_export").symlink_to(REPOSITORY / "server_export")
    (export,) = blocks("bash")
    prge(*shlex.split(export.replace("\\\n", " "))[1:], cwd=tmp_path)
    (task,) = blocks("yaml")
    (tmp_path / "visit.yaml").write_text(task, encoding="utf-8")

    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {}
    for text in ("class RankedEvolution", "def fine_tune", "class Margin", "class Lion", "visit.yaml"):
        exec(code_with(text), page)

    # The two classes of balanced rows have a loss of log 2 by chance level.
    assert page["untrained"] > 0.95 * math.log(2)
    for name in ("by_ranks", "by_margin", "by_lion", "by_task"):
        assert page[name] < 0.8 * page["untrained"], name
    assert page["visit"].label_words == {"0": " dull", "1": " kind"}

    data = ["--task", page["demo"] / "task.yaml", "--data", page["demo"] / "test.jsonl"]
    prge(
        "eval",
        "--bundle",
        "ranked",
        "--adapter",
        "by-ranks/final",
        *data,
        "--json",
        "eval.json",
        cwd=tmp_path,
    )
    assert json.loads(Path("eval.json").read_text())["loss"] == pytest.approx(page["by_ranks"])


def test_the_estimator_has_thirty_lines() -> None:
    lines = code_with("class RankedEvolution").split("class RankedEvolution")[1].splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_new_operators_have_the_derivatives_of_pytorch() -> None:
    import torch

    from server_export.ir.operators import TABLE
    from tests.server_export.derive.jvp.graphs import Function, directions, jvp, random, with_tangents

    before = dict(TABLE)
    try:
        exec(code_with("aten.atan.default"), {})
        for function in (torch.atan, torch.log2):
            module, active = Function(function), (random(2, 5).exp(),)
            along = directions(active, queries=3)
            value, tangents = with_tangents(module, active)(*active, *along)
            expected = jvp(module, active, (), along)
            torch.testing.assert_close((value, tangents), expected, check_stride=False)
    finally:
        # Removed again: every row of the package has a test of its own.
        TABLE.clear()
        TABLE.update(before)
