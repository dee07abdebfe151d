"""What a page is made of: plots, tables, notes and text, in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    KIND: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Heading:
    """Of what follows within a section."""

    KIND: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Notes:
    """Warnings, or a word that there are none."""

    KIND: ClassVar[str] = "notes"
    notes: Sequence[str]
    good: bool = False


@dataclass(frozen=True)
class Card:
    """One figure that matters, large."""

    name: str
    figure: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Cards:
    KIND: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True)
class Table:
    """Rows of text; `marked` are the numbers of rows that stand out."""

    KIND: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class Plot:
    """An interactive plot: what plotly.js draws, and what it shows in words."""

    KIND: ClassVar[str] = "plot"
    title: str
    figure: Mapping[str, Any]
    caption: str = ""
    height: int = 360


@dataclass(frozen=True)
class Grid:
    """Plots side by side, where there is room."""

    KIND: ClassVar[str] = "grid"
    plots: Sequence[Plot]


@dataclass(frozen=True)
class Code:
    """Something to copy."""

    KIND: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Folded:
    """Parts that are seen when asked for."""

    KIND: ClassVar[str] = "folded"
    title: str
    parts: Sequence[Part]
    open: bool = False


Part = Text | Heading | Notes | Cards | Table | Plot | Grid | Code | Folded


@dataclass(frozen=True)
class Section:
    """A tab of the page."""

    title: str
    parts: Sequence[Part]

    @property
    def key(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())
