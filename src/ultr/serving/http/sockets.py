"""Sockets of a server: the one that listens for HTTP, and the one that reserves a port for gRPC."""

from __future__ import annotations

import socket

from ultr.errors import MissingExtraError, OptionError, UltrError

BACKLOG = 2048  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 is any free port."""
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "stop the other server, or pass another port"
        raise UltrError(f"cannot listen at {host}:{port} ({error.strerror})", hint=hint) from error
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Reserve a port for the gRPC servers of all workers, which bind it too; the socket itself does not listen."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("--grpc-port", package="grpcio", extra="grpc") from error
    with listen(host, port) as probe:  # no other server has the port: without this check, two servers could share it
        port = probe.getsockname()[1]
    family, address = _resolve(host, port)
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(address)
    return reserved


def address_of(listener: socket.socket) -> str:
    """Return the address of a socket as HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError("the host is unknown", got=f"'{host}'", hint="pass --host 127.0.0.1") from error
    return found[0][0], found[0][4]
