"""`prge plot`: loss and score of runs against steps, rows and seconds, from their metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.errors import ConfigError, RunError
from prge.files.curves import SCORES, Record, labels, series, smooth
from prge.files.run_folder import read_metrics, reported
from prge.pages.palette import COLOURS, MARKERS, drawing_library
from prge.verbs.bounds import bound_problems
from prge.verbs.settings import parse_settings

AXES = ("step", "rows", "seconds")


@dataclass(frozen=True)
class PlotSettings:
    """What to draw and where to."""

    runs: tuple[Path, ...]
    """Folders of runs, drawn over each other."""
    out: Path = Path("plot.png")
    """File to write; its ending chooses the format: png, svg or pdf."""
    smoothing: float = 0.9
    """Weight of the past in the smoothed training loss, 0 for none; the raw loss stays visible behind it."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if not self.runs:
            problems.append("no run is given")
        if self.out.suffix not in (".png", ".svg", ".pdf"):
            problems.append(f"--out is {self.out}, must end in .png, .svg or .pdf")
        if problems:
            raise ConfigError("there is nothing to draw so:", problems)


def main(argv: list[str]) -> int:
    """Entry of `prge plot`."""
    settings = parse_settings(PlotSettings, argv, "prge plot", ["runs"])
    draw(settings.runs, settings.out, settings.smoothing)
    print(settings.out)
    return 0


def draw(runs: Sequence[Path], out: Path, smoothing: float = 0.9) -> None:
    """Draw runs over each other into one picture of 1200 x 800 pixels: a column for each axis.

    The scores are a row below the losses, if any run has one.

    Raises:
        RunError: a folder is no run, no run has a step yet, or the picture can't be written.
        PrgeError: matplotlib is not installed.
    """
    records = [read_metrics(run) for run in runs]
    if not any(record.get("event") in ("step", "evaluation") for run in records for record in run):
        raise RunError(f"{', '.join(map(str, runs))}: nothing measured yet", remedy="wait for the first step")
    matplotlib = drawing_library()
    style = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False}
    with matplotlib.rc_context({**style, "axes.spines.right": False}):
        figure = matplotlib.figure.Figure(figsize=(12, 8), dpi=100, layout="constrained")
        score_label = _score_label(records)
        rows = 2 if score_label else 1
        panels = figure.subplots(rows, len(AXES), sharex="col", sharey="row", squeeze=False)
        for index, (label, run) in enumerate(zip(labels(runs), records, strict=True)):
            for column, axis in enumerate(AXES):
                _draw_run(panels[0][column], panels[-1][column], run, axis, index, label, smoothing)
        for column, axis in enumerate(AXES):
            panels[-1][column].set_xlabel({"step": "steps", "rows": "rows forwarded"}.get(axis, axis))
            for row in range(rows):
                panels[row][column].set_xlim(left=0)
                panels[row][column].margins(y=0.08)
        panels[0][0].set_ylabel("loss")
        if score_label:
            panels[-1][0].set_ylabel(score_label)
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(names)), frameon=False)
        with reported(out):
            figure.savefig(out)


def _draw_run(
    losses: Any, scores: Any, run: Sequence[Record], axis: str, index: int, label: str, smoothing: float
) -> None:
    colour = COLOURS[index % len(COLOURS)]
    marker = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
    x, loss = series(run, "step", axis, ["loss"])
    if x:
        if smoothing:
            losses.plot(x, loss, color=colour, alpha=0.2, linewidth=0.8)
        losses.plot(x, smooth(loss, smoothing), color=colour, linewidth=1.8, label=f"{label}: training")
    x, loss = series(run, "evaluation", axis, ["loss"])
    if x:
        losses.plot(x, loss, linestyle="--", linewidth=1.2, label=f"{label}: evaluation", **marker)
    x, score = series(run, "evaluation", axis, SCORES)
    if x:
        scores.plot(x, score, linewidth=1.5, label=label, **marker)


def _score_label(records: Sequence[Sequence[Record]]) -> str:
    """Names of the scores that the runs have, without any an empty text."""
    measured = {name for run in records for record in run for name in SCORES if record.get(name) is not None}
    return " or ".join(name.replace("_", " ") for name in SCORES if name in measured)
