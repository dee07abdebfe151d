"""Messages and progress of commands on stderr, through Python's logging: as text, or as JSON lines with --log-json.

`words.print` makes a record of the logger `ultr.cli`. The library logs to `ultr`. One handler prints the records of
both. If stderr is not a terminal, progress is a line every few seconds instead of a bar.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ultr.errors import OptionError, nearest, redact

LINE_SECONDS = 8.0  # between two lines of progress; users are promised one at least every 10 seconds
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
COLOURS = {"warning": "yellow", "error": "bold red"}  # of the labels of messages
UNCHANGED = {"markup": False, "soft_wrap": True}  # of the console: print a text as it is
LOG_LEVEL = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="Minimum level of messages: debug to error.")
]
LOG_JSON = Annotated[bool, typer.Option("--log-json", help="Print messages and progress as JSON lines.")]
logger = logging.getLogger("ultr.cli")


class Words:
    """The messages of a command."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.quiet = False
        self.as_json = False
        self.display: _Display | None = None  # the progress that is shown now

    @property
    def has_bars(self) -> bool:
        return self.console.is_terminal and not self.as_json

    def print(
        self,
        message: str,
        *,
        level: str = "info",
        label: str | None = None,
        fields: Mapping[str, Any] | None = None,
        soft_wrap: bool = False,
        emoji: bool = True,
    ) -> None:
        """Print a message with markup of rich; warnings and errors begin with a label, which is their level by default.

        With --log-json, the line also has `fields`.
        """
        message = redact(message)
        shown = f"[{COLOURS[level]}]{label or level}:[/] {message}" if level in COLOURS else message
        text = Text.from_markup(message, emoji=emoji).plain
        options = {"soft_wrap": soft_wrap, "emoji": emoji}
        logger.log(LEVELS[level], text, extra={"printed": (shown, options), "fields": fields or {}})

    def say(self, message: str, **options: Any) -> None:
        """Print a message as it is, which is not broken into lines; options are those of `print`."""
        self.print(plain(message), soft_wrap=True, emoji=False, **options)

    def status(self, message: str) -> AbstractContextManager[Any]:
        """Show a message while a `with` block runs: on a terminal beside a moving sign, else as lines."""
        message = redact(message)
        if self.has_bars:
            return self.console.status(plain(message))
        return _Lines(message.removesuffix(" ..."), "")


words = Words()


def plain(text: str) -> str:
    """Escape square brackets, which the library rich, which prints the text, would take for markup."""
    return text.replace("[", r"\[")


class _Handler(logging.Handler):
    """Print records on stderr; a stage changes the description of the progress that is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        stage = getattr(record, "stage", None)
        if stage is not None and words.display is not None:
            words.display.begin(stage)
        if words.quiet:
            return
        text = record.getMessage()
        if words.as_json:
            now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            content = {"time": now, "level": record.levelname.lower(), "message": text}
            content |= {} if stage is None else {"stage": stage}
            print(json.dumps(content | getattr(record, "fields", {})), file=sys.stderr, flush=True)
        elif stage is None:
            message, options = getattr(record, "printed", (text, UNCHANGED))
            words.console.print(message, **options)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Print the records of the loggers `ultr` and `ultr.cli` on stderr while a `with` block runs."""
    package, handler = logging.getLogger("ultr"), _Handler()
    words.as_json, level, propagates = False, package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagates


