"""The picture of an attack: share of tokens that were recovered, next to the guess without a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prge.report.charts import Line, Look, arrange_charts, line_chart, standalone_svg

_PANELS = {
    "length": "unknown tokens of a row",
    "steps": "steps on the same row",
    "queries": "scalars of a step",
    "batch": "rows of a report",
    "rank": "rank",
    "noise": "noise, as a share of a row's reach",
}
_REPORTS = ("exact", "top", "scalars")

Cell = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> str:
    """An SVG of what `--json` holds: a panel for each setting that was varied, mean and range over seeds."""
    varied = {cell["varied"] for cell in result["table"]}
    names = [name for name in _PANELS if name in varied] or ["length"]
    return standalone_svg(arrange_charts([_panel(result, name) for name in names]))


def _panel(result: Mapping[str, Any], name: str) -> str:
    along = [cell for cell in result["table"] if cell["varied"] in ("", name)]
    # Of a panel for what only scalars have, scalars alone.
    shown = {cell["report"] for cell in along if cell["varied"]} or set(_REPORTS)
    cells = [cell for cell in along if cell["report"] in shown]
    values = sorted({cell[name] for cell in cells})
    lines = []
    for hue, report in enumerate(_REPORTS):
        own = {cell[name]: cell for cell in cells if cell["report"] == report}
        if own:
            lines.append(_line(report, hue, {values.index(value): own[value] for value in sorted(own)}))
    blind = {(cell["length"], cell["batch"]): cell for cell in result["prior"]}
    cases = [{**result["case"], name: value} for value in values]
    unaided = {place: blind[case["length"], case["batch"]] for place, case in enumerate(cases)}
    lines.append(_line("without a report", len(_REPORTS), unaided, "marked"))
    names = [f"{value:,g}" for value in values]
    return line_chart(lines, _PANELS[name], "tokens recovered, in place", levels={"all": 1.0}, x_names=names)


def _line(name: str, hue: int, cells: Mapping[int, Cell], look: Look = "line") -> Line:
    """Mean and range of the tokens in place, by the place of a value on the axis."""
    tokens = {place: cell["tokens"] for place, cell in cells.items()}
    points = [(place, each["mean"]) for place, each in tokens.items()]
    band = [(place, each["least"], each["most"]) for place, each in tokens.items()]
    return Line(name, points, hue, look, band)
