"""Plots as plain data, which plotly.js draws in the browser, or which is drawn here as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from ultr.evaluation.scores import mean_with_interval
from ultr.report.page import Plot

# --- Plots ------------------------------------------------------------------------------------------------------------
# Functions that return plots as plain data, which plotly.js draws in the browser.

Numbers = Sequence[float | None]
MANY_ROWS = 26  # of a matrix, from which on its rows are lower
COLOURS = ("#0b6bcb", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7d5fc7", "#8c8c8c")


def line_plot(
    title: str,
    lines: Mapping[str, tuple[Sequence[Any], Numbers]],
    *,
    x: str,
    y: str,
    caption: str = "",
    dashed: Sequence[str] = (),
    bands: Mapping[str, tuple[Numbers, Numbers]] | None = None,
    from_zero: bool = False,
    categories: bool | Sequence[str] = False,
    order: Sequence[str] = (),
) -> Plot:
    """Return a plot of lines: name -> (x values, y values); `bands` has (low, high) values around some of them.

    Colours follow the order of the names in `order`, so that a name can have the same colour in several plots. With
    `categories`, x values are names, in the order given or else of their first appearance in a line.
    """
    order = list(order or lines)
    data: list[dict[str, Any]] = []
    for name, (xs, ys) in lines.items():
        colour = _colour(order.index(name))
        if bands and name in bands:
            data += _band(xs, *bands[name], colour)
        style = {"color": colour, **({"dash": "dot"} if name in dashed else {})}
        data.append(
            {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(xs), "y": list(ys), "line": style}
        )
    layout = {
        "xaxis": {"title": {"text": x}, **(_category_axis(lines, categories) if categories else {})},
        "yaxis": {"title": {"text": y}, **({"rangemode": "tozero"} if from_zero else {})},
        "hovermode": "x unified",
        "hoverdistance": -1,
        "showlegend": len(lines) > 1,
    }
    return Plot(title, {"data": data, "layout": layout}, caption)


def _category_axis(
    lines: Mapping[str, tuple[Sequence[Any], Numbers]], categories: bool | Sequence[str]
) -> dict[str, Any]:
    """Return an axis of names. Its order is fixed here, because bands lack the names that have no interval."""
    appearing = (x for xs, _ in lines.values() for x in xs)
    names = list(dict.fromkeys(appearing) if isinstance(categories, bool) else categories)
    return {"type": "category", "categoryorder": "array", "categoryarray": names}


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _band(xs: Sequence[Any], low: Numbers, high: Numbers, colour: str) -> list[dict[str, Any]]:
    """Return the interval around a line as a list with one filled shape; empty if no interval is finite."""
    finite = np.isfinite(np.array([low, high], float)).all(0)
    ends = [end for end, both in zip(zip(xs, low, high, strict=True), finite, strict=True) if both]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    band = {
        "type": "scatter",
        "x": [x for x, _, _ in ends] + [x for x, _, _ in reversed(ends)],
        "y": [b for _, _, b in ends] + [a for _, a, _ in reversed(ends)],
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.15)",
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [band] if ends else []


def heat_map(
    title: str,
    values: Sequence[Sequence[float | None]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    x: str,
    y: str,
    caption: str = "",
    smallest: float = 0.0,
    largest: float | None = 1.0,
) -> Plot:
    """Return a plot of a matrix as coloured cells, the first row on top; cells that are None are blank.

    If `smallest` is negative, negative and positive numbers have different colours.
    """
    few = len(rows) <= 12 and len(columns) <= 12
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in values],
        "x": list(columns),
        "y": list(rows),
        "zmin": smallest,
        **({"zmid": 0.0, "colorscale": "RdBu"} if smallest < 0 else {}),
        **({} if largest is None else {"zmax": largest}),
        "hovertemplate": f"{y} %{{y}}, {x} %{{x}}: %{{z:.3f}}<extra></extra>",
        **({"texttemplate": "%{z:.2f}", "textfont": {"size": 9}} if few else {}),
        "colorbar": {"thickness": 10},
        "showscale": not few,
        "xgap": 1,
        "ygap": 1,
    }
    layout = {
        "xaxis": {"title": {"text": x}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": y}, "type": "category", "autorange": "reversed", "showgrid": False},
    }
    height = 60 + 24 * len(rows) if len(rows) <= MANY_ROWS else 220 + 15 * len(rows)
    return Plot(title, {"data": [trace], "layout": layout}, caption, height=max(340, height))


def interval_plot(
    title: str, rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str = "", change: bool = False
) -> Plot:
    """Return a plot of means with intervals; `rows` maps names to (mean, low, high).

    With `change`, values are relative changes, shown in per cent next to a line at zero.
    """
    number = "+.1%" if change else ".4f"
    names = list(rows)
    means, lows, highs = (np.array(column, float) for column in zip(*rows.values(), strict=True))
    trace = {
        "type": "scatter",
        "mode": "markers",
        "y": names,
        "x": means.tolist(),
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": (highs - means).tolist(),
            "arrayminus": (means - lows).tolist(),
        },
        "marker": {"size": 9, "color": COLOURS[0]},
        "customdata": np.stack([lows, highs], -1).tolist(),
        "hovertemplate": "%{y}: %{x:N} [%{customdata[0]:N}, %{customdata[1]:N}]<extra></extra>".replace("N", number),
    }
    zero = {"tickformat": ".0%", "rangemode": "tozero", "zeroline": True, "zerolinewidth": 2, "zerolinecolor": GREY}
    layout = {
        "xaxis": {"title": {"text": x}, **(zero if change else {})},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": False,
    }
    return Plot(title, {"data": [trace], "layout": layout}, caption, height=120 + 34 * len(names))


def histogram(title: str, values: Mapping[str, np.ndarray], edges: np.ndarray, *, x: str, caption: str = "") -> Plot:
    """Return a plot of the share of values between neighbouring `edges`; the page gets the shares, not the values."""
    finite = {name: array[np.isfinite(array)] for name, array in values.items()}
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hvh", "color": _colour(i)},
            **({"fill": "tozeroy"} if len(finite) == 1 else {}),
            "name": name,
            "x": middle,
            "y": (np.histogram(array, edges)[0] / max(1, len(array))).tolist(),
        }
        for i, (name, array) in enumerate(finite.items())
    ]
    layout = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": "share"}, "rangemode": "tozero", "tickformat": ".0%"},
        "showlegend": len(data) > 1,
        "hovermode": "x unified",
    }
    return Plot(title, {"data": data, "layout": layout}, caption)


def bar_plot(
    title: str, bars: Mapping[str, tuple[Sequence[str], Numbers]], *, y: str, caption: str = "", per_cent: bool = False
) -> Plot:
    """Return a plot of groups of bars; `bars` maps each name to (groups, heights)."""
    data = [
        {"type": "bar", "name": name, "x": list(xs), "y": list(ys), "marker": {"color": _colour(i)}}
        for i, (name, (xs, ys)) in enumerate(bars.items())
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero", **({"tickformat": ".0%"} if per_cent else {})},
        "showlegend": len(bars) > 1,
    }
    return Plot(title, {"data": data, "layout": layout}, caption)


def drop_plot(title: str, rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str = "") -> Plot:
    """Return a plot of horizontal bars with intervals, the first on top; `rows` maps names to (value, low, high)."""
    plot = interval_plot(title, rows, x=x, caption=caption)
    (trace,) = plot.figure["data"]
    bars = {**trace, "type": "bar", "orientation": "h", "marker": {"color": COLOURS[0]}}
    del bars["mode"]
    return Plot(title, {"data": [bars], "layout": plot.figure["layout"]}, caption, height=120 + 24 * len(rows))


def dot_plot(title: str, rows: Mapping[str, Sequence[float]], *, x: str, caption: str = "") -> Plot:
    """Return a plot of values as dots, with the mean and its 95% interval; `rows` maps names to values."""
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "runs",
        "x": [value for values in rows.values() for value in values],
        "y": [name for name, values in rows.items() for _ in values],
        "marker": {"size": 7, "opacity": 0.5, "color": COLOURS[0]},
        "hovertemplate": "%{y}: %{x:.4f}<extra></extra>",
    }
    means = {name: mean_with_interval(np.array(values)) for name, values in rows.items()}
    intervals = {name: (m.mean, m.low, m.high) if m.requests > 1 else (m.mean,) * 3 for name, m in means.items()}
    summary = interval_plot(title, intervals, x=x)
    mean = {
        **summary.figure["data"][0],
        "name": "mean, 95% interval",
        "marker": {"size": 10, "symbol": "line-ns-open", "color": COLOURS[1]},
    }
    layout = {**summary.figure["layout"], "showlegend": True}
    return Plot(title, {"data": [dots, mean], "layout": layout}, caption, height=summary.height + 40)


# --- SVG --------------------------------------------------------------------------------------------------------------
# Plots as SVG pictures, for documents that cannot run the script of a report page.

WIDTH, TOP, BOTTOM, RIGHT = 860, 36, 46, 24
LETTER = 6.6  # mean width of a letter
GREY, LIGHT, TEXT = "#8c8c8c", "#e3e3e3", "#222222"
CELL, OTHER_CELL = "#0b6bcb", "#d9480f"  # of a matrix; if it has negative numbers, CELL is for these
NARROW = 30  # width of a cell that has no room for two decimals
TURN, MOST_TURNED = math.pi / 4, 0.4  # angle of turned names, and the share of the height that they may take


@dataclass(frozen=True)
class Axis:
    """A map from values to places in the picture: of numbers between `low` and `high`, or of named categories."""

    start: float
    end: float
    low: float = 0.0
    high: float = 1.0
    names: Sequence[str] = ()

    def __call__(self, value: Any) -> float:
        if self.names:
            return self.start + (self.end - self.start) * (self.names.index(str(value)) + 0.5) / len(self.names)
        return self.start + (self.end - self.start) * (float(value) - self.low) / ((self.high - self.low) or 1.0)

    @property
    def turned(self) -> float:
        """The height of turned names, which are used where names do not fit next to each other; otherwise 0."""
        longest = LETTER * max(map(len, self.names), default=0)
        return 0.0 if longest * len(self.names) <= abs(self.end - self.start) else longest * math.sin(TURN)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, text) of the marks of the axis."""
        if self.names:
            return [(self(name), name) for name in self.names]
        step = _step(self.high - self.low)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(self(i * step), f"{i * step:,.{digits}f}") for i in range(first, last + 1)]


