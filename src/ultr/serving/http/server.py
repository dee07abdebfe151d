"""The server process: a socket, uvicorn on it, and a stop that answers every request that has started."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ultr.errors import OptionError, UltrError
from ultr.serving.http.app import ARRIVED, WAITING, App
from ultr.serving.http.served import Served, Watch

BACKLOG = 2048  # connections that wait to be accepted
GRACE_SECONDS = 30  # the time to finish requests after a signal to stop
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections, so that the proxy closes them first
LONGEST_HEAD = 1 << 16  # bytes of a request before its body
HEAD_SECONDS = 10.0  # the time in which a client must send the head of a request
MOST_CONNECTIONS = 2048
LATE = f"the head of the request did not arrive within {HEAD_SECONDS:g} seconds"
SPARE_FILES = 64  # open files for everything except connections
SWITCH_SECONDS = 0.001  # between threads, so that loading a newer model delays requests less


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 is any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OptionError("the host is unknown", got=f"'{host}'", hint="pass --host 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "stop the other server, or pass another --port"
        raise UltrError(f"cannot listen at {host}:{port} ({error.strerror})", hint=hint) from error
    return listener


def serve(
    listener: socket.socket,
    folder: Path,
    *,
    name: str,
    max_rows: int,
    threads: int = 1,
    token: str | None = None,
    poll: float = 5.0,
    any_schema: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the model of a folder on a socket until SIGTERM or SIGINT; then finish the requests that have started."""
    served = Served(folder, any_schema=any_schema, say=say)
    app = App(served, name=name, max_rows=max_rows, token=token, threads=threads)
    config = uvicorn.Config(
        app,
        http=_Http,
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
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:  # uvicorn also calls this, with the signals it got, when it has stopped
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # imported modules stay for ever, so the garbage collector need not examine them again
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v2/models/{name}"
    features = len(served.scorer.feature_names)
    say(f"serving version {served.scorer.version} at {url} ({features} features)")
    with Watch(served, poll):
        server.run(sockets=[listener])
    app.close()
    say("stopped")


class _Http(HttpToolsProtocol):
    """HTTP of uvicorn, with limits on connections and on the head of a request, and errors as JSON."""

    _head: int | None = 0  # bytes received of a head that is not complete
    _timer: asyncio.TimerHandle | None = None  # ends a connection whose head does not arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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


@cache
def most_connections() -> int:
    """Return the largest number of connections: fewer than the files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        wanted = MOST_CONNECTIONS + SPARE_FILES
        soft = max(soft, wanted if hard == resource.RLIM_INFINITY else min(hard, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MOST_CONNECTIONS, soft - SPARE_FILES))