def with_log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options --log-level and --log-json."""

    @functools.wraps(command)
    def run(*arguments: Any, log_level: str, log_json: bool, **options: Any) -> None:
        if log_level not in LEVELS:
            hint = nearest(log_level, LEVELS)
            raise OptionError("unknown log level", got=f"--log-level {log_level}", hint=hint)
        words.as_json = log_json
        logging.getLogger("ultr").setLevel(LEVELS[log_level])
        command(*arguments, **options)

    add_options(run, command, {"log_level": (LOG_LEVEL, "info"), "log_json": (LOG_JSON, False)})
    return run


def with_options(parameter: str, options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of commands that puts options, name -> annotated type, in the place of a parameter.

    The options have no defaults. The parameter gets the values of those that the user has passed, by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            passed = {name: value for name in options if (value := values.pop(name)) is not None}
            command(**values, **{parameter: passed})

        add_options(run, command, {name: (kind, None) for name, kind in options.items()}, instead_of=parameter)
        return run

    return decorate


def add_options(
    run: Callable[..., None],
    command: Callable[..., None],
    options: Mapping[str, tuple[Any, Any]],
    *,
    instead_of: str = "",
) -> None:
    """Give `run` the parameters of a command, and options, name -> (type, default), at the end or for a parameter."""
    signature = inspect.signature(command, eval_str=True)
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]
    parameters = list(signature.parameters.values())
    place = list(signature.parameters).index(instead_of) if instead_of else len(parameters)
    parameters[place : place + 1] = further
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **{name: kind for name, (kind, _) in options.items()}}
    run.__annotations__.pop(instead_of, None)


# --- Progress ---------------------------------------------------------------------------------------------------------


class _Display(ABC):
    """Progress of a command: what it does now, how much of it is done, and a text about it."""

    @abstractmethod
    def update(self, **changes: Any) -> None:
        """Change the `description`, the numbers `completed` and `total`, or the text `figure`; None changes nothing."""

    @abstractmethod
    def begin(self, stage: str) -> None:
        """Show that a stage begins."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        self._outer, words.display = words.display, self
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        words.display = self._outer


class _Bar(_Display):
    """A bar on a terminal."""

    def __init__(self, description: str, figure: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figure]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=words.console, disable=words.quiet)
        self._task = self._bar.add_task(description, total=None, figure=figure)

    def update(self, **changes: Any) -> None:
        self._bar.update(self._task, **_given(changes))

    def begin(self, stage: str) -> None:
        self._bar.update(self._task, description=stage)

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()


class _Lines(_Display):
    """A line every few seconds, from a thread of its own, because some stages report nothing while they run."""

    def __init__(self, description: str, figure: str) -> None:
        self._begun = self._since = time.monotonic()  # of the display, and of the stage
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultr-progress", daemon=True)
        self._now: dict[str, Any] = {"description": description, "completed": 0.0, "total": None, "figure": figure}

    def update(self, **changes: Any) -> None:
        given = _given(changes)
        if given.get("description", self._now["description"]) != self._now["description"]:
            self.begin(given["description"])
        self._now = {**self._now, **given}

    def begin(self, stage: str) -> None:
        self._since = time.monotonic()
        self._now = {"description": stage, "completed": 0.0, "total": None, "figure": ""}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LINE_SECONDS):
            now, clock = self._now, time.monotonic()
            done, total, figure = now["completed"], now["total"], now["figure"]
            is_unit = figure and " " not in figure  # the name of what is counted; otherwise metrics of training
            parts = []
            fields: dict[str, Any] = {"progress": now["description"], "seconds": round(clock - self._begun, 1)}
            if done or total:
                parts.append(
                    f"{done:,.0f}" + (f" of {total:,.0f}" if total else "") + (f" {figure}" if is_unit else "")
                )
                fields |= {"done": done, "total": total}
            parts += [figure] if figure and not is_unit else []
            parts.append(f"{clock - self._begun:.0f} s")
            if total and done:
                left = (clock - self._since) * (total - done) / done
                how = "at most" if " " in figure else "about"  # training may stop early
                parts.append(f"{how} {left:.0f} s left")
                fields["seconds_left"] = round(left, 1)
            message = f"{now['description']}: {', '.join(parts)}"
            logger.info(message, extra={"printed": (message, UNCHANGED), "fields": fields})


def _given(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def progress_bar(description: str, figure: str = "") -> _Display:
    """Return progress on stderr: a bar on a terminal, else a line every few seconds."""
    return _Bar(description, figure) if words.has_bars or words.quiet else _Lines(description, figure)
