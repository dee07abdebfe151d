"""The parts of a report page: texts, tables, notes and plots, grouped in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


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


Part = Text | Notes | Cards | Table | Plot | Grid | Folded


@dataclass(frozen=True)
class Section:
    """A section of the page, shown as a tab."""

    title: str
    parts: Sequence[Part]

    @property
    def key(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())
