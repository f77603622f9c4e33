"""The pictures of a report: loss against seconds and rows, and memory."""

from __future__ import annotations

from prge.pages.charts import Bar, Line, bar_chart, line_chart
from server_export.evidence.compare.outcome import Outcome, Result, has_quality

SECONDS, ROWS = "seconds of training", "rows computed, a backward counted as two forwards"


def draw_all(result: Result, outcome: Outcome) -> dict[str, str]:
    """SVG texts by name; one that has nothing to show is left out."""
    drawn = {"memory": _memory(result, outcome)}
    if has_quality(result):
        drawn = {
            "loss-seconds": _curves(result, outcome, "seconds", SECONDS),
            "loss-rows": _curves(result, outcome, "rows", ROWS),
            **drawn,
        }
    return {name: svg for name, svg in drawn.items() if svg}


def _curves(result: Result, outcome: Outcome, axis: str, label: str) -> str:
    """Mean and range over seeds at the evaluations that all seeds have; the start is a level."""
    lines, starts = [], []
    for hue, (name, method) in enumerate(result["methods"].items()):
        points, band = [], []
        # Up to the shortest curve.
        for evaluations in zip(*(run["curve"] for run in method["runs"]), strict=False):
            losses = [point["loss"] for point in evaluations if point["loss"] is not None]
            if losses:
                x = sum(point[axis] for point in evaluations) / len(evaluations)
                points.append((x, sum(losses) / len(losses)))
                band.append((x, min(losses), max(losses)))
        starts += [y for _, y in points[:1]]
        lines.append(Line(name, points, hue, "line" if method["forward_only"] else "marked", band))
    levels = {"start": sum(starts) / len(starts)} if starts else {}
    if outcome.target.value is not None:
        levels["target"] = outcome.target.value
    return line_chart(lines, label, "loss on development rows", log=True, levels=levels)


def _memory(result: Result, outcome: Outcome) -> str:
    """Two bars a method: the whole peak, and fainter what the steps take."""
    bars = []
    for name, method in result["methods"].items():
        hue = 0 if method["forward_only"] else 1
        peak, steps = (outcome.figures[name][key].mean for key in ("peak_mb", "activation_mb"))
        if peak is not None:
            bars.append(Bar(f"{name}: peak over an idle runner", peak, hue))
        if steps is not None:
            bars.append(Bar(f"{name}: steps, over the loaded model", steps, hue, "faint"))
    return bar_chart(bars, "MB")
