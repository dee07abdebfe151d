"""Line and matrix plots as SVG."""

from __future__ import annotations

from math import isnan, nan
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.compare import Comparison, Row
from ultr.plots import Line, Panel, write_dot_plot, write_line_plot, write_matrix_plot

SVG = "{http://www.w3.org/2000/svg}"
FINITE = st.floats(-1e6, 1e6)


def drawn(path):
    return ElementTree.parse(path).getroot()  # noqa: S314 - our own file


def plotted(tmp_path, *panels):
    write_line_plot(tmp_path / "plot.svg", panels)
    return drawn(tmp_path / "plot.svg")


def points(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def lines_of(root):
    return [points(line) for line in root.iter(f"{SVG}polyline")]


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plots")


@st.composite
def panel_of_finite_values(draw):
    x = sorted(draw(st.lists(FINITE, min_size=1, max_size=6, unique=True)))
    values = st.lists(FINITE, min_size=len(x), max_size=len(x))
    lines = [
        Line(f"line {i}", draw(values), *((draw(values), draw(values)) if draw(st.booleans()) else ()))
        for i in range(draw(st.integers(1, 4)))
    ]
    return Panel("title", x, "x", "y", lines)


def numbers_vary(panel):
    ends = [v for line in panel.lines for v in (*line.values, *line.low, *line.high)]
    return max(ends) - min(ends) > 1e-9 * max(1, *map(abs, ends)) or max(map(abs, ends)) < 1e4


@given(st.lists(panel_of_finite_values().filter(numbers_vary), min_size=1, max_size=3))
def test_all_points_lie_within_the_picture(folder, panels):
    root = plotted(folder, *panels)
    left, top, width, height = map(float, root.get("viewBox").split())
    found = [p for shape in ("polyline", "polygon") for e in root.iter(SVG + shape) for p in points(e)]
    found += [(float(e.get("cx")), float(e.get("cy"))) for e in root.iter(f"{SVG}circle")]
    assert len(found) >= 2 * sum(len(line.values) for panel in panels for line in panel.lines)
    for x, y in found:
        assert left <= x <= left + width
        assert top <= y <= top + height


@given(panel_of_finite_values().filter(numbers_vary))
def test_larger_values_stand_higher_and_larger_x_further_right(folder, panel):
    for line, shown in zip(panel.lines, lines_of(plotted(folder, panel)), strict=True):
        assert [x for x, _ in shown] == sorted(x for x, _ in shown)
        by_value = [y for _, (_, y) in sorted(zip(line.values, shown, strict=True), key=lambda pair: pair[0])]
        assert by_value == sorted(by_value, reverse=True)


def test_values_are_to_scale(tmp_path):
    (line,) = lines_of(plotted(tmp_path, Panel("t", [0, 1, 4], "x", "y", [Line("l", [1.0, 2.0, 5.0])])))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert (x2 - x0) == pytest.approx(4 * (x1 - x0), abs=0.3)
    assert (y0 - y2) == pytest.approx(4 * (y0 - y1), abs=0.3)
    assert x2 - x0 > 300
    assert y0 - y2 > 150


def test_an_interval_is_a_band_around_its_line(tmp_path):
    line = Line("l", [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5])
    root = plotted(tmp_path, Panel("t", [1, 2, 3], "x", "y", [line, Line("bare", [1.0, 1.0, 1.0])]))
    (band,) = (points(e) for e in root.iter(f"{SVG}polygon"))
    middle = lines_of(root)[0]
    over, under = band[:3], band[:2:-1]
    for (x, y), (x_over, y_over), (x_under, y_under) in zip(middle, over, under, strict=True):
        assert x == x_over == x_under
        assert y_over < y < y_under


def test_panels_stand_one_below_the_other_without_overlap(tmp_path):
    root = plotted(tmp_path, *(Panel(f"t{i}", [1, 2], "x", "y", [Line("l", [0.0, 1.0])]) for i in range(3)))
    spans = [sorted(y for _, y in line) for line in lines_of(root)]
    assert spans[0][1] < spans[1][0]
    assert spans[1][1] < spans[2][0]
    assert [text for text in texts(root) if text.startswith("t")] == ["t0", "t1", "t2"]


def test_names_are_escaped(tmp_path):
    odd = "a < b & c > \"d\" 'e'"
    root = plotted(tmp_path, Panel(odd, [1], odd, odd, [Line(odd, [1.0])]))
    assert texts(root).count(odd) == 2
    assert f"{odd}; vertical: {odd}" in texts(root)
    write_matrix_plot(tmp_path / "m.svg", {odd: np.ones((1, 1))}, names=[odd], axes=odd)
    assert texts(drawn(tmp_path / "m.svg")).count(odd) == 4  # title, axes, row and column
    write_dot_plot(tmp_path / "d.svg", Comparison([Row(odd, 0.1, {odd: [1.0]}, {})], [odd], odd))
    assert texts(drawn(tmp_path / "d.svg")).count(odd) == 2


@given(st.lists(st.one_of(st.just(nan), st.floats(-100, 100)), min_size=1, max_size=6))
def test_what_is_not_known_is_left_out(folder, values):
    x = list(range(len(values)))
    known = [v for v in values if not isnan(v)]
    root = plotted(folder, Panel("t", x, "x", "y", [Line("l", values, values, values)]))
    whole = plotted(folder, Panel("t", x, "x", "y", [Line("l", [0.0] * len(x))]))
    across = [at for at, _ in lines_of(whole)[0]]
    expected = [at for at, value in zip(across, values, strict=True) if not isnan(value)]
    assert [at for line in lines_of(root) for at, _ in line] == expected
    starts = [i for i, v in enumerate(values) if not isnan(v) and (i == 0 or isnan(values[i - 1]))]
    assert len(lines_of(root)) == len(starts)  # a line for each stretch that is known
    assert len(list(root.iter(f"{SVG}circle"))) == len(known)
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0, 1e5])
@pytest.mark.parametrize("x", [[3.0], [1.0, 2.0]])
def test_one_x_or_constant_values_can_be_drawn(tmp_path, x, value):
    (line,) = lines_of(plotted(tmp_path, Panel("t", x, "x", "y", [Line("l", [value] * len(x))])))
    assert len(line) == len(x)
    assert all(40 <= y <= 288 for _, y in line)


