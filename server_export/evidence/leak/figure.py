"""The picture of an attack: share of tokens that were recovered, beside the guess without a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    panels = [name for name in _PANELS if len({line[name] for line in _along(found, name)}) > 1]
    return as_file(beside([_panel(found, name) for name in panels or ["length"]]))


def _panel(found: Mapping[str, Any], name: str) -> str:
    cells = _along(found, name)
    values = sorted({cell[name] for cell in cells})
    lines = []
    for hue, report in enumerate(_REPORTS):
        own = [cell for cell in cells if cell["report"] == report]
        if own and (len(own) > 1 or len(values) == 1):
            lines.append(_line(report, hue, [(values.index(cell[name]), cell) for cell in own]))
    sizes = {(cell["length"], cell["batch"]): cell for cell in found["prior"]}
    blind = []
    for place, value in enumerate(values):
        case = {**found["case"], name: value}
        blind.append((place, sizes[case["length"], case["batch"]]))
    lines.append(_line("without a report", len(_REPORTS), blind, is_blind=True))
    names = [f"{value:,g}" for value in values]
    return line_chart(lines, _PANELS[name], "tokens recovered, in place", levels={"all": 1.0}, x_names=names)


def _line(name: str, hue: int, cells: Sequence[tuple[int, Cell]], is_blind: bool = False) -> Line:
    """Mean and range of the tokens in place, by the place of a value on the axis."""
    cells = sorted(cells, key=lambda cell: cell[0])
    points = [(place, cell["tokens"]["mean"]) for place, cell in cells]
    band = [(place, cell["tokens"]["least"], cell["tokens"]["most"]) for place, cell in cells]
    return Line(name, points, hue, "marked" if is_blind else "line", band)


def _along(found: Mapping[str, Any], name: str) -> list[Cell]:
    """Lines of the table that differ from the case of the middle in this setting at most."""
    case = found["case"]
    return [
        cell
        for cell in found["table"]
        if (name not in _OF_SCALARS or cell["report"] == "scalars")
        and all(
            other == name
            or cell[other] == case[other]
            or (other in _OF_SCALARS and cell["report"] != "scalars")
            for other in _PANELS
        )
    ]
