"""Line charts as SVG text, whose colour follows the page that embeds them.

This is the only module that draws. `line_chart` draws curves, with a band for the range over seeds and dashed
levels. A `Picture` of a report embeds the SVG, `standalone_svg` makes it a file, `arrange_charts` combines
several charts. Charts contain no scripts and no links.

    line_chart([Line("p-rge", points, band=ranges)], "seconds", "accuracy", log=True, levels={"target": 0.9})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from prge.errors import shortened

Point = tuple[float, float]
LineStyle = Literal["faint", "line", "marked"]

# Distinguishable with any colour vision, on white and on black: M. Okabe, K. Ito, "Color Universal Design",
# 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# In units of the view box, which are about pixels on a phone.
_WIDTH, _HEIGHT = 380, 240
_LEFT, _RIGHT, _BOTTOM, _LEGEND = 54, 12, 38, 16
# More points of a line can't be distinguished on a screen.
_MAX_POINTS, _MAX_DOTS = 500, 100
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
        name: text in the legend; empty for no entry.
        points: points (x, y) in the order of x.
        hue: index of the colour; indices beyond the last colour repeat colours with another form of dots.
        style: stroke style.
        band: (x, lowest, highest), such as the range over seeds.
    """

    name: str
    points: Sequence[Point]
    hue: int = 0
    style: LineStyle = "line"
    band: Sequence[tuple[float, float, float]] = ()


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    levels: Mapping[str, float] | None = None,
    x_names: Sequence[str] = (),
) -> str:
    """Draw lines over one pair of axes as SVG; return an empty text if no line has a point.

    Values must be below 1e300. Equal lines give equal text.

    Args:
        lines: in the order of the legend.
        x_label: label of the x axis.
        y_label: label of the y axis.
        log: use a logarithmic x axis, which leaves out points that aren't above 0.
        levels: values of y to mark with a dashed line, by name.
        x_names: tick labels for x = 0, 1, ... instead of numbers.
    """
    lines = [_above_zero(line) for line in lines] if log else lines
    lines, levels = [line for line in lines if line.points], levels or {}
    if not lines:
        return ""
    named = [line for line in lines if line.name]
    top = 10 + _LEGEND * len(named)
    xs = [x for line in lines for x, *_ in (*line.points, *line.band)]
    ys = [y for line in lines for _, *ends in (*line.points, *line.band) for y in ends]
    ys += levels.values()
    across = _Axis.over(min(0.0, *xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    if log:
        across = _Axis.logarithmic(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    elif x_names:
        across = replace(across, ticks=tuple(map(float, range(len(x_names)))))
    floor, height = top + _HEIGHT - _BOTTOM, top + _HEIGHT
    up = _Axis.over(min(ys), max(ys), floor, top, to_ticks=True)
    parts = [_begin(height, f"{y_label} against {x_label}"), *_legend(named)]
    for value in up.ticks:
        parts.append(_rule((_LEFT, up(value)), (_WIDTH - _RIGHT, up(value)), 0.15))
        parts.append(_text(_LEFT - 5, up(value) + 4, format_number(value), "end"))
    parts += _draw_x_axis(across, x_label, x_names, floor, height)
    parts.append(
        f'<text transform="translate(10 {(top + floor) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for name, level in levels.items():
        parts.append(_rule((_LEFT, up(level)), (_WIDTH - _RIGHT, up(level)), 0.8, ' stroke-dasharray="6 3"'))
        parts.append(_text(_LEFT + 4, up(level) - 3, name, "start"))
    for line in lines:
        parts.append(_band([(across(x), up(low), up(high)) for x, low, high in line.band], line.hue))
        parts.append(_draw_line(line, [(across(x), up(y)) for x, y in thin_points(line.points, _MAX_POINTS)]))
    return "".join([*parts, "</svg>"])


def arrange_charts(charts: Sequence[str], columns: int | None = None) -> str:
    """Combine charts of this module into one SVG with `columns` a row (default: all); skip empty charts."""
    charts = [chart for chart in charts if chart]
    parts, width, y = [], 0, 0
    for start in range(0, len(charts), columns or max(len(charts), 1)):
        x, height = 0, 0
        for chart in charts[start : start + (columns or len(charts))]:
            size = _size_of(chart)
            attributes = f'x="{x}" y="{y}" width="{size[0]}" height="{size[1]}"'
            parts.append(chart.replace("<svg ", f"<svg {attributes} ", 1))
            x, height = x + size[0], max(height, size[1])
        width, y = max(width, x), y + height
    return "".join([_begin(y, "", width), *parts, "</svg>"]) if parts else ""


def standalone_svg(chart: str) -> str:
    """Return a chart for a file of its own: dark text on white, at twice the size."""
    width, height = _size_of(chart)
    attributes = f'width="{2 * width}" height="{2 * height}" style="background:#fff;color:#24292f"'
    return chart.replace("<svg ", f"<svg {attributes} ", 1)


def thin_points(points: Sequence[Point], max_points: int) -> list[Point]:
    """Reduce a line to `max_points` points: the lowest and the highest point of each stretch, in order."""
    if len(points) <= max_points:
        return list(points)
    stretches = max_points // 2
    chosen: list[Point] = []
    for index in range(stretches):
        stretch = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        extremes = {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
        chosen += [points[at] for at in sorted(extremes)]
    return chosen


def format_number(value: float) -> str:
    """Format a number for a label with at most four significant digits and a suffix k, M or G."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if name == "k" else size
            return f"{value / scale:.4g}{name}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Axis:
    """Maps values to coordinates: the values `low` and `high` lie at `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, to_ticks: bool = False) -> _Axis:
        """Create a linear axis over a range, widened if it is empty; `to_ticks` extends it to full ticks."""
        if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-200):
            low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
        rough = (high - low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= 0.999 * rough)
        first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
        if to_ticks:
            first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(min(low, *ticks), max(high, *ticks), start, end, ticks)

    @classmethod
    def logarithmic(cls, low: float, high: float, start: float, end: float) -> _Axis:
        """Create a logarithmic axis with ticks at 1, 2 and 5 times powers of ten, or at powers of ten."""
        first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
        # log10 may round up to the next power.
        first -= 10.0**first > low
        digits, stride = ((1, 2, 5), 1) if last - first <= 2 else ((1,), math.ceil((last - first) / _TICKS))
        steps = [digit * 10.0**power for power in range(first, last + 1, stride) for digit in digits]
        begin = max(step for step in steps if step <= low)
        ticks = tuple(step for step in steps if begin <= step <= high)
        return cls(begin, high if high > 1.01 * begin else 10 * begin, start, end, ticks, is_log=True)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


def _above_zero(line: Line) -> Line:
    """Return the part of a line that a logarithmic axis can show."""
    points = [point for point in line.points if point[0] > 0]
    return replace(line, points=points, band=[each for each in line.band if each[0] > 0])


def _legend(named: Sequence[Line]) -> list[str]:
    parts = []
    for row, line in enumerate(named):
        at = 10 + _LEGEND * row
        parts.append(_draw_line(line, [(_LEFT, at), (_LEFT + 12, at), (_LEFT + 24, at)]))
        parts.append(_text(_LEFT + 32, at + 4, shortened(line.name, 48), "start"))
    return parts


def _band(coordinates: Sequence[tuple[float, float, float]], hue: int) -> str:
    """Draw the area between the lowest and highest values, given in coordinates of the picture."""
    edge = [*((x, low) for x, low, _ in coordinates), *((x, high) for x, _, high in reversed(coordinates))]
    return f'<polygon points="{_path(edge)}" fill="{_colour(hue)}" fill-opacity="0.15"/>' if edge else ""


def _draw_x_axis(axis: _Axis, label: str, names: Sequence[str], floor: float, height: float) -> list[str]:
    """Draw the x axis with its ticks and its label."""
    parts = [_rule((axis.start, floor), (axis.end, floor), 0.6)]
    for index, value in enumerate(axis.ticks):
        x = axis(value)
        parts.append(_rule((x, floor), (x, floor + 4), 0.6))
        parts.append(_text(x, floor + 16, names[index] if names else format_number(value), "middle"))
    return [*parts, _text((axis.start + axis.end) / 2, height - 6, label, "middle")]


def _draw_line(line: Line, coordinates: Sequence[Point]) -> str:
    """Draw a line through coordinates of the picture, in its own style."""
    width, opacity = (0.8, 0.35) if line.style == "faint" else (1.8, 1)
    dashes = ' stroke-dasharray="5 3"' if line.style == "marked" else ""
    polyline = (
        f'<polyline points="{_path(coordinates)}" fill="none" stroke="{_colour(line.hue)}" '
        f'stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"{dashes}/>'
    )
    # A polyline of one point is invisible.
    single = len(coordinates) == 1
    has_dots = line.style == "marked" or line.hue >= len(COLOURS)
    dots = coordinates if single or (has_dots and len(coordinates) <= _MAX_DOTS) else ()
    return polyline + "".join(_dot(x, y, line.hue) for x, y in dots)


def _dot(x: float, y: float, hue: int) -> str:
    """Draw a round dot, or a square one for repeated colours."""
    if hue // len(COLOURS) % 2:
        return f'<rect x="{x - 2.6:.1f}" y="{y - 2.6:.1f}" width="5.2" height="5.2" fill="{_colour(hue)}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{_colour(hue)}"/>'


def _begin(height: float, label: str, width: float = _WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" font-size="11" '
        f'fill="currentColor" aria-label="{escape(label)}">'
    )


def _size_of(chart: str) -> tuple[int, int]:
    width, height = chart.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()
    return int(width), int(height)


def _colour(hue: int) -> str:
    return COLOURS[hue % len(COLOURS)]


def _path(coordinates: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)


def _rule(begin: Point, end: Point, opacity: float, dashes: str = "") -> str:
    (x, y), (to_x, to_y) = begin, end
    return (
        f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="currentColor" '
        f'stroke-opacity="{opacity}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
