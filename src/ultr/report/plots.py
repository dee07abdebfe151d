"""Plots as plotly.js takes them: plain data, so that drawing needs no library here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultr.report.parts import Plot

Numbers = Sequence[float | None]
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
    categories: bool = False,
    order: Sequence[str] = (),
) -> Plot:
    """Lines with their points; `bands` are intervals around some of them.

    A name has its colour by its place in `order`, so that it is the same in every plot.
    """
    order = list(order or lines)
    data: list[dict[str, Any]] = []
    for name, (xs, ys) in lines.items():
        if bands and name in bands:
            data.append(_band(xs, *bands[name]))
        style = {"color": _colour(order.index(name)), **({"dash": "dot"} if name in dashed else {})}
        data.append(
            {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(xs), "y": list(ys), "line": style}
        )
    layout = {
        "xaxis": {"title": {"text": x}, **({"type": "category"} if categories else {})},
        "yaxis": {"title": {"text": y}, **({"rangemode": "tozero"} if from_zero else {})},
        "hovermode": "x unified",
        "hoverdistance": -1,
        "showlegend": len(lines) > 1,
    }
    return Plot(title, {"data": data, "layout": layout}, caption)


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _band(xs: Sequence[Any], low: Numbers, high: Numbers) -> dict[str, Any]:
    known = [(x, a, b) for x, a, b in zip(xs, low, high, strict=True) if a is not None and b is not None]
    return {
        "type": "scatter",
        "x": [x for x, _, _ in known] + [x for x, _, _ in reversed(known)],
        "y": [b for _, _, b in known] + [a for _, a, _ in reversed(known)],
        "fill": "toself",
        "fillcolor": "rgba(120,130,140,0.18)",
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
    }


def heat_map(
    title: str,
    values: Sequence[Sequence[float | None]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    x: str,
    y: str,
    caption: str = "",
    largest: float | None = 1.0,
) -> Plot:
    """A matrix, its first row on top."""
    few = len(rows) <= 12 and len(columns) <= 12
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in values],
        "x": list(columns),
        "y": list(rows),
        "zmin": 0,
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
    return Plot(title, {"data": [trace], "layout": layout}, caption, height=max(340, min(700, 60 + 24 * len(rows))))


def interval_plot(title: str, rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str = "") -> Plot:
    """Each row's mean with the ends of its interval."""
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
    """How often values occur, in shares; counted here, so that a page does not grow with them."""
    known = {name: found[np.isfinite(found)] for name, found in values.items()}
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hvh", "color": _colour(i)},
            **({"fill": "tozeroy"} if len(known) == 1 else {}),
            "name": name,
            "x": middle,
            "y": (np.histogram(found, edges)[0] / max(1, len(found))).tolist(),
        }
        for i, (name, found) in enumerate(known.items())
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


def dot_plot(
    title: str, rows: Mapping[str, tuple[Sequence[float], float, float]], *, x: str, caption: str = ""
) -> Plot:
    """Each row's runs as dots, and the interval of their mean."""
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "runs",
        "x": [value for values, _, _ in rows.values() for value in values],
        "y": [name for name, (values, _, _) in rows.items() for _ in values],
        "marker": {"size": 7, "opacity": 0.5, "color": COLOURS[0]},
        "hovertemplate": "%{y}: %{x:.4f}<extra></extra>",
    }
    summary = interval_plot(title, {n: (float(np.mean(v)), low, high) for n, (v, low, high) in rows.items()}, x=x)
    mean = {
        **summary.figure["data"][0],
        "name": "mean, 95% interval",
        "marker": {"size": 10, "symbol": "line-ns-open", "color": COLOURS[1]},
    }
    layout = {**summary.figure["layout"], "showlegend": True}
    return Plot(title, {"data": [dots, mean], "layout": layout}, caption, height=summary.height + 40)
