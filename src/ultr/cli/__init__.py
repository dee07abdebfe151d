"""The command line `ultr`: a table of commands, and error messages. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from typing import Any, NoReturn

import typer

from ultr._version import __version__
from ultr.cli import (
    bias,
    compare,
    demo,
    describe,
    evaluate,
    explore,
    export,
    judgments,
    prepare,
    report,
    reproduce,
    score,
    serve,
    show_options,
    simulate,
    train,
    update,
)
from ultr.cli.messages import messages_on_stderr, with_log_options, words
from ultr.cli.options import Json, one_line
from ultr.errors import OptionError, ProcessError, UltrError, missing_for_training
from ultr.utils.stores import as_url

INTERRUPTED = 130  # the exit code after Ctrl-C
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, or of a user's share of it
MESSAGE_DELAY = 10.0  # seconds that processes other than rank 0 wait before they print an error
UsageError: Any = typer.BadParameter.__base__  # of click, which newer versions of typer contain


def version(as_json: Json = False) -> None:
    """Print the version of ultr."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


COMMANDS = (
    demo.demo,
    describe.describe,
    simulate.simulate,
    prepare.prepare,
    bias.bias,
    explore.explore,
    judgments.judgments,
    train.train,
    update.update,
    evaluate.evaluate,
    score.score,
    compare.compare,
    report.report,
    export.export,
    serve.serve,
    reproduce.reproduce,
    show_options.options,
    version,
)

app = typer.Typer(
    name="ultr",
    help="Unbiased learning to rank from clicks and continuous feedback.",
    no_args_is_help=True,
    add_completion=True,  # ultr --install-completion
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(with_log_options(command))


def main() -> None:
    """Run a command; print an error on stderr and exit with its code (see `ultr.errors`)."""
    with messages_on_stderr():
        words.as_json = "--log-json" in sys.argv  # also for errors of the options themselves
        _run()


def _run() -> None:
    try:
        _check_arguments()
        # By itself, typer prints errors of options in a frame. Otherwise it raises them, and returns the exit code.
        sys.exit(app(prog_name="ultr", standalone_mode=not words.as_json))
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns a KeyboardInterrupt in a command into this exit
            _print_interrupt()
        raise
    except UltrError as error:
        _exit_with(error)
    except UsageError as error:
        _fail(error.format_message(), error)
    except KeyboardInterrupt:
        _print_interrupt()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_for_training(f"ultr {sys.argv[1]}", error)):
            _exit_with(missing)
        if os.environ.get("ULTR_DEBUG"):
            raise
        if isinstance(error, OSError) and (error.errno in FULL or error.filename is not None):
            where = "" if error.filename is None else f"{error.filename}: "
            hint = "check the path and its permissions"
            if error.errno in FULL:
                hint = "free some space, or write to another disk, then run again"
            _fail(one_line(f"{where}{error.strerror}; {hint}"), error)
        text = f"{type(error).__name__}: {error}"
        _fail(f"{text}\nset ULTR_DEBUG=1 to see the traceback", error, label="internal error")


def _exit_with(error: UltrError) -> NoReturn:
    """Print an error of the package, and exit with its code."""
    if isinstance(error, ProcessError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may send SIGTERM while this prints
    # When one process fails, all others raise a ProcessError; the messages of two of them are enough.
    if isinstance(error, ProcessError) and os.environ.get("RANK", "0") not in ("0", "1"):
        sys.exit(error.exit_code)
    _fail(one_line(str(error)), error)


def _check_arguments() -> None:
    """Raise OptionError if an argument is a broken URL, or not UTF-8, which the libraries that open files need."""
    in_utf8 = sys.getfilesystemencoding().lower() == "utf-8"
    for argument in sys.argv[1:]:
        if not argument.isascii() and (not in_utf8 or any("\ud800" <= letter <= "\udfff" for letter in argument)):
            again = "set the environment variable PYTHONUTF8=1, and run the command again"
            hint = "rename the file" if in_utf8 else f"{again}; the encoding now is {sys.getfilesystemencoding()}"
            raise OptionError("an argument is not in UTF-8", got=ascii(argument), hint=hint)
        for part in re.sub(r"^--[\w-]+=", "", argument).split(","):
            as_url(part)


def _print_interrupt() -> None:
    words.say("interrupted", fields={"exit_code": INTERRUPTED, "type": "KeyboardInterrupt"})


def _fail(message: str, error: Exception, *, label: str = "error") -> NoReturn:
    """Print an error, and exit with its code, or with 1.

    Processes other than rank 0 wait: torchrun ends them once rank 0 has printed the same error.
    """
    code = getattr(error, "exit_code", 1)
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        words.quiet = False
        message = f"process {rank}: {message}"
        time.sleep(MESSAGE_DELAY)
    fields = {"exit_code": code, "type": type(error).__name__}
    words.say(message, level="error", label=label, fields=fields)
    sys.exit(code)
