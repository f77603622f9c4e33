"""Draw the result of attacks: the share of recovered tokens, compared with guesses without a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prge.report.charts import Line, LineStyle, arrange_charts, line_chart, standalone_svg

_PANELS = {
    "length": "unknown tokens of a row",
    "steps": "steps on the same row",
    "queries": "projected gradients of a step",
    "batch": "rows of a report",
    "rank": "rank",
    "noise": "noise, relative to the largest effect of a row",
}
_REPORTS = ("exact", "top", "scalars")

Cell = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> str:
    """Return an SVG of a result, with a panel for each varied setting: mean and range over seeds."""
    varied = {cell["varied"] for cell in result["table"]}
    names = [name for name in _PANELS if name in varied] or ["length"]
    return standalone_svg(arrange_charts([_panel(result, name) for name in names]))


def _panel(result: Mapping[str, Any], name: str) -> str:
    candidates = [cell for cell in result["table"] if cell["varied"] in ("", name)]
    # Settings of scalars don't apply to other reports.
    reports = {cell["report"] for cell in candidates if cell["varied"]} or set(_REPORTS)
    cells = [cell for cell in candidates if cell["report"] in reports]
    values = sorted({cell[name] for cell in cells})
    lines = []
    for hue, report in enumerate(_REPORTS):
        by_value = {cell[name]: cell for cell in cells if cell["report"] == report}
        if by_value:
            lines.append(
                _line(report, hue, {values.index(value): by_value[value] for value in sorted(by_value)})
            )
    prior = {(cell["length"], cell["batch"]): cell for cell in result["prior"]}
    cases = [{**result["case"], name: value} for value in values]
    without_report = {index: prior[case["length"], case["batch"]] for index, case in enumerate(cases)}
    lines.append(_line("without a report", len(_REPORTS), without_report, "marked"))
    names = [f"{value:,g}" for value in values]
    return line_chart(
        lines, _PANELS[name], "recovered tokens at the right position", levels={"all": 1.0}, x_names=names
    )


def _line(name: str, hue: int, cells: Mapping[int, Cell], style: LineStyle = "line") -> Line:
    """Return mean and range of the recovered tokens by the index of a value on the axis."""
    tokens = {index: cell["tokens"] for index, cell in cells.items()}
    points = [(index, each["mean"]) for index, each in tokens.items()]
    band = [(index, each["least"], each["most"]) for index, each in tokens.items()]
    return Line(name, points, hue, style, band)
