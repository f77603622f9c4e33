"""Charts are well-formed SVG whose points lie inside, for all numbers."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.report.charts import Line, arrange_charts, format_number, line_chart, standalone_svg, thin_points

SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(-1e300, 1e300)
points = st.lists(st.tuples(finite, finite), min_size=1, max_size=30)


def coordinates(svg: str) -> list[tuple[float, float]]:
    result = [each.get("points", "") for each in ElementTree.fromstring(svg).iter(f"{SVG}polyline")]
    return [(float(x), float(y)) for text in result for x, y in re.findall(r"([^ ,]+),([^ ,]+)", text)]


@given(st.lists(points, min_size=1, max_size=3))
def test_all_points_lie_inside_the_picture(lines: list[list[tuple[float, float]]]) -> None:
    svg = line_chart([Line(f"line {n}", line, n) for n, line in enumerate(lines)], "steps", "loss")
    width, height = (float(each) for each in ElementTree.fromstring(svg).get("viewBox", "").split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in coordinates(svg))


def test_a_lower_loss_lies_lower_and_a_later_step_further_right() -> None:
    (first, second) = coordinates(line_chart([Line("", [(0, 2.0), (10, 1.0)])], "steps", "loss"))
    assert first[0] < second[0] and first[1] < second[1]


def test_axes_have_few_round_numbers() -> None:
    svg = line_chart([Line("", [(0, 20.1), (1000, 63.2)])], "steps", "perplexity")
    texts = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == "20 30 40 50 60 70 0 200 400 600 800 1000 steps perplexity".split()


def test_names_are_escaped() -> None:
    svg = line_chart([Line("<b>&", [(0, 1.0)])], '"x"', "<y>")
    texts = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "<b>&" in texts and "<y>" in texts


@given(
    st.lists(st.tuples(st.floats(1e-300, 1e300), finite), min_size=1, max_size=30),
    st.floats(-1e300, 1e300),
)
def test_logarithmic_pictures_hold_lines_bands_and_levels(
    line: list[tuple[float, float]], level: float
) -> None:
    band = [(x, y, y) for x, y in line]
    svg = line_chart(
        [Line("a", [(0.0, 1.0), *line], 7, "marked", band)], "s", "y", log=True, levels={"<target>": level}
    )
    tree = ElementTree.fromstring(svg)
    width, height = (float(each) for each in tree.get("viewBox", "").split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in coordinates(svg))
    assert "<target>" in [each.text for each in tree.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 90, "1 2 5 10 20 50 s"),
        (3, 3, "2 s"),
        (2, 9e5, "1 10 100"),
        (999999999999999.9, 1e15, "5e+05G 1e+06G s"),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, ticks: str) -> None:
    svg = line_chart([Line("", [(low, 0.0), (high, 0.7)])], "s", "y", log=True)
    texts = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert " ".join(map(str, texts[texts.index("0.8") + 1 :])).startswith(ticks)


def test_arranged_charts_are_one_file() -> None:
    one, two = (line_chart([Line("", [(0, 1.0)])], "x", label) for label in ("y", "z"))
    both = standalone_svg(arrange_charts([one, "", two]))
    assert len(list(ElementTree.fromstring(both).iter(f"{SVG}svg"))) == 3
    assert 'viewBox="0 0 760 ' in both
    stacked = ElementTree.fromstring(arrange_charts([one, two, two], 2))
    assert [(each.get("x"), each.get("y")) for each in stacked] == [("0", "0"), ("380", "0"), ("0", "250")]
    assert arrange_charts([""]) == ""


@pytest.mark.parametrize("lines", [[], [Line("nothing", [])]])
def test_a_chart_without_points_is_empty(lines: list[Line]) -> None:
    assert line_chart(lines, "steps", "loss") == ""


def test_a_single_point_is_visible() -> None:
    assert "<circle" in line_chart([Line("", [(3, 1.0)])], "steps", "loss")


@given(st.lists(st.tuples(st.integers(0, 10**6), finite), max_size=300), st.integers(2, 50))
def test_thinned_points_keep_ends_of_the_range_and_their_order(
    line: list[tuple[float, float]], max_points: int
) -> None:
    kept = thin_points(line, max_points)
    assert len(kept) <= max(max_points, 2)
    if line:
        assert {max(y for _, y in kept), min(y for _, y in kept)} == {
            max(y for _, y in line),
            min(y for _, y in line),
        }
    remaining = iter(line)
    assert all(each in remaining for each in kept)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.1 + 0.2, "0.3"), (1500, "1500"), (25000, "25k"), (3e6, "3M"), (-2e9, "-2G")],
)
def test_numbers_of_labels(value: float, text: str) -> None:
    assert format_number(value) == text
