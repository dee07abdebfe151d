"""Plots as SVG pictures, for documents that cannot run the script of a report page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

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
    """Return a plot (see `parts.Plot`) of lines, dots, intervals or coloured cells as the text of an SVG file."""
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
        place, colour = TOP + 8 + 18 * i, _colour(trace)
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
    colour, parts = _colour(trace), []
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


def _colour(trace: Mapping[str, Any]) -> str:
    return str(trace.get("line", {}).get("color") or trace.get("marker", {}).get("color") or GREY)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, more: str = "") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"{" " + more if more else ""}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
