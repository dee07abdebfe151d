"""Sections to one HTML file that needs no network: plotly.js, style and data are inside."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ultr import __version__
from ultr.errors import UltrError
from ultr.files import atomic_path
from ultr.report.parts import Plot, Section


def write_page(path: Path, title: str, lede: str, sections: Sequence[Section], *, overwrite: bool = False) -> Path:
    """Write a page; sections without parts are left out."""
    text = page(title, lede, [section for section in sections if section.parts])
    with atomic_path(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def page(title: str, lede: str, sections: Sequence[Section]) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UltrError("pages need jinja2 and plotly", mend="pip install jinja2 plotly") from error

    plots: list[str] = []

    def number(plot: Plot) -> int:
        """Keep a plot for the script, and give it a number."""
        plots.append(_json(plot.figure))
        return len(plots) - 1

    environment = Environment(
        loader=PackageLoader("ultr.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    body = environment.get_template("page.html.jinja").render(
        title=title, lede=lede, sections=sections, number=number, plots=plots, version=__version__
    )
    # What is put in last is not looked through for what is put in.
    for mark, content in {
        "/*style*/": _file("page.css"),
        "/*plots*/": f"[{','.join(plots)}]",
        "/*script*/": _file("page.js"),
        "/*plotly*/": get_plotlyjs().replace("</script", "<\\/script"),
    }.items():
        body = body.replace(mark, content, 1)
    return body


def _file(name: str) -> str:
    return resources.files("ultr.report").joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """JSON that can stand in a script element: what is not a number is null, and no tag can end or begin."""
    text = json.dumps(_finite(content), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float):
        return float(f"{content:.6g}") if math.isfinite(content) else None
    return content
