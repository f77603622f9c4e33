"""The picture of an attack: share of tokens that were recovered, beside the guess without a report."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from prge.pages.palette import COLOURS, MARKERS, drawing_library

_PANELS = {
    "length": "unknown tokens of a row",
    "steps": "steps on the same row",
    "queries": "scalars of a step",
    "batch": "rows of a report",
    "rank": "rank",
    "noise": "noise, as a share of a row's reach",
}
_PRIOR = "#808080"


def draw(found: Mapping[str, Any], file_format: str) -> bytes:
    """A panel for each setting that was varied, with mean and range over seeds; of what `--json` holds.

    Raises:
        PrgeError: matplotlib is not installed.
    """
    matplotlib = drawing_library()
    table, case = found["table"], found["case"]
    panels = [name for name in _PANELS if len({line[name] for line in _along(table, case, name)}) > 1]
    panels = panels or ["length"]
    style = {"svg.fonttype": "none", "svg.hashsalt": "prge", "font.size": 10}
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure(figsize=(3.0 * len(panels) + 0.6, 3.2), layout="constrained")
        rooms = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, name in zip(rooms, panels, strict=True):
            _panel(axes, name, found)
        rooms[0].set_ylabel("tokens recovered, in place")
        rooms[0].set_ylim(-0.03, 1.03)
        handles = {
            label: handle
            for axes in rooms
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
        stream = io.BytesIO()
        # No date, so that the same figures give the same bytes.
        figure.savefig(stream, format=file_format, metadata={"Date": None} if file_format == "svg" else None)
    return stream.getvalue()


def _panel(axes: Any, name: str, found: Mapping[str, Any]) -> None:
    lines = _along(found["table"], found["case"], name)
    places = {value: place for place, value in enumerate(sorted({line[name] for line in lines}))}
    for index, report in enumerate(("exact", "top", "scalars")):
        own = sorted((line for line in lines if line["report"] == report), key=lambda line: line[name])
        if own and (len(own) > 1 or len(places) == 1):
            x = [places[line[name]] for line in own]
            _line(axes, x, own, report, COLOURS[index], MARKERS[index])
    blind = _blind(found, name, list(places))
    _line(axes, list(places.values()), blind, "without a report", _PRIOR, ".", dashed=True)
    axes.set_xticks(list(places.values()), [f"{value:,g}" for value in places])
    axes.set_xlabel(_PANELS[name])
    axes.grid(color="#808080", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _line(
    axes: Any,
    x: Sequence[int],
    lines: Sequence[Mapping[str, Any]],
    label: str,
    colour: str,
    marker: str,
    dashed: bool = False,
) -> None:
    means = [line["tokens"]["mean"] for line in lines]
    axes.plot(x, means, label=label, color=colour, marker=marker, linestyle="--" if dashed else "-")
    low, high = ([line["tokens"][end] for line in lines] for end in ("least", "most"))
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _along(table: Sequence[Mapping[str, Any]], case: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Lines that differ from the case of the middle in this setting at most."""
    others = [other for other in _PANELS if other != name]
    return [
        line
        for line in table
        if all(
            line[other] == case[other] or (other in ("steps", "queries") and line["report"] != "scalars")
            for other in others
        )
        and (name not in ("steps", "queries") or line["report"] == "scalars")
    ]


def _blind(found: Mapping[str, Any], name: str, values: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The guess without a report for each value of a setting."""
    by_size = {(line["length"], line["batch"]): line for line in found["prior"]}
    case = found["case"]
    sizes = [{"length": case["length"], "batch": case["batch"], name: value} for value in values]
    return [by_size[size["length"], size["batch"]] for size in sizes]
