"""Plots as SVG files, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from ultr.compare import Comparison, interval
from ultr.files import atomic_path

WIDTH, LABEL_WIDTH, ROW_HEIGHT, HEAD = 860, 260, 26, 58
PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 74, 230, 40, 52
COLOURS = ("#c0392b", "#3b6ea5", "#2e8b57", "#b8860b", "#7d3c98", "#555555", "#008b8b", "#d2691e")
CELL = 40
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.axis{stroke:#bbb}.dot{fill:#3b6ea5;fill-opacity:.45}"
    ".mean{stroke:#c0392b;stroke-width:2.5}.line{fill:none;stroke-width:2}.band{fill-opacity:.15;stroke:none}"
    "@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#ddd}}"
)


@dataclass(frozen=True)
class Line:
    """A line of a plot: a value at each x, and the ends of its interval where it has one."""

    name: str
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over the same x."""

    title: str
    x: Sequence[float]
    x_label: str
    y_label: str
    lines: Sequence[Line]


def write_line_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Panels one below the other, each with its legend; intervals are bands."""
    parts = [_line_panel(panel, i * PANEL_HEIGHT) for i, panel in enumerate(panels)]
    _write(path, WIDTH, len(panels) * PANEL_HEIGHT, parts)


def write_matrix_plot(path: Path, matrices: Mapping[str, np.ndarray], *, names: Sequence[object], axes: str) -> None:
    """Square matrices of numbers from 0 to 1 by the same names, one below the other; what is not known is blank."""
    height = HEAD + CELL * len(names) + 30
    parts = []
    for number, (title, matrix) in enumerate(matrices.items()):
        top = number * height
        parts.append(f'<text x="12" y="{top + 22}" font-weight="600">{escape(title)}</text>')
        parts.append(f'<text x="12" y="{top + 42}">{escape(axes)}</text>')
        for i, name in enumerate(names):
            y = top + HEAD + CELL * i
            parts.append(f'<text x="40" y="{y + 25}" text-anchor="end">{escape(str(name))}</text>')
            x = 50 + CELL * i
            bottom = top + HEAD + CELL * len(names) + 18
            parts.append(f'<text x="{x + 20}" y="{bottom}" text-anchor="middle">{escape(str(name))}</text>')
            for j, value in enumerate(matrix[i].tolist()):
                if np.isfinite(value):
                    parts.append(_cell(50 + CELL * j, y, value))
    _write(path, max(420, 80 + CELL * len(names)), len(matrices) * height, parts)


def _cell(x: int, y: int, value: float) -> str:
    shade = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="#3b6ea5" fill-opacity="{value:.3f}"/>'
    return shade + f'<text x="{x + CELL / 2 - 1}" y="{y + 24}" text-anchor="middle">{value:.2f}</text>'


def _line_panel(panel: Panel, top: int) -> str:
    xs = [float(x) for x in panel.x]
    ends = [v for line in panel.lines for v in (*line.values, *line.low, *line.high) if np.isfinite(v)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = _margin(low, high)
    low, high = low - margin, high + margin
    left, right, up, down = LEFT, WIDTH - RIGHT, top + TOP, top + PANEL_HEIGHT - BOTTOM

    def at(x: float, y: float) -> str:
        across = (x - xs[0]) / ((xs[-1] - xs[0]) or 1)
        return f"{left + (right - left) * across:.1f},{down - (down - up) * (y - low) / (high - low):.1f}"

    parts = [f'<text x="12" y="{top + 22}" font-weight="600">{escape(panel.title)}</text>']
    for tick in np.linspace(low + margin, high - margin, 5).tolist():
        y = float(at(xs[0], tick).split(",")[1])
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke-opacity=".4"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for value in xs:
        across = at(value, low).split(",")[0]
        parts.append(f'<text x="{across}" y="{down + 18}" text-anchor="middle">{value:g}</text>')
    words = f"{panel.x_label}; vertical: {panel.y_label}"
    parts.append(f'<text x="{(left + right) / 2}" y="{down + 38}" text-anchor="middle">{escape(words)}</text>')
    for number, line in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        shown = [(x, y) for x, y in zip(xs, line.values, strict=True) if np.isfinite(y)]
        if len(line.low):
            over = [at(x, y) for x, y in zip(xs, line.high, strict=True) if np.isfinite(y)]
            under = [at(x, y) for x, y in zip(xs, line.low, strict=True) if np.isfinite(y)]
            parts.append(f'<polygon class="band" fill="{colour}" points="{" ".join(over + under[::-1])}"/>')
        for points in _unbroken(xs, line.values):
            drawn = " ".join(at(x, y) for x, y in points)
            parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
        for x, y in shown:
            cx, cy = at(x, y).split(",")
            parts.append(f'<circle fill="{colour}" cx="{cx}" cy="{cy}" r="3.5"/>')
        y = up + 10 + 20 * number
        parts.append(
            f'<line stroke="{colour}" stroke-width="3" x1="{right + 14}" x2="{right + 34}" y1="{y}" y2="{y}"/>'
        )
        parts.append(f'<text x="{right + 40}" y="{y + 4}">{escape(line.name)}</text>')
    return "".join(parts)


def _unbroken(xs: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches of a line between values that are not known."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, values, strict=True):
        if np.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def write_dot_plot(path: Path, result: Comparison) -> None:
    """Each method's seeds as dots, their mean with its 95% interval as a bar; one panel per metric."""
    panels = [_dot_panel(result, metric, i) for i, metric in enumerate(result.metrics)]
    _write(path, WIDTH, len(panels) * _panel_height(result), panels)


