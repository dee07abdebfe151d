"""A server in another process."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading

from serving.http.client import Answer


class Server:
    """`ultr serve` on a free port, with the lines that it prints."""

    def __init__(self, *arguments: object, python: tuple[str, ...] = ("-m", "ultr"), **environment: str) -> None:
        command = [sys.executable, *python, "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment}
        )
        self.lines: list[str] = []
        self.started = threading.Event()
        self.port = self.grpc_port = 0
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if address := re.search(r"^serving version \w+ at http://127.0.0.1:(\d+)/", line):
                self.port = int(address[1])
                if grpc := re.search(r"gRPC at 127.0.0.1:(\d+)", line):
                    self.grpc_port = int(grpc[1])
                self.started.set()
        self.started.set()

    def __enter__(self) -> Server:
        assert self.started.wait(180)
        assert self.port, self.lines
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()
        self.process.stderr.close()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def accepts(self) -> bool:
        """Return True if the server accepts connections."""
        try:
            self.fetch("GET", "/v2/health/live")
        except ConnectionError:
            return False
        return True

    def fetch(self, method: str, path: str, body: bytes = b"", headers=(), *, connection=None) -> Answer:
        used = connection or self.connect()
        used.request(method, path, body, dict(headers))
        response = used.getresponse()
        answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        if connection is None:
            used.close()
        return answer
