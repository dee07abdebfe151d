"""The server: it scores requests by the Open Inference Protocol, and reloads newer models.

Here are its options, and the sockets that it listens at. `workers.serve` starts it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from ultr.errors import MissingExtraError, OptionError, UltrError

try:
    import httptools  # noqa: F401
    import onnxruntime  # noqa: F401
    import orjson  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ultr serve", package=error.name or "starlette", extra="serve") from error


def check_grpc() -> None:
    """Raise MissingExtraError if the packages for gRPC are not installed."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("--grpc-port", package="grpcio", extra="grpc") from error


# --- Options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server, as `ultr serve` gets them; every worker gets the same."""

    name: str  # of the model, in URLs
    max_rows: int = 10_000  # the largest number of rows in one request
    threads: int = 1  # requests that each process scores in parallel
    token: str | None = None  # what clients must send
    poll: float = 5.0  # seconds between checks for a newer model
    any_schema: bool = False  # also load newer models with other features
    workers: int = 1  # processes
    drain: float = 5.0  # seconds in which a stopping server still accepts connections


class Say(Protocol):
    """A function that prints a message of the server, with its level: info, warning or error."""

    def __call__(self, text: str, level: str = "info", /) -> None: ...


def silent(text: str, level: str = "info", /) -> None:
    """Print nothing."""


# --- Sockets ----------------------------------------------------------------------------------------------------------

BACKLOG = 2048  # connections that wait to be accepted


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a socket that listens; port 0 is any free port.

    Workers listen with `shared`, each on a socket of its own at the same port: the system then gives each of them an
    equal share of the connections. With one socket for all, the worker that wakes up first would take most of them.
    """
    listener = _bind(host, port, shared=shared)
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Reserve a port for the workers; the socket itself does not listen."""
    with _bind(host, port) as probe:  # fails if another server has the port, even if that would share it
        port = probe.getsockname()[1]
    return _bind(host, port, shared=True)


def address_of(listener: socket.socket) -> str:
    """Return the address of a socket as HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError("the host is unknown", got=f"'{host}'", hint="pass --host 127.0.0.1") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        hint = "stop the other server, or pass another port"
        raise UltrError(f"cannot listen at {host}:{port} ({error.strerror})", hint=hint) from error
    return bound
