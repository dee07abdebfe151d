"""Functions that return plots as plain data, which plotly.js draws in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultr.evaluation.scores import mean_with_interval
from ultr.report.parts import Plot

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
        "xgap": 1,
        "ygap": 1,
    }
    layout = {
        "xaxis": {"title": {"text": x}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": y}, "type": "category", "autorange": "reversed", "showgrid": False},
    }
    height = 60 + 24 * len(rows) if len(rows) <= MANY_ROWS else 220 + 15 * len(rows)
    return Plot(title, {"data": [trace], "layout": layout}, caption, height=max(340, height))


def interval_plot(title: str, rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str = "") -> Plot:
    """Return a plot of means with intervals; `rows` maps names to (mean, low, high)."""
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
        "hovertemplate": "%{y}: %{x:.4f} [%{customdata[0]:.4f}, %{customdata[1]:.4f}]<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": x}},
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
