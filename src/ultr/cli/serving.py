"""The command that serves what was learned."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.common import plain, words
from ultr.errors import OptionError

TOKEN = "ULTR_TOKEN"  # noqa: S105  # the name of a variable


def serve(
    run: Annotated[Path, typer.Argument(help="A finished run, or a folder that ultr export wrote; a link to one.")],
    name: Annotated[str, typer.Option(help="What the model is called in requests.")] = "ranker",
    port: Annotated[int, typer.Option(help="Where to listen; 0 is any free port.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Where to listen: this machine alone unless told otherwise.")] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="A file of the token that requests must bear (or ULTR_TOKEN).")
    ] = None,
    poll: Annotated[
        float, typer.Option(help="Look for a newer model every so many seconds.", min=0.05, max=86_400)
    ] = 5.0,
    max_rows: Annotated[int, typer.Option(help="Rows of one request, at most.", min=1)] = 10_000,
    threads: Annotated[int, typer.Option(help="How many requests are scored side by side.", min=1, max=256)] = 1,
) -> None:
    """Serve a model by the Open Inference Protocol (REST, JSON and binary), newer ones as they come."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        raise OptionError("a model's name has letters, digits, '_', '.' and '-'", got=f"'{name}'", mend="pass --name")
    token = _token(token_file)
    from ultr.serving import listen
    from ultr.serving import serve as serve_on

    with listen(host, port) as listener:
        address = listener.getsockname()[0]
        if token is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            words.print(
                f"[yellow]warning:[/] anyone who reaches {address} can ask this server; pass --token-file, or "
                "--host 127.0.0.1",
                soft_wrap=True,
            )

        def say(text: str) -> None:
            words.print(plain(text), soft_wrap=True)

        serve_on(listener, run, name=name, max_rows=max_rows, threads=threads, token=token, poll=poll, say=say)


def _token(path: Path | None) -> str | None:
    """The token of a file or of the environment, if there is one."""
    where = TOKEN if path is None else str(path)
    try:
        token = os.environ.get(TOKEN) if path is None else path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the token cannot be read ({error})", mend="check --token-file") from error
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        mend = "give it letters and digits, or unset it"
        raise OptionError("a token is one word of ASCII", where=where, mend=mend)
    return token
