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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ultr.errors import OptionError, nearest, redact

LINE_SECONDS = 8.0  # between two lines of progress; users are promised one at least every 10 seconds
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
COLOURS = {"warning": "yellow", "error": "bold red"}  # of the labels of messages
LOG_LEVEL = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="Least level of messages: debug to error.")
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
        markup: bool = True,
        fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Print a message; warnings and errors begin with a label, which is their level unless one is given.

        With --log-json, the line also has `fields`.
        """
        message = redact(message)
        text = Text.from_markup(message, emoji=options.get("emoji", True)).plain if markup else message
        shown = f"[{COLOURS[level]}]{label or level}:[/] {message}" if level in COLOURS else message
        logger.log(
            LEVELS[level], text, extra={"printed": (shown, {"markup": markup, **options}), "fields": fields or {}}
        )

    def status(self, message: str) -> AbstractContextManager[Any]:
        """Show a message while a `with` block runs: on a terminal beside a moving sign, else as lines."""
        message = redact(message)
        if self.has_bars:
            return self.console.status(message)
        return _Lines(Text.from_markup(message).plain.removesuffix(" ..."))


words = Words()


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
            message, options = getattr(record, "printed", (text, {"markup": False, "soft_wrap": True}))
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

    signature = inspect.signature(command, eval_str=True)
    named = {"log_level": (LOG_LEVEL, "info"), "log_json": (LOG_JSON, False)}
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in named.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *further])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **{name: kind for name, (kind, _) in named.items()}}
    return run


# --- Progress ---------------------------------------------------------------------------------------------------------


class _Display:
    """Progress of a command: what it does now, how much of it is done, and a text about it."""

    def add_task(self, description: str, *, total: float | None, figure: str) -> Any:
        raise NotImplementedError

    def update(
        self,
        task: Any,
        *,
        description: str | None = None,
        completed: float | None = None,
        total: float | None = None,
        figure: str | None = None,
    ) -> None:
        raise NotImplementedError

    def begin(self, stage: str) -> None:
        """Show that a stage begins."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> _Display:
        self._outer, words.display = words.display, self
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        words.display = self._outer


class _Bar(_Display):
    """A bar on a terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figure]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=words.console, disable=words.quiet)
        self.start, self.stop = self._bar.start, self._bar.stop  # type: ignore[method-assign]

    def add_task(self, description: str, *, total: float | None, figure: str) -> Any:
        return self._bar.add_task(description, total=total, figure=figure)

    def update(self, task: Any, **changes: Any) -> None:
        self._bar.update(task, **{name: value for name, value in changes.items() if value is not None})

    def begin(self, stage: str) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, description=stage)


class _Lines(_Display):
    """A line every few seconds, from a thread of its own, because some stages report nothing while they run."""

    def __init__(self, description: str = "") -> None:
        self._begun = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultr-progress", daemon=True)
        self._now: dict[str, Any] = {"description": description, "completed": 0.0, "total": None, "figure": ""}
        self._since = self._begun  # when the stage began

    def add_task(self, description: str, *, total: float | None, figure: str) -> int:
        self._now = {"description": description, "completed": 0.0, "total": total, "figure": figure}
        return 0

    def update(self, task: Any, **changes: Any) -> None:
        given = {name: value for name, value in changes.items() if value is not None}
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
            done, total, in_stage = now["completed"], now["total"], clock - self._since
            parts = []
            fields: dict[str, Any] = {"progress": now["description"], "seconds": round(clock - self._begun, 1)}
            if done or total:
                parts.append(f"{done:,.0f}" + (f" of {total:,.0f}" if total else "") + _unit(now["figure"]))
                fields |= {"done": done, "total": total}
            parts += [now["figure"]] if now["figure"] and " " in now["figure"] else []
            parts.append(f"{clock - self._begun:.0f} s")
            if total and done:
                left = in_stage * (total - done) / done
                how = "at most" if " " in now["figure"] else "about"  # training, which has a metric, may stop early
                parts.append(f"{how} {left:.0f} s left")
                fields["seconds_left"] = round(left, 1)
            message = f"{now['description']}: {', '.join(parts)}"
            options = {"markup": False, "soft_wrap": True}
            logger.info(message, extra={"printed": (message, options), "fields": fields})


def _unit(figure: str) -> str:
    """Return a figure that is one word, the name of what is counted, with a blank before it."""
    return f" {figure}" if figure and " " not in figure else ""


def progress_bar() -> _Display:
    """Return progress on stderr: a bar on a terminal, else a line every few seconds."""
    return _Bar() if words.has_bars or words.quiet else _Lines()
