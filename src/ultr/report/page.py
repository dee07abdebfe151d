"""Report pages: their parts, and the HTML file, which contains all it needs and can be viewed offline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ultr._version import __version__
from ultr.errors import UltrError
from ultr.utils.files import atomic_path

# --- Parts ------------------------------------------------------------------------------------------------------------
# The parts of a report page: texts, tables, notes and plots, grouped in sections.


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    KIND: ClassVar[str] = "text"
    text: str


class Heading(Text):
    """A heading within a section."""

    KIND = "heading"


class Code(Text):
    """A command or other text to copy."""

    KIND = "code"


@dataclass(frozen=True)
class Notes:
    """A list of notes, coloured as warnings, or green if `good`."""

    KIND: ClassVar[str] = "notes"
    notes: Sequence[str]
    good: bool = False


@dataclass(frozen=True)
class Headline:
    """The decision in large print, with its reason, coloured as a warning, or green if `good`."""

    KIND: ClassVar[str] = "headline"
    text: str
    reason: str = ""
    good: bool = False


@dataclass(frozen=True)
class Answers:
    """Questions or topics, each with its answer in words."""

    KIND: ClassVar[str] = "answers"
    answers: Mapping[str, str]


@dataclass(frozen=True)
class Card:
    """One important value in large print, with its name and some lines below."""

    name: str
    value: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Cards:
    """A row of cards."""

    KIND: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True)
class Table:
    """A table of texts; `marked` has the indices of the rows to highlight."""

    KIND: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class Folded:
    """Parts under a title that are hidden until the reader clicks the title."""

    KIND: ClassVar[str] = "folded"
    title: str
    parts: Sequence[Part]
    open: bool = False


@dataclass(frozen=True)
class Plot:
    """An interactive plot: data and layout for plotly.js, a title and a caption."""

    KIND: ClassVar[str] = "plot"
    title: str
    figure: Mapping[str, Any]
    caption: str = ""
    height: int = 360


@dataclass(frozen=True)
class Grid:
    """Plots side by side, if the screen is wide enough."""

    KIND: ClassVar[str] = "grid"
    plots: Sequence[Plot]


Part = Text | Notes | Headline | Answers | Cards | Table | Plot | Grid | Folded


@dataclass(frozen=True)
class Section:
    """A section of the page, shown as a tab."""

    title: str
    parts: Sequence[Part]

    @property
    def key(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


# --- Pages ------------------------------------------------------------------------------------------------------------
# Write sections as one HTML file, which contains plotly.js, the style and the data and can be viewed offline.


def missing_packages() -> list[str]:
    """Return the names of the packages that pages need and that are not installed."""
    return [name for name in ("jinja2", "plotly") if find_spec(name) is None]


def write_page(path: Path, title: str, lede: str, sections: Sequence[Section], *, overwrite: bool = False) -> Path:
    """Write sections as an HTML page, and return its path; sections without parts are left out."""
    text = page(title, lede, [section for section in sections if section.parts])
    with atomic_path(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def page(title: str, lede: str, sections: Sequence[Section]) -> str:
    """Return the HTML of a page; `lede` is the paragraph below the title."""
    if missing := missing_packages():
        raise UltrError(f"an HTML page needs {' and '.join(missing)}", hint=f"run: pip install {' '.join(missing)}")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    plots: list[str] = []

    def number(plot: Plot) -> int:
        """Keep the data of a plot for the script of the page, and return the index of the plot."""
        plots.append(_json(plot.figure))
        return len(plots) - 1

    environment = Environment(
        loader=PackageLoader("ultr.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        title=title,
        lede=lede,
        sections=sections,
        number=number,
        plots=plots,
        version=__version__,
        style=_file("page.css"),
        script=_file("page.js"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


def _file(name: str) -> str:
    return resources.files("ultr.report").joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """Return JSON that is safe in a script element: NaN and infinity are null, and < > & are escaped."""
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
