"""Plots as SVG pictures: well-formed, with finite coordinates that follow the values."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ultr.report.page import Plot
from ultr.report.plots import BOTTOM, TOP, WIDTH, Axis, dot_plot, heat_map, interval_plot, line_plot, svg

SVG = "{http://www.w3.org/2000/svg}"
COORDINATES = {"x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "width", "height"}
ROUNDED = 0.051  # coordinates have one digit

MODERATE = st.one_of(st.floats(-1e12, 1e12), st.floats(-1e-12, 1e-12), st.integers(-1000, 1000))
NUMBERS = st.one_of(
    MODERATE, st.floats(-1e300, 1e300), st.sampled_from([1e12, 1e12 + 2e-4, 1e-12, 0.1, 0.30000000000000004])
)
NAMES = st.text(max_size=40).map(lambda text: "".join(c for c in text if c.isprintable()))
LINE = st.lists(st.tuples(NUMBERS, st.none() | NUMBERS), max_size=8)
LINES = st.dictionaries(NAMES, LINE, max_size=4)


def lines_of(points: dict) -> dict:
    return {name: ([x for x, _ in line], [y for _, y in line]) for name, line in points.items()}


def parsed(plot: Plot) -> ElementTree.Element:
    """Return the picture of a plot; all its coordinates are finite."""
    root = ElementTree.fromstring(svg(plot.title, plot.figure, plot.height))  # noqa: S314
    assert root.tag == f"{SVG}svg"
    assert root.attrib["viewBox"] == f"0 0 {WIDTH} {plot.height}"
    for element in root.iter():
        numbers = [value for name, value in element.attrib.items() if name in COORDINATES]
        numbers += element.attrib.get("points", "").replace(",", " ").split()
        assert all(math.isfinite(float(number)) for number in numbers), element.attrib
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in element.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def is_rising(values: list[float], places: list[float], *, turned: bool = False) -> bool:
    """Return whether a larger value never has a smaller place, or never a larger one if `turned`; equal ones agree."""
    ordered = sorted(zip(values, places, strict=True))
    sign = -1 if turned else 1
    return all(sign * (q - p) >= 0 and (v != w or p == q) for (v, p), (w, q) in pairwise(ordered))


@given(LINES)
@example({"constant": [(1.0, 3.0), (2.0, 3.0)]})
@example({"one point": [(0.0, 0.0)]})
@example({"nothing": [(1.0, None), (2.0, None)], "empty": []})
@example({"large": [(-1e12, 1e12), (1e12, -1e12)], "small": [(1e-12, 2e-12), (2e-12, 1e-12)]})
@example({"near": [(1e12, 1e12), (1e12 + 2e-4, 1e12 + 2e-4)]})
def test_lines_of_any_numbers_are_placed_by_their_values(drawn):
    plot = line_plot("a < b & c", lines_of(drawn), x="x & y", y="<y>")
    root = parsed(plot)
    polylines = root.findall(f"{SVG}polyline")
    assert len(polylines) == len(drawn)
    shown = [[pair for pair in line if pair[1] is not None] for line in drawn.values()]
    places = [points(polyline) for polyline in polylines]
    assert [len(line) for line in places] == [len(line) for line in shown]
    values, at = ([pair for line in lines for pair in line] for lines in (shown, places))
    assert is_rising([x for x, _ in values], [x for x, _ in at])
    assert is_rising([y for _, y in values], [y for _, y in at], turned=True)
    assert all(0 <= x <= WIDTH and TOP <= y <= plot.height - BOTTOM for x, y in at)
    circles = [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter(f"{SVG}circle")]
    assert circles == at
    assert texts(root)[0] == "a < b & c"
    assert {"x & y", "<y>"} <= set(texts(root))


@given(st.dictionaries(NAMES, st.lists(st.tuples(NAMES, st.none() | MODERATE), max_size=6), min_size=1, max_size=3))
def test_categories_are_placed_evenly_in_order_of_appearance(drawn):
    plot = line_plot("title", lines_of(drawn), x="x", y="y", categories=True)
    root = parsed(plot)
    names = list(dict.fromkeys(x for line in drawn.values() for x, _ in line))
    place_of = {}
    for line, polyline in zip(drawn.values(), root.findall(f"{SVG}polyline"), strict=True):
        shown = [pair for pair in line if pair[1] is not None]
        for (name, _), (x, _) in zip(shown, points(polyline), strict=True):
            assert place_of.setdefault(name, x) == x
    if names:
        turned = [e for e in _marks(root, "end") if "transform" in e.attrib]  # where they do not fit side by side
        marks = {e.text or "": float(e.attrib["x"]) for e in (turned or _marks(root, "middle"))[: len(names)]}
        assert list(marks) == names
        assert {name: marks[name] for name in place_of} == place_of
        gaps = [b - a for a, b in pairwise(marks.values())]
        assert all(gap > 0 and gap == pytest.approx(gaps[0], abs=4 * ROUNDED) for gap in gaps)


def _marks(root: ElementTree.Element, anchor: str) -> list[ElementTree.Element]:
    return [e for e in root.iter(f"{SVG}text") if e.attrib["text-anchor"] == anchor]


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e9), st.booleans())
def test_the_marks_of_an_axis_are_few_and_at_their_values(lengths_from_zero, length, turned):
    start, end = (314.0, 36.0) if turned else (72.8, 806.6)
    low = lengths_from_zero * length
    high = low + length
    marks = Axis(start, end, low, high).ticks()
    assert 3 <= len(marks) <= 9
    values = [float(text.replace(",", "")) for _, text in marks]
    tolerance = 1e-8 * length
    assert all(low - tolerance <= value <= high + tolerance for value in values)
    gaps = [b - a for a, b in pairwise(values)]
    assert all(gap > 0 and gap == pytest.approx(gaps[0], abs=2 * tolerance) for gap in gaps)
    leading = f"{gaps[0]:.0e}"[0]
    assert leading in "125"
    for (place, _), value in zip(marks, values, strict=True):
        assert place == pytest.approx(start + (end - start) * (value - low) / length, abs=0.5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-0.04, 1.04, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (980.0, 5020.0, ["1,000", "2,000", "3,000", "4,000", "5,000"]),
        (0.7531, 0.7569, ["0.7535", "0.7540", "0.7545", "0.7550", "0.7555", "0.7560", "0.7565"]),
        (-3.0, 3.0, ["-3", "-2", "-1", "0", "1", "2", "3"]),
    ],
)
def test_marks_are_at_round_numbers(low, high, expected):
    assert [text for _, text in Axis(0, 100, low, high).ticks()] == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_an_axis_from_zero_begins_at_zero(values):
    plot = line_plot("t", {"a": (list(range(len(values))), values)}, x="x", y="y", from_zero=True)
    zero = next(e for e in _marks(parsed(plot), "end") if float((e.text or "").replace(",", "")) == 0)
    assert float(zero.attrib["y"]) == pytest.approx(plot.height - BOTTOM + 4)


def test_a_band_is_around_its_line_and_dashed_lines_are_dashed():
    lines = {"a": ([1, 2, 3], [1.0, 2.0, 3.0]), "b": ([1, 2, 3], [3.0, 2.0, 1.0])}
    plot = line_plot("t", lines, x="x", y="y", bands={"a": ([0.5, 1.5, 2.5], [1.5, 2.5, 3.5])}, dashed=["b"])
    root = parsed(plot)
    (band,) = root.findall(f"{SVG}polygon")
    first, second = root.findall(f"{SVG}polyline")
    around = points(band)
    for (x, y), (x_high, high), (x_low, low) in zip(points(first), around[:3], around[:2:-1], strict=True):
        assert x == x_high == x_low
        assert high < y < low  # y coordinates grow downwards
    assert "stroke-dasharray" not in first.attrib
    assert "stroke-dasharray" in second.attrib
    assert first.attrib["stroke"] != second.attrib["stroke"]


def test_a_legend_has_the_name_and_colour_of_each_of_several_lines():
    two = parsed(line_plot("t", {"<a>": ([1], [1.0]), "b&": ([1], [2.0])}, x="x", y="y"))
    assert {"<a>", "b&"} <= set(texts(two))
    strokes = [line.attrib["stroke"] for line in two.findall(f"{SVG}polyline")]
    assert [rect.attrib["fill"] for rect in two.findall(f"{SVG}rect")[1:]] == strokes
    one = parsed(line_plot("t", {"<a>": ([1], [1.0])}, x="x", y="y"))
    assert "<a>" not in texts(one)


@given(
    st.dictionaries(
        st.text("abc:=-<&", min_size=1, max_size=60),
        st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_dots_are_in_the_row_of_their_name_at_their_value(rows):
    plot = dot_plot("title", rows, x="reward")
    root = parsed(plot)
    names = {e.text: float(e.attrib["y"]) - 4 for e in _marks(root, "end")}
    assert list(names) == list(rows)
    assert list(names.values()) == sorted(names.values())  # the first on top
    circles = [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter(f"{SVG}circle")]
    dots, means = circles[: -len(rows)], circles[-len(rows) :]
    assert [y for _, y in means] == pytest.approx(list(names.values()), abs=2 * ROUNDED)
    values = [value for numbers in rows.values() for value in numbers]
    assert is_rising(values, [x for x, _ in dots])
    expected = [names[name] for name, numbers in rows.items() for _ in numbers]
    assert [y for _, y in dots] == pytest.approx(expected, abs=2 * ROUNDED)
    assert all(0 <= x <= WIDTH for x, _ in circles)
    lines = [e for e in root.iter(f"{SVG}line") if e.attrib["stroke-width"] == "2"]
    assert len(lines) == len(rows)
    for line, (x, _) in zip(lines, means, strict=True):
        assert float(line.attrib["x1"]) <= x <= float(line.attrib["x2"])


def test_an_interval_ends_at_its_bounds():
    root = parsed(interval_plot("t", {"a": (1.0, 0.0, 3.0), "b": (2.0, 1.0, 2.0)}, x="x"))
    first, second = (e for e in root.iter(f"{SVG}line") if e.attrib["stroke-width"] == "2")
    zero, three = float(first.attrib["x1"]), float(first.attrib["x2"])
    third = (three - zero) / 3
    assert float(second.attrib["x1"]) == pytest.approx(zero + third, abs=2 * ROUNDED)
    assert float(second.attrib["x2"]) == pytest.approx(zero + 2 * third, abs=2 * ROUNDED)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_cells_are_darker_for_larger_values_and_blank_for_none(rows, columns, data):
    cell = st.none() | st.floats(0, 2)
    values = data.draw(
        st.lists(st.lists(cell, min_size=columns, max_size=columns), min_size=rows, max_size=rows), label="values"
    )
    largest = data.draw(st.sampled_from([1.0, None]), label="largest")
    names = [f"r{i}" for i in range(rows)], [f"c{i}" for i in range(columns)]
    plot = heat_map("t", values, rows=names[0], columns=names[1], x="x", y="y", largest=largest)
    root = parsed(plot)
    cells = [e for e in root.iter(f"{SVG}rect") if "fill-opacity" in e.attrib]
    known = [value for row in values for value in row if value is not None]
    assert len(cells) == len(known)
    shades = [float(e.attrib["fill-opacity"]) for e in cells]
    assert all(0 < shade <= 1 for shade in shades)
    assert is_rising(known, shades)
    shown = [text for text in texts(root) if text.replace(".", "").isdigit()]
    assert shown == [f"{value:.2f}" for value in known]
    at = [(float(e.attrib["y"]), float(e.attrib["x"])) for e in cells]
    assert at == sorted(at)  # the first row on top, the first column on the left
    assert len(set(at)) == len(at)


@given(NAMES, NAMES, NAMES)
def test_any_text_is_shown_literally(title, name, axis):
    plot = line_plot(title, {name: ([1], [1.0]), name + "2": ([1], [2.0])}, x=axis, y=axis + "!")
    shown = texts(parsed(plot))
    assert shown[0] == title
    assert {axis, axis + "!", name + "2"} <= set(shown)


def test_negative_cells_have_another_colour_if_they_are_expected():
    values = [[-4.0, 0.0, 4.0, -1.0, None]]
    columns = [f"a method with a long name, {i}" for i in range(5)]
    root = parsed(heat_map("t", values, rows=["a"], columns=columns, x="x", y="y", smallest=-4.0, largest=4.0))
    cells = [
        (e.attrib["fill"], float(e.attrib["fill-opacity"]))
        for e in root.iter(f"{SVG}rect")
        if "fill-opacity" in e.attrib
    ]
    (low, dark), (_, light), (high, also_dark), (again, between) = cells
    assert low == again != high
    assert dark == also_dark > between > light
    turned = [e for e in _marks(root, "end") if "transform" in e.attrib]
    assert [e.text for e in turned] == columns
    lowest = max(
        float(e.attrib["y"]) + float(e.attrib["height"]) for e in root.iter(f"{SVG}rect") if "fill-opacity" in e.attrib
    )
    assert all(float(e.attrib["y"]) > lowest for e in turned)