@pytest.mark.parametrize("value", [1e8, -1e12])
def test_large_constant_values_can_be_drawn(tmp_path, value):
    (line,) = lines_of(plotted(tmp_path, Panel("t", [1.0, 2.0], "x", "y", [Line("l", [value] * 2)])))
    assert len(line) == 2


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.floats(0, 1) | st.just(nan), min_size=n * n, max_size=n * n)))
def test_a_matrix_has_a_cell_for_each_known_number(folder, values):
    n = round(len(values) ** 0.5)
    matrix = np.array(values).reshape(n, n)
    write_matrix_plot(folder / "m.svg", {"one": matrix, "two": matrix.T}, names=range(1, n + 1), axes="across")
    root = drawn(folder / "m.svg")
    cells = [(float(e.get("x")), float(e.get("y")), e.get("fill-opacity")) for e in root.iter(f"{SVG}rect")]
    known = matrix[np.isfinite(matrix)]
    assert [shade for *_, shade in cells[: len(known)]] == [f"{v:.3f}" for v in known]  # row by row
    assert len(cells) == len(set(cells)) == 2 * len(known)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert all(0 < x < width - 38 and 0 < y < height - 38 for x, y, _ in cells)
    assert sum(text == str(n) for text in texts(root)) >= 4


def test_rows_of_a_matrix_go_down_and_columns_across(tmp_path):
    write_matrix_plot(tmp_path / "m.svg", {"t": np.array([[nan, 0.25], [nan, nan]])}, names="ab", axes="")
    root = drawn(tmp_path / "m.svg")
    (cell,) = root.iter(f"{SVG}rect")
    at = {(e.text, e.get("text-anchor")): (float(e.get("x")), float(e.get("y"))) for e in root.iter(f"{SVG}text")}
    x, y = float(cell.get("x")), float(cell.get("y"))
    assert y < at["a", "end"][1] < y + 40
    assert x < at["b", "middle"][0] < x + 40
    assert ("0.25", "middle") in at
