"""What all commands share: where words go, and common options."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

words = Console(stderr=True, highlight=False)  # data goes to stdout, words to stderr


def print_table(table: Table) -> None:
    """A table on stdout, as wide as it needs to be where that is no terminal."""
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.", min=0, max=2**32 - 1)]
RequestColumn = Annotated[str | None, typer.Option("--request", help="Column that tells requests apart.")]
PositionColumn = Annotated[str | None, typer.Option("--position", help="Column of the position shown.")]
FeatureColumns = Annotated[
    str | None, typer.Option("--features", help="Feature columns, comma-separated; patterns such as 'f_*'.")
]
CategoricalColumns = Annotated[
    str | None, typer.Option("--categorical", help="Feature columns that hold categories or ids, comma-separated.")
]
SegmentColumn = Annotated[
    str | None, typer.Option("--segment", help="Column by whose values examination differs, such as the device.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of data sets (or ULTR_DATA).")]
Eta = Annotated[float, typer.Option("--eta", help="Severity of simulated position bias.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Click noise of simulated users.")]
ActionColumns = Annotated[str | None, typer.Option("--actions", help="Action columns, comma-separated.")]


def progress_bar() -> Progress:
    """Progress on stderr, and none where that is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figure]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=words, disable=words.quiet or not words.is_terminal)


def pages_can_be_made() -> bool:
    """Whether what pages need is installed; if not, it is said, as work that is done should not end in a refusal."""
    lacking = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if lacking:
        words.print(f"no page was written: pip install {' '.join(lacking)}")
    return not lacking


def one_line(text: str) -> str:
    """Text without line ends and other control characters, which names in files may have."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def plain(text: str) -> str:
    """Text whose square brackets are not markup."""
    return text.replace("[", r"\[")