def _step(length: float) -> float:
    """Return the distance between marks: 1, 2 or 5 times a power of ten, for four to nine marks."""
    length = length or 1.0
    power = 10.0 ** math.floor(math.log10(length / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if length / (power * factor) <= 8)


def svg(title: str, figure: Mapping[str, Any], height: int, width: int = WIDTH) -> str:
    """Return a plot (see `page.Plot`) of lines, dots, intervals or coloured cells as the text of an SVG file."""
    traces, layout = figure["data"], figure["layout"]
    y_names = _categories(traces, layout, "y")
    named = [trace for trace in traces if trace.get("name") and trace.get("showlegend", True)]
    named = named if layout.get("showlegend") else []
    left = 20 + LETTER * max([8, *(len(name) + 2 for name in y_names)])
    right = RIGHT + (LETTER * max(len(t["name"]) for t in named) + 30 if named else 0)
    x = _axis(traces, layout, "x", left, width - right)
    y = _axis(traces, layout, "y", height - BOTTOM - min(x.turned, MOST_TURNED * height), TOP)
    if layout["yaxis"].get("autorange") == "reversed":
        y = Axis(y.end, y.start, y.low, y.high, y.names)
    parts = [*_frame(title, layout, x, y, height)]
    for trace in traces:
        parts += _cells(trace, x, y) if trace["type"] == "heatmap" else _trace(trace, x, y)
    for i, trace in enumerate(named):
        place, colour = TOP + 8 + 18 * i, _colour_of(trace)
        parts.append(f'<rect x="{x.end + 12:.0f}" y="{place - 5}" width="14" height="6" fill="{colour}"/>')
        parts.append(_text(x.end + 32, place + 2, trace["name"]))
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    return f'{head} font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'


def _categories(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], axis: str) -> list[str]:
    """Return the names on an axis, in the order of the layout or of appearance; empty for an axis of numbers."""
    if layout[f"{axis}axis"].get("type") != "category":
        return []
    listed = layout[f"{axis}axis"].get("categoryarray", ())
    return list(dict.fromkeys(map(str, (*listed, *(value for trace in traces for value in trace[axis])))))


