"""Line charts as SVG, drawn by hand: their text takes the colour of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from prge.errors import shortened
from prge.pages.palette import COLOURS

Point = tuple[float, float]
Look = Literal["faint", "line", "marked"]

# In units of the picture, about pixels on a phone; it grows with the page.
_WIDTH, _HEIGHT = 380, 240
_LEFT, _RIGHT, _BOTTOM, _LEGEND = 54, 12, 38, 16
# Points of a line at most: more can't be told apart on any screen.
_MOST, _MOST_DOTS = 500, 100
_TICKS = 5
# The palette's last colour is black, which a dark page hides.
_HUES = COLOURS[:-1]


@dataclass(frozen=True)
class Line:
    """Points in the order of their x; `name` is in the legend unless it is empty."""

    name: str
    points: Sequence[Point]
    hue: int = 0
    look: Look = "line"


def line_chart(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """An SVG of lines over one pair of axes; empty where no line has a point.

    Numbers are below 1e300, as those of metrics. The same lines give the same text.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    named = [line for line in lines if line.name]
    top = 10 + _LEGEND * len(named)
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    across = _Axis.over(min(0.0, *xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over(min(ys), max(ys), top + _HEIGHT - _BOTTOM, top, whole=True)
    height, floor = top + _HEIGHT, up.start
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" '
        f'font-size="11" fill="currentColor" aria-label="{escape(f"{y_label} against {x_label}")}">'
    ]
    for row, line in enumerate(named):
        at = 10 + _LEGEND * row
        parts.append(_drawn(line, [(_LEFT, at), (_LEFT + 12, at), (_LEFT + 24, at)]))
        parts.append(_text(_LEFT + 32, at + 4, shortened(line.name, 48), "start"))
    for value in up.ticks:
        y = up(value)
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y, 0.15))
        parts.append(_text(_LEFT - 5, y + 4, number(value), "end"))
    for value in across.ticks:
        x = across(value)
        parts.append(_rule(x, floor, x, floor + 4, 0.6))
        parts.append(_text(x, floor + 16, number(value), "middle"))
    parts.append(_rule(_LEFT, floor, _WIDTH - _RIGHT, floor, 0.6))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, x_label, "middle"))
    parts.append(
        f'<text transform="translate(10 {(top + floor) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for line in lines:
        parts.append(_drawn(line, [(across(x), up(y)) for x, y in thinned(line.points, _MOST)]))
    return "".join([*parts, "</svg>"])


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points, in order: of every stretch of a longer line its lowest and its highest."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for index in range(stretches):
        stretch = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        ends = {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
        kept += [points[at] for at in sorted(ends)]
    return kept


def number(value: float) -> str:
    """A number for a label: at most four digits that matter, thousands by name."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if name == "k" else size
            return f"{value / scale:.4g}{name}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Axis:
    """From values to places: the values `low` and `high` lie at `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, whole: bool = False) -> _Axis:
        """An axis over a range of values, with room around one that is empty; `whole`: from tick to tick."""
        if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-200):
            low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
        rough = (high - low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= 0.999 * rough)
        first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
        if whole:
            first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(min(low, *ticks), max(high, *ticks), start, end, ticks)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _drawn(line: Line, places: Sequence[Point]) -> str:
    """A line through places of the picture, in its own look."""
    colour = _HUES[line.hue % len(_HUES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width, opacity = (0.8, 0.35) if line.look == "faint" else (1.8, 1)
    dashes = ' stroke-dasharray="5 3"' if line.look == "marked" else ""
    drawn = (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"{dashes}/>'
    )
    # One point is no line.
    single = len(places) == 1
    dots = places if single or (line.look == "marked" and len(places) <= _MOST_DOTS) else ()
    return drawn + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in dots)


def _rule(x: float, y: float, to_x: float, to_y: float, opacity: float) -> str:
    return (
        f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="currentColor" stroke-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
