"""A server process: uvicorn on a socket, and a stop that answers every request that has started."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ultr.serving.http import ServerOptions, address_of
from ultr.serving.http.app import ARRIVED, WAITING, App
from ultr.serving.http.served import Served, Watch

if TYPE_CHECKING:
    from ultr.serving.http.grpc_server import GrpcServer

GRACE_SECONDS = 30  # the time to finish requests after a signal to stop
TICK_SECONDS = 0.05  # between checks of the connections of a server that stops
QUIET_SECONDS = 1.0  # a draining server stops when no connection has been open for this time
LAST_SECONDS = 1.0  # the time in which the connections that were accepted last can send a request
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections, so that the proxy closes them first
LONGEST_HEAD = 1 << 16  # bytes of a request before its body
HEAD_SECONDS = 10.0  # the time in which a client must send the head of a request
MOST_CONNECTIONS = 2048
LATE = f"the head of the request did not arrive within {HEAD_SECONDS:g} seconds"
SPARE_FILES = 64  # open files for everything except connections
SWITCH_SECONDS = 0.001  # between threads, so that loading a newer model delays requests less


def run_server(
    listener: socket.socket,
    served: Served,
    options: ServerOptions,
    *,
    grpc: socket.socket | None,
    on_start: Callable[[], None],
) -> None:
    """Answer requests in this process until SIGTERM or SIGINT; `on_start` is called when it accepts connections."""
    app = App(served, options)
    config = uvicorn.Config(
        app,
        http=_Http,
        loop="asyncio",  # as fast as uvloop here, where most of the time is the model's
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = _Server(config, app, options.drain, grpc, on_start)

    def stop(*_: object) -> None:  # uvicorn also calls this, with the signals it got, when it has stopped
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # imported modules stay for ever, so the garbage collector need not examine them again
    with Watch(served, options.poll):
        server.run(sockets=[listener])
    app.close()


def started(served: Served, options: ServerOptions, listener: socket.socket, grpc: socket.socket | None) -> str:
    """Return the message of a server that has started."""
    url = f"http://{address_of(listener)}/v2/models/{options.name}"
    details = [f"{len(served.scorer.feature_names)} features"]
    details += [f"{options.workers} workers"] if options.workers > 1 else []
    details += [] if grpc is None else [f"gRPC at {address_of(grpc)}"]
    return f"serving version {served.scorer.version} at {url} ({', '.join(details)})"


class _Server(uvicorn.Server):
    """A server of HTTP and, with a reserved port, of gRPC, in one event loop."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        drain: float,
        grpc: socket.socket | None,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app, self._drain_seconds, self._grpc_socket, self._on_start = app, drain, grpc, on_start
        self._grpc: GrpcServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._grpc_socket is not None:
            from ultr.serving.http.grpc_server import GrpcServer

            self._grpc = GrpcServer(self._app, address_of(self._grpc_socket))
            await self._grpc.start()
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self._drain_seconds = 0.0
        self._app.draining = True
        super().handle_exit(sig, frame)

    async def _drain(self, sockets: list[socket.socket]) -> None:
        """Answer requests until no connection is open or the time is over, and then refuse new connections."""
        end = time.monotonic() + self._drain_seconds
        await self._wait_until_closed(end, QUIET_SECONDS)
        if self._drain_seconds:
            for listener in sockets:
                refuse_connections(listener)
            await self._wait_until_closed(time.monotonic() + LAST_SECONDS, TICK_SECONDS)

    async def _wait_until_closed(self, end: float, quiet: float) -> None:
        """Wait until no connection has been open for some seconds, but not beyond `end`, nor after a SIGINT."""
        last = time.monotonic()
        while self._drain_seconds and (now := time.monotonic()) < end and now - last <= quiet:
            await asyncio.sleep(TICK_SECONDS)
            last = time.monotonic() if self.server_state.connections else last

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain(sockets or [])
        if self._grpc is None:
            await super().shutdown(sockets)
        else:
            await asyncio.gather(super().shutdown(sockets), self._grpc.stop(GRACE_SECONDS))


# The program of a socket filter, which drops the packets that open a TCP connection (SYN), and keeps all others.
NO_SYN = (
    (0x30, 0, 0, 13),  # load the byte with the flags of TCP
    (0x45, 0, 1, 0x02),  # without SYN, skip the next line
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # keep the packet
)
SO_ATTACH_FILTER = 26  # of Linux; the module socket does not have it


def refuse_connections(listener: socket.socket) -> None:
    """Let no further client connect, while the connections that wait to be accepted stay.

    The system resets the waiting connections of a socket that is closed. So a server first refuses further ones, then
    accepts those that wait, and only then closes the socket. A client that is dropped here tries again after a second.
    On other systems than Linux, this function does nothing.
    """
    if sys.platform == "linux":
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in NO_SYN))
        with suppress(OSError):  # a sandbox may forbid it
            filter_ = struct.pack("HP", len(NO_SYN), ctypes.addressof(program))
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)


class _Http(HttpToolsProtocol):
    """HTTP of uvicorn, with limits on connections and on the head of a request, and errors as JSON."""

    _head: int | None = 0  # bytes received of a head that is not complete
    _timer: asyncio.TimerHandle | None = None  # ends a connection whose head does not arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport: Any = _OneWrite(transport)
        self._expect_head()
        if len(self.connections) > most_connections():
            self._answer("503 Service Unavailable", "there are too many connections", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # otherwise an answer is being sent
            self._answer("408 Request Timeout", LATE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > LONGEST_HEAD:
                self.send_400_response(f"the head of the request is longer than {LONGEST_HEAD} bytes")

    def on_message_begin(self) -> None:
        self._head = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_timer()
        times = {ARRIVED: time.perf_counter(), WAITING: len(self.tasks)}
        self.scope.update(times)  # type: ignore[typeddict-item]
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self.transport.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer("400 Bad Request", msg)

    def _answer(self, status: str, error: str, headers: str = "") -> None:
        """Answer with an error, and close the connection."""
        if self.transport.is_closing():
            return
        body = b'{"error":"%s"}' % error.encode("ascii", "replace").replace(b'"', b"'")
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}"
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class _OneWrite:
    """A transport that sends the head and the body of an answer at once, because each write wakes the client."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@cache
def most_connections() -> int:
    """Return the largest number of connections: fewer than the files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        wanted = MOST_CONNECTIONS + SPARE_FILES
        soft = max(soft, wanted if hard == resource.RLIM_INFINITY else min(hard, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MOST_CONNECTIONS, soft - SPARE_FILES))
