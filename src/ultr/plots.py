"""Plots as SVG files, drawn without a plotting library."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from ultr.compare import Comparison, interval
from ultr.files import atomic_path

WIDTH, LABEL_WIDTH, ROW_HEIGHT, HEAD = 860, 260, 26, 58


def write_dot_plot(path: Path, result: Comparison) -> None:
    """Each method's seeds as dots, their mean with its 95% interval as a bar; one panel per metric."""
    panels = [_panel(result, metric, i) for i, metric in enumerate(result.metrics)]
    height = len(panels) * _panel_height(result)
    style = (
        "text{font:13px system-ui,sans-serif;fill:#222}.axis{stroke:#bbb}.dot{fill:#3b6ea5;fill-opacity:.45}"
        ".mean{stroke:#c0392b;stroke-width:2.5}@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#ddd}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{style}</style>'
    with atomic_path(path, overwrite=True) as temporary:
        temporary.write_text(head + "".join(panels) + "</svg>\n")


def _panel_height(result: Comparison) -> int:
    return HEAD + ROW_HEIGHT * len(result.rows) + 20


def _panel(result: Comparison, metric: str, number: int) -> str:
    values = np.concatenate([row.figures[metric] for row in result.rows])
    margin = 0.06 * max(float(np.ptp(values)), 1e-9)
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