def _axis(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], axis: str, start: float, end: float) -> Axis:
    if names := _categories(traces, layout, axis):
        return Axis(start, end, names=names)
    values = [float(v) for trace in traces for v in trace[axis] if v is not None]
    for trace in traces:
        errors = trace.get(f"error_{axis}")
        if errors:
            pairs = list(zip(trace[axis], errors["array"], errors["arrayminus"], strict=True))
            values += [v + up for v, up, _ in pairs] + [v - down for v, _, down in pairs]
    values = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(values), max(values)
    if layout[f"{axis}axis"].get("rangemode") == "tozero":
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.04 * (high - low) or 0.5
    return Axis(start, end, low - margin * (low != 0), high + margin)


def _frame(title: str, layout: Mapping[str, Any], x: Axis, y: Axis, height: int) -> list[str]:
    """Return the title, the axes with their marks and names, and the lines of the grid."""
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    parts = [_text(12, 20, title, size=14)]
    for place, text in x.ticks():
        parts.append(_line(place, top, place, bottom, LIGHT))
        if x.turned:
            turned = f'transform="rotate({-math.degrees(TURN):.0f} {place:.1f} {bottom + 14:.1f})"'
            parts.append(_text(place, bottom + 14, text, anchor="end", more=turned))
        else:
            parts.append(_text(place, bottom + 16, text, anchor="middle"))
    for place, text in y.ticks():
        parts.append(_line(x.start, place, x.end, place, LIGHT))
        parts.append(_text(x.start - 6, place + 4, text, anchor="end"))
    x_title, y_title = (layout[f"{axis}axis"].get("title", {}).get("text", "") for axis in "xy")
    parts.append(_text((x.start + x.end) / 2, height - 10, x_title, anchor="middle"))
    if y_title:
        middle = (top + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle:.1f})"'
        parts.append(_text(14, middle, y_title, anchor="middle", more=turned))
    return parts


