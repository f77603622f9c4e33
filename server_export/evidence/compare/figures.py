"""Draw the charts of a report: loss against seconds and rows."""

from __future__ import annotations

from prge.report.charts import Line, line_chart
from server_export.evidence.compare.outcome import Outcome, Result, has_quality

_AXES = {
    "seconds": "seconds of training",
    "forward_passes": "forward passes; a backward pass counts as two forward passes",
}


def draw_all(result: Result, outcome: Outcome) -> dict[str, str]:
    """Return SVG texts by name, without charts that have no data."""
    charts = {f"loss-{axis}": _curves(result, outcome, axis) for axis in _AXES if has_quality(result)}
    return {name: svg for name, svg in charts.items() if svg}


def _curves(result: Result, outcome: Outcome, axis: str) -> str:
    """Draw mean and range over seeds at the evaluations that all seeds have; the start is a level."""
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
    return line_chart(lines, _AXES[axis], "loss on development rows", log=True, levels=levels)
