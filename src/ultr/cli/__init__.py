"""The command line: one table of thin commands. Data goes to stdout, words to stderr."""

from __future__ import annotations

import os
import sys

import typer

from ultr.cli import bias, data, experiments, learning
from ultr.cli.common import plain, words
from ultr.errors import UltrError

COMMANDS = (
    data.demo,
    data.describe,
    data.simulate,
    bias.bias,
    learning.train,
    learning.evaluate,
    learning.score,
    learning.compare,
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
        words.print(f"[bold red]error:[/] {plain(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        words.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if os.environ.get("ULTR_DEBUG"):
            raise
        text = f"{type(error).__name__}: {error}"
        words.print(f"[bold red]internal error:[/] {plain(text)}\nset ULTR_DEBUG=1 to see where", soft_wrap=True)
        sys.exit(1)
