"""Options that several commands have, and functions that print tables and messages."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ultr.cli.messages import plain, words
from ultr.errors import OptionError, UltrError

if TYPE_CHECKING:
    from ultr.checks.pitfalls import Pitfall


def new_table(title: str, *, names: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """Return a table with columns of names, and then of numbers, which are aligned on the right."""
    table = Table(title=title, title_justify="left")
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def print_table(table: Table) -> None:
    """Print a table on stdout; if stdout is not a terminal, the table can be 200 characters wide."""
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.", min=0, max=2**32 - 1)]
Device = Annotated[str, typer.Option("--device", help="Where to compute: auto, cpu, cuda or cuda:1.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of data sets; default: the environment variable ULTR_DATA.")
]
Eta = Annotated[float, typer.Option("--eta", help="Severity of the simulated position bias; 0: none.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Probability that users click an irrelevant item.")]


def column(metavar: str, text: str) -> Any:
    """Return the type of an option that names columns of a log, which has its own panel in --help."""
    panel = "Columns of the log: recognised by common names, or named here"
    return Annotated[str | None, typer.Option(metavar=metavar, help=text, rich_help_panel=panel)]


COLUMNS = {  # role -> type of the option
    "request": column("NAME", "Id of the request."),
    "position": column("NAME", "Position at which the item was shown."),
    "row": column("NAME", "Row of the item, if users see a grid."),
    "column": column("NAME", "Column of the item, if users see a grid."),
    "item": column("NAME", "Id of the item."),
    "features": column("NAMES", "Features: names or patterns, 'price,f_*'."),
    "categorical": column("NAMES", "Features that are categories or ids."),
    "actions": column("NAMES", "Feedback, such as click,dwell."),
    "query": column("NAME", "Query; requests of one query show the same items."),
    "segment": column("NAMES", "Columns on whose values examination depends, such as device,surface."),
    "randomised": column("NAME", "Mark of requests shown in random order."),
    "swaps": column("NAME", "Drawn arm of ultr explore, such as 1-3."),
    "shown": column("NAME", "Mark of rows that users could see (1); rows with 0 are left out."),
    "relevance": column("NAME", "True labels, if they are known."),
}
FOUND_SEGMENT = {"segment": column("NAMES", "Columns on which examination depends; none: do not look for one.")}
LOG_COLUMNS = tuple(role for role in COLUMNS if role != "relevance")


def columns(*roles: str) -> dict[str, Any]:
    """Return the options for columns with these roles, for `with_options`."""
    return {role: COLUMNS[role] for role in roles}


OnDuplicates = Annotated[
    str,
    typer.Option(
        "--on-duplicates",
        help="Rows of a request with the same item or position: error (items only get a note), first (keep the first "
        "row) or sum (add up the actions).",
    ),
]
ClickLabels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="TEXT",
        help="Expression over actions; a value above zero counts as a click. Several are summed. Default: click.",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="CONDITION", help="Use only such rows, e.g. 'country = de'; may be repeated."),
]
ActionDelay = Annotated[
    list[str] | None,
    typer.Option(
        "--action-delay",
        metavar="ACTION=TIME",
        help="How late an action arrives, such as purchase=7d; younger requests are left out. May be repeated.",
    ),
]
Time = Annotated[
    str | None, typer.Option("--time", metavar="NAME", help="Column with the time of requests, for --action-delay.")
]
ActionsUntil = Annotated[
    str | None,
    typer.Option(
        "--actions-until",
        metavar="TIME",
        help="Time up to which the log has actions. Default: the time of its last request.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Memory limit of DuckDB, e.g. 4GB; default: half of the free memory.")
]
Master = Annotated[
    str | None,
    typer.Option("--master", help="Spark master, e.g. local[4]; default: the environment variable SPARK_MASTER."),
]
SOURCES = "files, folders (also with date=.../ partitions), 'patterns*.parquet' or URLs (s3:// gs:// hdfs:// file://)"
AnyLog = Annotated[
    list[str], typer.Argument(metavar="LOG", help=f"A log, as Parquet, Arrow, CSV, JSONL or SVMlight: {SOURCES}.")
]
# The column options of each command that a `next:` line may name.
CARRIED = {
    "bias": LOG_COLUMNS,
    "train": LOG_COLUMNS,
    "score": ("request", "position", "row", "column", "item", "features"),
}


def print_next(command: str, *arguments: object, columns: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Print the command that comes next, quoted for a shell.

    `columns` are the columns that the user named, by role. Those that the next command has an option for are added.
    Options without a value (None or empty) are left out, and those with a list are repeated.
    """
    carried = {role: name for role, name in (columns or {}).items() if role in CARRIED.get(command, ())}
    parts = ["ultr", command, *map(str, arguments)]
    for name, value in {**carried, **options}.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and (name in carried or each != ""):
                parts += [f"--{name.replace('_', '-')}", str(each)]
    words.say(f"next: {shlex.join(parts)}")


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the values of an evaluation on one line."""
    return " ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def one_source(sources: Sequence[str]) -> str:
    """Return the sources of a command line as one text, in which commas separate them."""
    if len(sources) > 1 and (name := next((name for name in sources if "," in name), None)) is not None:
        hint = "rename it, or pass a folder or a pattern"
        raise OptionError("a name with a comma cannot be one of several sources", got=f"'{name}'", hint=hint)
    return ",".join(sources)


def bytes_of(memory: str | None) -> int | None:
    """Return the bytes of a size such as 4GB; None if it is None."""
    from ultr.utils.memory import parse_bytes

    try:
        return None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise OptionError("--memory must be a size such as 512MB or 4GB", got=f"'{memory}'") from error


def check_engine(engine: str | None, **others: Any) -> None:
    """Raise OptionError if an option of engines was passed without --engine."""
    if engine is None and (name := next((name for name, value in others.items() if value is not None), None)):
        raise OptionError(f"--{name} is an option of engines", hint=f"pass --engine too, or leave out --{name}")


def free_path(name: str) -> Path:
    """Return a path in the current folder that does not exist: this name, or the name with a number."""
    path, number = Path(name), 2
    while path.exists():
        path, number = Path(name).with_stem(f"{Path(name).stem}-{number}"), number + 1
    return path


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        words.print(f"[yellow]note:[/] {plain(one_line(note))}", soft_wrap=True)


def print_warning(pitfall: Pitfall) -> None:
    """Print a problem of the data, and what to do."""
    print_warnings([f"{pitfall.name}: {pitfall.what}; {pitfall.hint}"])


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        words.say(one_line(warning), level="warning")


def columns_text(columns: Mapping[str, Any], most: int = 12) -> str:
    """Return a text with the column that was taken for each part of a log."""
    parts = []
    for role, names in columns.items():
        listed = [names] if isinstance(names, str) else list(names)
        more = f" and {len(listed) - most} more" if len(listed) > most else ""
        parts.append(f"{role} {', '.join(repr(name) for name in listed[:most])}{more}")
    return "; ".join(parts)


def without_none(columns: Mapping[str, str]) -> dict[str, Any]:
    """Return columns by role, in which the segment `none` is an empty name: no column."""
    return {**columns, "segment": ""} if columns.get("segment") == "none" else dict(columns)


def sum_of_labels(labels: list[str] | None) -> str | None:
    """Return the label of several --label, which is their sum, as for ultr train; None without one."""
    from ultr.log.labels import sum_of_goals

    return None if not labels else sum_of_goals(labels) if len(labels) > 1 else labels[0]


def with_segment(source: str, columns: dict[str, Any], *, label: str | None, **reading: Any) -> dict[str, Any]:
    """Return columns with a segment if examination in a log depends on a column, and print it.

    `columns` are those that the user named, by role, and are returned as they are if one of them is the segment.
    """
    from ultr.bias.auto_segment import find_segment

    try:
        found = None if "segment" in columns else find_segment(source, label=label, columns=columns, **reading)
    except UltrError:
        return columns  # reading the log reports the error
    if found is None:
        return columns
    words.say(one_line(f"segments: {found}; --segment none switches this off"))
    return {**columns, "segment": found.column}


def pages_can_be_made() -> bool:
    """Return whether the packages that HTML pages need are installed; if not, print how to install them."""
    from ultr.report.page import missing_packages

    if missing := missing_packages():
        words.say(f"HTML pages are not written; to get them, run: pip install {' '.join(missing)}")
    return not missing


def one_line(text: str) -> str:
    """Return a text with line ends and other control characters escaped; names from files may contain them."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
