"""The pictures of a report, as SVG whose text takes the colour of the page that it stands in."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prge.pages.palette import COLOURS, MARKERS, drawing_library
from server_export.evidence.compare.outcome import Outcome, Result, has_quality
from server_export.evidence.compare.records import Point, read_curve

# Stands for the colour of the text around the picture; matplotlib takes no CSS keyword.
_TEXT_COLOUR = "#010203"
_PAGE_COLOUR = "currentColor"
_FILE_COLOUR = "#24292f"
_WIDTH = 5.2


def draw_all(result: Result, outcome: Outcome) -> dict[str, str]:
    """SVG texts by name: quality against seconds and rows, memory, time to target. For use inside a page.

    Raises:
        PrgeError: matplotlib is not installed.
    """
    matplotlib = drawing_library()
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "prge",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT_COLOUR
        ),
    }
    with matplotlib.rc_context(style):
        quality = "loss" if outcome.target.quality == "loss" else "accuracy"
        seconds, rows = "seconds of training", "rows computed, a backward counted as two forwards"
        drawn = {
            "quality-seconds": _curves(result, outcome, quality, lambda point: point.seconds, seconds),
            "quality-rows": _curves(result, outcome, quality, lambda point: point.rows, rows),
            "memory": _memory(result, outcome),
            "time-to-target": _time_to_target(result, outcome),
        }
    return {name: _unique(svg, name) for name, svg in drawn.items() if svg}


def for_file(svg: str) -> str:
    """The same picture for a file of its own, with dark text on white."""
    plain = svg.replace(_PAGE_COLOUR, _FILE_COLOUR)
    return plain.replace("<svg ", '<svg style="background:#fff" ', 1)


def _curves(
    result: Result, outcome: Outcome, quality: str, position: Callable[[Point], float], label: str
) -> str:
    names = [name for name, method in result["methods"].items() if method["runs"]]
    if not names or not has_quality(result):
        return ""
    figure, axes = _figure(3.4 + 0.17 * math.ceil(len(names) / 2))
    starts = []
    for index, name in enumerate(result["methods"]):
        if name not in names:
            continue
        curves = [read_curve(run) for run in result["methods"][name]["runs"]]
        x, mean, low, high = _mean_curve(curves, quality, position)
        starts += [mean[0]] if len(mean) else []
        # The start has no place on a logarithmic axis; a line shows it.
        shown = x > 0
        look = _look(index, result["methods"][name]["forward_only"])
        axes.plot(x[shown], mean[shown], label=name, markersize=3.5, linewidth=1.4, **look)
        axes.fill_between(x[shown], low[shown], high[shown], color=look["color"], alpha=0.12, linewidth=0)
    _logarithmic(axes)
    if starts:
        axes.axhline(float(np.mean(starts)), color=_TEXT_COLOUR, linewidth=0.8, linestyle=":")
    if outcome.target.value is not None:
        axes.axhline(outcome.target.value, color=_TEXT_COLOUR, linewidth=0.8, linestyle=(0, (6, 3)))
        axes.annotate(
            "target", (0.01, outcome.target.value), xycoords=("axes fraction", "data"),
            ha="left", va="bottom", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel(label)
    axes.set_ylabel(f"{quality} on development rows")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return _svg(figure)


def _logarithmic(axes: Any) -> None:
    """Logarithmic, with few and plain numbers: minor labels run into each other over a few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _memory(result: Result, outcome: Outcome) -> str:
    parts = (
        ("peak_mb", "peak over an idle runner", 1.0),
        ("activation_mb", "steps, over the loaded model", 0.4),
    )
    columns = {key: outcome.column(key) for key, _, _ in parts}
    names = [name for name in result["methods"] if any(columns[key][name].mean for key in columns)]
    if not names:
        return ""
    figure, axes = _figure(1.1 + 0.48 * len(names))
    for part, (key, label, alpha) in enumerate(parts):
        for row, name in enumerate(names):
            mean = columns[key][name].mean
            if mean is None:
                continue
            place = row + 0.4 * part - 0.2
            colour = COLOURS[0] if result["methods"][name]["forward_only"] else COLOURS[1]
            axes.barh(place, mean, height=0.36, color=colour, alpha=alpha)
            axes.annotate(f" {_short(mean)}", (mean, place), va="center", fontsize=8, annotation_clip=False)
        axes.barh([np.nan], [np.nan], color="#808080", alpha=alpha, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("MB")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return _svg(figure)


def _time_to_target(result: Result, outcome: Outcome) -> str:
    column = outcome.column("seconds_to_target")
    names = [name for name, method in result["methods"].items() if method["runs"]]
    if not any(column[name].values for name in names):
        return ""
    figure, axes = _figure(1.1 + 0.34 * len(names))
    for row, name in enumerate(names):
        spread = column[name]
        look = _look(list(result["methods"]).index(name), result["methods"][name]["forward_only"])
        values = [value for value in spread.values.values() if value > 0]
        if values:
            middle = float(np.mean(values))
            axes.plot([min(values), max(values)], [row, row], color=look["color"], linewidth=2)
            marker = "<" if spread.bounded else look["marker"]
            axes.plot([middle], [row], color=look["color"], marker=marker, linestyle="")
        if spread.censored:
            longest = max(run["training_seconds"] for run in result["methods"][name]["runs"])
            axes.plot([longest], [row], marker=">", color=look["color"], markerfacecolor="none")
            axes.annotate(
                f"not reached: {spread.censored} of {spread.censored + len(spread.values)}",
                (longest, row), va="bottom", fontsize=7, annotation_clip=False,
                xytext=(4, 3), textcoords="offset points", ha="right",
            )  # fmt: skip
    _logarithmic(axes)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of training to the target")
    return _svg(figure)


def _mean_curve(
    curves: Sequence[Sequence[Point]], quality: str, position: Callable[[Point], float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Position, mean, lowest and highest quality over seeds at the evaluations that all of them have."""
    count = min(map(len, curves))
    x = np.array([[position(point) for point in points[:count]] for points in curves], float)
    y = np.array([[point.value(quality) for point in points[:count]] for points in curves], float)
    return x.mean(0), y.mean(0), y.min(0), y.max(0)


def _look(index: int, forward_only: bool) -> dict[str, Any]:
    colour = COLOURS[index % len(COLOURS)]
    return {
        # Black would vanish on a dark page.
        "color": _TEXT_COLOUR if colour == "#000000" else colour,
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
        "linestyle": "-" if forward_only else "--",
    }


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
    return figure, axes


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    # No date, so that the same figures give the same bytes.
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :].replace(_TEXT_COLOUR, _PAGE_COLOUR)


def _unique(svg: str, name: str) -> str:
    """The picture with names of its own, since a page's ids are those of all its pictures."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", re.sub(r' height="[^"]*pt"', "", svg, count=1))


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


Pictures = Mapping[str, str]
