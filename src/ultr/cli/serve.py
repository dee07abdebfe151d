"""`ultr serve`: serve the model of a run over HTTP and gRPC."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.messages import words
from ultr.errors import OptionError
from ultr.utils.stores import as_path, as_url

TOKEN = "ULTR_TOKEN"  # noqa: S105  # the name of an environment variable, not a token


def serve(
    run: Annotated[
        str, typer.Argument(help="A finished run, or a folder that ultr export wrote, or a link or a URL to one.")
    ],
    name: Annotated[str, typer.Option(help="The name of the model in URLs.")] = "ranker",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 is any free port.", min=0, max=65535)] = 8080,
    host: Annotated[
        str, typer.Option(help="The address to listen on; with the default, only this machine can connect.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that clients must send; or set ULTR_TOKEN.")
    ] = None,
    poll: Annotated[float, typer.Option(help="Seconds between checks for a newer model.", min=0.05, max=86_400)] = 5.0,
    max_rows: Annotated[int, typer.Option(help="The largest number of rows in one request.", min=1)] = 10_000,
    threads: Annotated[int, typer.Option(help="The number of requests scored in parallel.", min=1, max=256)] = 1,
    workers: Annotated[
        int,
        typer.Option(
            help="The number of processes that answer requests; one for each core is a good choice.", min=1, max=256
        ),
    ] = 1,
    grpc_port: Annotated[
        int | None, typer.Option(help="Also listen for gRPC on this port; 0 is any free port.", min=0, max=65535)
    ] = None,
    drain: Annotated[
        float,
        typer.Option(help="Seconds after SIGTERM in which the server still accepts connections.", min=0, max=3600),
    ] = 5.0,
    allow_schema_change: Annotated[
        bool, typer.Option("--allow-schema-change", help="Also load newer models with other features.")
    ] = False,
) -> None:
    """Serve a model with the Open Inference Protocol (REST and gRPC), and reload newer models."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        what = "'name' must have 1 to 100 letters, digits, '_', '.' or '-'"
        raise OptionError(what, got=f"'{name}'", hint="pass another --name")
    folder: str | Path = as_url(run) or as_path(run)
    token = _token(token_file)
    from ultr.serving.http import ServerOptions, check_grpc, listen, reserve
    from ultr.serving.http.workers import serve as serve_on

    options = ServerOptions(name, max_rows, threads, token, poll, allow_schema_change, workers, drain)
    if grpc_port is not None:
        check_grpc()
    with (
        listen(host, port) if workers == 1 else reserve(host, port) as listener,
        nullcontext() if grpc_port is None else reserve(host, grpc_port) as grpc,
    ):
        address = listener.getsockname()[0]
        if token is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            words.say(
                f"everyone who can reach {address} can use this server; pass --token-file to "
                "require a token, or --host 127.0.0.1 to accept only this machine",
                level="warning",
            )

        def say(text: str, level: str = "info", /) -> None:
            words.say(text, level=level)

        serve_on(listener, folder, options, grpc=grpc, say=say)


def _token(path: Path | None) -> str | None:
    """Return the token from a file or from the environment variable ULTR_TOKEN, or None."""
    where = TOKEN if path is None else str(path)
    try:
        token = os.environ.get(TOKEN) if path is None else path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the token cannot be read ({error})", hint="check --token-file") from error
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        hint = "make a token with: openssl rand -hex 32"
        raise OptionError("the token must be one word of ASCII characters", where=where, hint=hint)
    return token
