"""The server process: a socket, uvicorn on it, and a stop that answers every request that has started."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ultr.errors import OptionError, UltrError
from ultr.serving.http.app import App
from ultr.serving.http.served import Served, Watch

BACKLOG = 2048  # connections that wait to be accepted
GRACE_SECONDS = 30  # the time to finish requests after a signal to stop
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections, so that the proxy closes them first
LONGEST_HEAD = 1 << 16  # bytes of a request before its body
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
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the model of a folder on a socket until SIGTERM or SIGINT; then finish the requests that have started."""
    served = Served(folder, say=say)
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
    """HTTP of uvicorn, with a limit on the head of a request, and errors as JSON."""

    _head: int | None = 0  # bytes received of a head that is not complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head += len(data)
            if self._head > LONGEST_HEAD:
                self.send_400_response(f"the head of the request is longer than {LONGEST_HEAD} bytes")

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        body = b'{"error":"%s"}' % msg.encode("ascii", "replace").replace(b'"', b"'")
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
