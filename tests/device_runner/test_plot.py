"""Pictures of runs: what is drawn, from records as a run writes them."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from device_runner.plot import draw, main
from prge.errors import ConfigError, PrgeError, RunError
from prge.files.curves import SCORES, series
from prge.files.run_folder import METRICS, RunLog, read_metrics
from prge.pages.palette import COLOURS


def make_run(folder: Path, steps: int = 60, score: str = "accuracy", seed: int = 0) -> Path:
    """A run's metrics: a noisy falling loss, an evaluation every 20 steps."""
    noise = random.Random(seed)
    with RunLog(folder) as log:
        for n in range(steps):
            spent = {"rows": 16 * (n + 1), "seconds": 0.5 * (n + 1)}
            level = 0.3 + 0.5 * math.exp(-n / 20)
            if n % 20 == 0:
                log.metric({"event": "evaluation", "step": n, "loss": level, score: 1 - level, **spent})
            log.metric({"event": "step", "step": n, "loss": level + noise.gauss(0, 0.1), **spent})
    return folder


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def svg_text(path: Path) -> str:
    """Text that matplotlib writes as comments beside its glyphs."""
    return path.read_text(encoding="utf-8")


def test_several_runs_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate(["first", "second"])]
    out = tmp_path / "plot.png"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert png_size(out) == (1200, 800)


def test_axes_and_names_are_in_the_picture(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", score="f1")]
    out = tmp_path / "plot.svg"
    draw(runs, out)
    text = svg_text(out)
    for word in (
        "steps",
        "rows forwarded",
        "seconds",
        "loss",
        "accuracy or f1",
        "a/run: training",
        "b/run: eval",
    ):
        assert f"<!-- {word}" in text, word
    assert COLOURS[0].lower() in text
    assert COLOURS[1].lower() in text


def test_a_run_on_texts_shows_its_perplexity(tmp_path: Path) -> None:
    draw([make_run(tmp_path / "run", score="perplexity")], tmp_path / "plot.svg")
    text = svg_text(tmp_path / "plot.svg")
    assert "<!-- perplexity" in text
    assert "accuracy" not in text
    assert text.count('id="axes_') == 6
    steps, scores = series(read_metrics(tmp_path / "run"), "evaluation", "step", SCORES)
    assert (steps, scores[0]) == ([0, 20, 40], pytest.approx(0.2))


def test_without_any_score_there_is_no_panel_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunLog(folder) as log:
        log.metric({"event": "step", "step": 1, "rows": 16, "seconds": 1.0, "loss": 0.7})
    draw([folder], tmp_path / "plot.svg")
    text = svg_text(tmp_path / "plot.svg")
    assert "accuracy" not in text
    assert text.count('id="axes_') == 3


@pytest.mark.parametrize(
    "records",
    [
        [{"event": "evaluation", "step": 0, "rows": 8, "seconds": 1.0, "loss": 0.7, "accuracy": 0.5}],
        [{"event": "step", "step": 0, "rows": 8, "seconds": 1.0, "loss": 0.7}],
        [{"event": "step", "step": n, "rows": n, "seconds": n, "loss": (None, 2.0)[n]} for n in (0, 1)],
        [{"event": "step", "step": 0, "loss": 0.7}],
    ],
    ids=["evaluation only", "one step", "loss not finite", "no rows or seconds"],
)
def test_sparse_records(tmp_path: Path, records: Sequence[dict[str, Any]]) -> None:
    (tmp_path / METRICS).write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    draw([tmp_path], tmp_path / "plot.png")
    assert png_size(tmp_path / "plot.png") == (1200, 800)


def test_more_runs_than_colours(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{n}", steps=3) for n in range(len(COLOURS) + 1)]
    draw(runs, tmp_path / "plot.png")


def test_run_without_records(tmp_path: Path) -> None:
    (tmp_path / METRICS).touch()
    with pytest.raises(RunError, match="nothing measured yet"):
        draw([tmp_path], tmp_path / "plot.png")


def test_picture_that_can_not_be_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with pytest.raises(RunError, match="can't be written: No such file"):
        draw([run], tmp_path / "nowhere" / "plot.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PrgeError, match="pip install 'matplotlib>="):
        draw([run], tmp_path / "plot.png")


def test_settings_that_contradict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main([str(tmp_path), "--smoothing", "1", "--out", "plot.gif"])
    assert len(caught.value.problems) == 2
