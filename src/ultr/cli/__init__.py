"""The command line `ultr`: a table of commands, and error messages. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import os
import signal
import sys
import time

import typer

from ultr.cli import (
    bias,
    compare,
    demo,
    describe,
    evaluate,
    export,
    prepare,
    report,
    reproduce,
    score,
    serve,
    simulate,
    train,
)
from ultr.cli.options import one_line, plain, words
from ultr.errors import ProcessError, UltrError

MESSAGE_DELAY = 10.0  # seconds that processes other than rank 0 wait before they print an error
COMMANDS = (
    demo.demo,
    describe.describe,
    simulate.simulate,
    prepare.prepare,
    bias.bias,
    train.train,
    evaluate.evaluate,
    score.score,
    compare.compare,
    report.report,
    export.export,
    serve.serve,
    reproduce.reproduce,
)

app = typer.Typer(
    name="ultr",
    help="Unbiased learning to rank from clicks and continuous feedback.",
    no_args_is_help=True,
    add_completion=True,  # ultr --install-completion
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


@app.command()
def version() -> None:
    """Print the version of ultr."""
    from ultr._version import __version__

    print(__version__)


def main() -> None:
    """Run a command; print an error on stderr and exit with its code: 2 (wrong option), 3 (time limit) or 1 (other)."""
    try:
        app(prog_name="ultr")
    except UltrError as error:
        if isinstance(error, ProcessError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may send SIGTERM while this prints
        # When one process fails, all others raise a ProcessError; the messages of two of them are enough.
        if not isinstance(error, ProcessError) or os.environ.get("RANK", "0") in ("0", "1"):
            _print_error(f"[bold red]error:[/] {plain(one_line(str(error)))}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        words.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if os.environ.get("ULTR_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is not None:  # such as missing permissions
            text = one_line(f"{error.filename}: {error.strerror}; check the path and its permissions")
            _print_error(f"[bold red]error:[/] {plain(text)}")
            sys.exit(1)
        text = f"{type(error).__name__}: {error}"
        _print_error(f"[bold red]internal error:[/] {plain(text)}\nset ULTR_DEBUG=1 to see the traceback")
        sys.exit(1)


def _print_error(message: str) -> None:
    """Print an error. Processes other than rank 0 wait: torchrun ends them once rank 0 has printed the same error."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        words.quiet = False
        message = f"process {rank}: {message}"
        time.sleep(MESSAGE_DELAY)
    words.print(message, soft_wrap=True)
