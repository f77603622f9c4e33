"""The picture of an attack: share of tokens that were recovered, beside the guess without a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prge.pages.charts import Line, as_file, beside, line_chart

_PANELS = {
    "length": "unknown tokens of a row",
    "steps": "steps on the same row",
    "queries": "scalars of a step",
    "batch": "rows of a report",
    "rank": "rank",
    "noise": "noise, as a share of a row's reach",
}
_REPORTS = ("exact", "top", "scalars")
_OF_SCALARS = ("steps", "queries")

Cell = Mapping[str, Any]


def draw(found: Mapping[str, Any]) -> str:
    """An SVG of what `--json` holds: a panel for each setting that was varied, mean and range over seeds."""
    varied = [name for name in _PANELS if len({cell[name] for cell in _along(found, name)}) > 1]
    return as_file(beside([_panel(found, name) for name in varied or ["length"]]))


def _panel(found: Mapping[str, Any], name: str) -> str:
    cells = _along(found, name)
    values = sorted({cell[name] for cell in cells})
    lines = []
    for hue, report in enumerate(_REPORTS):
        own = {cell[name]: cell for cell in cells if cell["report"] == report}
        if own and (len(own) > 1 or len(values) == 1):
            lines.append(_line(report, hue, {values.index(value): own[value] for value in sorted(own)}))
    blind = {(cell["length"], cell["batch"]): cell for cell in found["prior"]}
    cases = [{**found["case"], name: value} for value in values]
    unaided = {place: blind[case["length"], case["batch"]] for place, case in enumerate(cases)}
    lines.append(_line("without a report", len(_REPORTS), unaided))
    names = [f"{value:,g}" for value in values]
    return line_chart(lines, _PANELS[name], "tokens recovered, in place", levels={"all": 1.0}, x_names=names)


def _line(name: str, hue: int, cells: Mapping[int, Cell]) -> Line:
    """Mean and range of the tokens in place, by the place of a value on the axis; not of a report: marked."""
    tokens = {place: cell["tokens"] for place, cell in cells.items()}
    points = [(place, each["mean"]) for place, each in tokens.items()]
    band = [(place, each["least"], each["most"]) for place, each in tokens.items()]
    return Line(name, points, hue, "line" if name in _REPORTS else "marked", band)


def _along(found: Mapping[str, Any], name: str) -> list[Cell]:
    """Lines of the table that differ from the case of the middle in this setting at most."""

    def is_along(cell: Cell) -> bool:
        others = set(_PANELS) - {name}
        if cell["report"] != "scalars":
            others -= set(_OF_SCALARS)
        return all(cell[other] == found["case"][other] for other in others)

    return [
        cell
        for cell in found["table"]
        if is_along(cell) and (name not in _OF_SCALARS or cell["report"] == "scalars")
    ]