def _trace(trace: Mapping[str, Any], x: Axis, y: Axis) -> list[str]:
    """Return a line, a filled band, or dots with intervals."""
    pairs = [(x(a), y(b)) for a, b in zip(trace["x"], trace["y"], strict=True) if _is_known(a) and _is_known(b)]
    colour, parts = _colour_of(trace), []
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)
    if trace.get("fill") == "toself":
        return [f'<polygon points="{points}" fill="{trace["fillcolor"]}"/>']
    if "lines" in trace["mode"]:
        dash = ' stroke-dasharray="3 3"' if trace.get("line", {}).get("dash") else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    if errors := trace.get("error_x"):
        for value, (_, b), up, down in zip(trace["x"], pairs, errors["array"], errors["arrayminus"], strict=True):
            parts.append(_line(x(value - down), b, x(value + up), b, colour, width=2))
    if "markers" in trace["mode"]:
        faint = trace.get("marker", {}).get("opacity", 1)
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}" opacity="{faint}"/>' for a, b in pairs]
    return parts


def _cells(trace: Mapping[str, Any], x: Axis, y: Axis) -> list[str]:
    """Return the cells of a matrix, darker for larger values, with their values.

    If negative numbers are expected (`zmin`), these have another colour than positive ones.
    """
    known = [v for row in trace["z"] for v in row if _is_known(v)]
    largest, smallest = trace.get("zmax") or max(known, default=1.0) or 1.0, trace.get("zmin", 0.0)
    wide, high = abs(x.end - x.start) / len(x.names) - 1, abs(y.end - y.start) / len(y.names) - 1
    digits, parts = 2 if wide > NARROW else 1, []
    for name, row in zip(trace["y"], trace["z"], strict=True):
        for column, value in zip(trace["x"], row, strict=True):
            if not _is_known(value):
                continue
            a, b = x(column), y(name)
            share = min(1.0, value / smallest if value < 0 > smallest else max(0.0, value / largest))
            colour = OTHER_CELL if value > 0 > smallest else CELL
            fill = f'fill="{colour}" fill-opacity="{0.08 + 0.72 * share:.2f}"'
            parts.append(
                f'<rect x="{a - wide / 2:.1f}" y="{b - high / 2:.1f}" width="{wide:.1f}" height="{high:.1f}" {fill}/>'
            )
            parts.append(_text(a, b + 4, f"{value:.{digits}f}", anchor="middle", size=9))
    return parts


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _colour_of(trace: Mapping[str, Any]) -> str:
    return str(trace.get("line", {}).get("color") or trace.get("marker", {}).get("color") or GREY)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, more: str = "") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"{" " + more if more else ""}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
