"""The server: it scores requests by the Open Inference Protocol, and reloads newer models."""

from __future__ import annotations

import socket
from pathlib import Path

from ultr.errors import MissingExtraError

try:
    import httptools  # noqa: F401
    import onnxruntime  # noqa: F401
    import orjson  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ultr serve", package=error.name or "starlette", extra="serve") from error

from ultr.serving.http.options import Say, ServerOptions, listen, reserve, silent

__all__ = ["ServerOptions", "check_grpc", "listen", "reserve", "serve"]


def check_grpc() -> None:
    """Raise MissingExtraError if the packages for gRPC are not installed."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("--grpc-port", package="grpcio", extra="grpc") from error


def serve(
    listener: socket.socket,
    folder: str | Path,
    options: ServerOptions,
    *,
    grpc: socket.socket | None = None,
    say: Say = silent,
) -> None:
    """Serve the model of a folder on a socket until SIGTERM or SIGINT; then finish the requests that have started.

    After SIGTERM, the server first drains: it says that it is not ready, and asks clients to close their connections.
    With several workers, `listener` only reserves their port. `grpc` reserves the port for gRPC.
    """
    if options.workers == 1:
        from ultr.serving.http.server import serve_alone

        serve_alone(listener, folder, options, grpc=grpc, say=say)
    else:
        from ultr.serving.http.workers import serve_with_workers

        serve_with_workers(listener, folder, options, grpc=grpc, say=say)
