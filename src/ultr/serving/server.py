"""The server: a socket, uvicorn on it, and an end that leaves no request unanswered."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultr.errors import OptionError, UltrError
from ultr.serving.app import App
from ultr.serving.endpoints import kserve_package
from ultr.serving.served import Served, Watch

BACKLOG = 2048
GRACE_SECONDS = 30  # for requests under way when it is told to stop
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections, so that these close them first
LONGEST_HEAD = 1 << 16  # bytes of a request before its body
SWITCH_SECONDS = 0.001  # between threads: a model that loads should not hold up those who ask


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; a port of 0 is any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OptionError("no such host to listen at", got=f"'{host}'", mend="pass --host 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        mend = "stop what listens there, or pass another --port"
        raise UltrError(f"cannot listen at {host}:{port} ({error.strerror})", mend=mend) from error
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
    """Serve the model of a folder on a socket until SIGTERM or SIGINT, and then finish what is under way."""
    kserve_package()
    import uvicorn

    served = Served(folder, say=say)
    app = App(served, name=name, max_rows=max_rows, token=token, threads=threads)
    config = uvicorn.Config(
        app,
        http=_protocol(),
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

    def stop(*_: object) -> None:  # also what uvicorn hands its signals on to, when it is done
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # all that was imported is there to stay, and need not be looked through again
    host, port = listener.getsockname()[:2]
    scorer, at = served.scorer, f"http://{f'[{host}]' if ':' in host else host}:{port}/v2/models/{name}"
    say(f"version {scorer.version} serves at {at}, of {len(scorer.feature_names)} features, by {scorer.platform}")
    with Watch(served, poll):
        server.run(sockets=[listener])
    app.close()
    say("stopped")


def _protocol() -> Any:
    """HTTP as uvicorn has it, with an end to heads that have none, and refusals as JSON like all others."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Http(HttpToolsProtocol):
        _head: int | None = 0  # bytes of a head so far that is not complete

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

    return Http
