"""The command line: one table of thin commands. Data goes to stdout, words to stderr."""

from __future__ import annotations

import os
import signal
import sys
import time

import typer

from ultr.cli import bias, data, experiments, judging, learning, prepare, reporting, serving, shipping
from ultr.cli.common import one_line, plain, words
from ultr.errors import ProcessError, UltrError

SPEAK_AFTER = 10.0  # seconds
COMMANDS = (
    data.demo,
    data.describe,
    data.simulate,
    prepare.prepare,
    bias.bias,
    learning.train,
    judging.evaluate,
    judging.score,
    learning.compare,
    reporting.report,
    shipping.export,
    serving.serve,
    experiments.reproduce,
)

app = typer.Typer(
    name="ultr",
    help="Unbiased learning to rank from clicks and continuous feedback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


@app.command()
def version() -> None:
    """Print the version."""
    from ultr import __version__

    print(__version__)


def main() -> None:
    """Run a command; a refusal is one message on stderr and exit code 1, or 2 where the call was wrong."""
    try:
        app()
    except UltrError as error:
        if isinstance(error, ProcessError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is ending us already, and can wait a moment
        if not isinstance(error, ProcessError) or os.environ.get("RANK", "0") in ("0", "1"):  # two are enough to hear
            _say(f"[bold red]error:[/] {plain(one_line(str(error)))}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        words.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if os.environ.get("ULTR_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is not None:  # a name too long, links in a ring, no rights
            text = one_line(f"{error.filename}: {error.strerror}; check the path")
            _say(f"[bold red]error:[/] {plain(text)}")
            sys.exit(1)
        text = f"{type(error).__name__}: {error}"
        _say(f"[bold red]internal error:[/] {plain(text)}\nset ULTR_DEBUG=1 to see where")
        sys.exit(1)


def _say(what: str) -> None:
    """A last word. Of several processes, the others wait a little: where the first fails alike, it has said so."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        words.quiet = False
        what = f"process {rank}: {what}"
        time.sleep(SPEAK_AFTER)
    words.print(what, soft_wrap=True)
