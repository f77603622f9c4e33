"""The pictures of a report: quality against seconds and rows, memory, time to the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prge.pages.charts import Bar, Line, bar_chart, line_chart
from server_export.evidence.compare.outcome import Outcome, Result, has_quality
from server_export.evidence.compare.records import Point, read_curve


def draw_all(result: Result, outcome: Outcome) -> dict[str, str]:
    """SVG texts by name; one that has nothing to show is left out."""
    drawn = {"memory": _memory(result, outcome)}
    if has_quality(result):
        seconds, rows = "seconds of training", "rows computed, a backward counted as two forwards"
        drawn = {
            "quality-seconds": _curves(result, outcome, lambda point: point.seconds, seconds),
            "quality-rows": _curves(result, outcome, lambda point: point.rows, rows),
            "time-to-target": _time_to_target(result, outcome),
            **drawn,
        }
    return {name: svg for name, svg in drawn.items() if svg}


def _curves(result: Result, outcome: Outcome, position: Callable[[Point], float], label: str) -> str:
    """Mean and range over seeds at the evaluations that all seeds have; the start is a level."""
    target, lines, starts = outcome.target, [], []
    for index, (name, method) in enumerate(result["methods"].items()):
        points, band = [], []
        # Up to the shortest curve.
        for evaluations in zip(*(read_curve(run) for run in method["runs"]), strict=False):
            x = sum(map(position, evaluations)) / len(evaluations)
            values = [point.value(target.quality) for point in evaluations]
            points.append((x, sum(values) / len(values)))
            band.append((x, min(values), max(values)))
        starts += [y for _, y in points[:1]]
        lines.append(Line(name, points, index, "line" if method["forward_only"] else "marked", band))
    levels = {"start": sum(starts) / len(starts)} if starts else {}
    if target.value is not None:
        levels["target"] = target.value
    return line_chart(lines, label, f"{target.quality} on development rows", log=True, levels=levels)


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


def _time_to_target(result: Result, outcome: Outcome) -> str:
    """Mean and range over the seeds that got there."""
    bars = []
    for name, spread in outcome.column("seconds_to_target").items():
        if not result["methods"][name]["runs"]:
            continue
        notes = ["at most"] if spread.bounded else []
        if spread.censored:
            notes.append(f"not reached: {spread.censored} of {spread.censored + len(spread.values)}")
        bar = Bar(name, None, 0 if result["methods"][name]["forward_only"] else 1, note=", ".join(notes))
        if spread.values:
            mean = sum(spread.values.values()) / len(spread.values)
            bar = replace(bar, value=mean, low=spread.lowest, high=spread.highest)
        bars.append(bar)
    has_any = any(bar.value is not None for bar in bars)
    return bar_chart(bars, "seconds of training to the target") if has_any else ""