def _margin(low: float, high: float) -> float:
    """Room above and below, and something to divide by where all values are one."""
    return 0.06 * max(high - low, 1e-9, 1e-6 * abs(high))


def _write(path: Path, width: int, height: int, parts: Sequence[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
    with atomic_path(path, overwrite=True) as temporary:
        temporary.write_text(head + "".join(parts) + "</svg>\n")


def _panel_height(result: Comparison) -> int:
    return HEAD + ROW_HEIGHT * len(result.rows) + 20


def _dot_panel(result: Comparison, metric: str, number: int) -> str:
    values = np.concatenate([row.figures[metric] for row in result.rows])
    margin = _margin(float(values.min()), float(values.max()))
    low, high = float(values.min()) - margin, float(values.max()) + margin

    def x(value: float) -> float:
        return LABEL_WIDTH + (WIDTH - LABEL_WIDTH - 30) * (min(max(value, low), high) - low) / (high - low)

    top = number * _panel_height(result)
    parts = [f'<text x="12" y="{top + 24}" font-weight="600">{escape(metric)}</text>']
    for tick in np.linspace(low + margin, high - margin, 5):
        parts.append(f'<text x="{x(tick):.1f}" y="{top + 44}" text-anchor="middle">{tick:.4g}</text>')
    for i, row in enumerate(result.rows):
        y = top + HEAD + ROW_HEIGHT * (i + 0.5)
        figures = row.figures[metric]
        parts.append(f'<text x="12" y="{y + 4:.1f}">{escape(row.entry)}</text>')
        parts.append(f'<line class="axis" x1="{LABEL_WIDTH}" x2="{WIDTH - 30}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts += [f'<circle class="dot" cx="{x(value):.1f}" cy="{y:.1f}" r="4.5"/>' for value in figures]
        ends = interval(figures) if len(figures) > 1 else (figures[0], figures[0])
        mean = float(np.mean(figures))
        parts.append(f'<line class="mean" x1="{x(ends[0]):.1f}" x2="{x(ends[1]):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<line class="mean" x1="{x(mean):.1f}" x2="{x(mean):.1f}" y1="{y - 7:.1f}" y2="{y + 7:.1f}"/>')
    return "".join(parts)
