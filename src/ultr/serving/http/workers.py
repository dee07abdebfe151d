"""Server processes: one, or several on one port and their parent.

The parent watches the model. It copies each model that it accepts to a temporary folder, the stage, and points the link
`live` there to it. The workers reload what the link points to. So all of them serve the same model, also one that
starts while a broken model is in the folder of the user.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ultr.errors import UltrError
from ultr.serving.http import Say, ServerOptions, listen, silent
from ultr.serving.http.served import COPY, Scorer, Served, Watch

LIVE = "live"  # the link to the model that workers serve
RELOAD_SECONDS = 0.2  # between a worker's checks of the link
RESTART_SECONDS, RETRY_SECONDS = 1.0, 10.0  # from the start of a worker to that of the next one; if it did not start
STOP_SECONDS = 36  # the time in which a worker must stop after its drain; uvicorn itself takes at most 30

Message = tuple[str, str]  # from a worker: "started", "failed" or the level of a message, and a text


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
    if options.workers > 1:
        _serve_with_workers(listener, folder, options, grpc=grpc, say=say)
    else:
        from ultr.serving.http.server import run_server, started

        served = Served(folder, any_schema=options.any_schema, say=say)
        run_server(listener, served, options, grpc=grpc, on_start=lambda: say(started(served, options, listener, grpc)))
    say("stopped")


def _serve_with_workers(
    listener: socket.socket, folder: str | Path, options: ServerOptions, *, grpc: socket.socket | None, say: Say
) -> None:
    """Serve with several processes until SIGTERM or SIGINT, and replace each one that ends before."""
    with TemporaryDirectory(prefix="ultr-serve-") as temporary:
        stage, counts = Path(temporary) / "stage", Path(temporary) / "metrics"
        stage.mkdir()
        counts.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(counts)  # read when prometheus_client is imported, below
        from ultr.serving.http import metrics
        from ultr.serving.http.server import started

        served = Served(folder, any_schema=options.any_schema, stage=stage, say=say)
        _publish(stage, served.scorer.version)

        def on_reload(loaded: bool) -> None:
            metrics.count_reload(options.name, loaded)
            if loaded:
                _publish(stage, served.scorer.version)

        served.on_reload = on_reload
        parent = _Parent(listener, stage, options, grpc, say)
        try:
            parent.start(lambda: say(started(served, options, listener, grpc)))
            with Watch(served, options.poll):
                parent.run()
        finally:
            listener.close()
            parent.stop()


def _publish(stage: Path, version: str) -> None:
    """Point the link to a version, and delete all versions except this one and the one before."""
    live, newer = stage / LIVE, stage / "next"
    before = live.resolve().name
    newer.symlink_to(version)
    newer.replace(live)
    for path in stage.iterdir():
        if path.name not in (version, before, LIVE, COPY):
            shutil.rmtree(path, ignore_errors=True)


class _Worker:
    """A worker process and its messages."""

    def __init__(self, number: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.number, self.started, self.since = number, False, time.monotonic()
        self.messages, child = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(*arguments, child), name=f"ultr-worker-{number}")
        self.process.start()
        child.close()

    def receive(self) -> Message | None:
        """Return the next message, or None if the worker has ended."""
        try:
            kind, text = self.messages.recv()
            return kind, text
        except (EOFError, OSError):
            return None


class _Parent:
    """The parent of the workers."""

    def __init__(
        self, listener: socket.socket, stage: Path, options: ServerOptions, grpc: socket.socket | None, say: Say
    ) -> None:
        self._arguments = (listener.getsockname()[:2], stage, options, grpc)
        self._options, self._say = options, say
        self._workers: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}  # number of a worker that has ended -> the time to start another
        self._woken, self._wake = os.pipe()  # a signal to stop writes to it
        self._stopped_by: int | None = None  # the first signal to stop
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self._stopped_by = self._stopped_by or number
        with suppress(OSError):
            os.write(self._wake, b"x")

    def _begin(self, number: int) -> None:
        self._workers[number] = _Worker(number, *self._arguments)

    def start(self, on_start: Callable[[], None]) -> None:
        """Start all workers, and call `on_start` when they accept connections; raise UltrError if one does not."""
        for number in range(1, self._options.workers + 1):
            self._begin(number)
        while self._stopped_by is None and not all(worker.started for worker in self._workers.values()):
            for worker, message in self._next(None):
                if message is None:
                    raise UltrError(f"worker {worker.number} ended before it started", hint="try again")
                if message[0] == "failed":
                    raise UltrError(message[1])
        if self._stopped_by is None:
            on_start()

    def run(self) -> None:
        """Pass on messages and replace workers that end, until a signal to stop."""
        while self._stopped_by is None:
            seconds = max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None
            for worker, message in self._next(seconds):
                if message is None:
                    self._on_end(worker)
                elif message[0] == "failed":
                    self._say(f"worker {worker.number} cannot start ({message[1]})", "warning")
            for number, due in list(self._due.items()):
                if due <= time.monotonic() and self._stopped_by is None:
                    del self._due[number]
                    self._begin(number)

    def _next(self, seconds: float | None) -> list[tuple[_Worker, Message | None]]:
        """Wait for messages of workers, or for the end of one (None)."""
        by_pipe = {worker.messages: worker for worker in self._workers.values()}
        ready = wait([*by_pipe, self._woken], seconds)
        received = [(by_pipe[pipe], by_pipe[pipe].receive()) for pipe in ready if isinstance(pipe, Connection)]
        for worker, message in received:
            if message is not None and message[0] == "started":
                worker.started = True
            elif message is not None and message[0] != "failed":
                self._say(f"worker {worker.number}: {message[1]}", message[0])
        return received

    def _on_end(self, worker: _Worker) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        worker.process.join()
        worker.messages.close()
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        del self._workers[worker.number]
        self._due[worker.number] = worker.since + (RESTART_SECONDS if worker.started else RETRY_SECONDS)
        code = worker.process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._say(f"worker {worker.number} ended with {how}; starting another", "warning")

    def stop(self) -> None:
        """Tell all workers to stop, and wait until they have finished their requests."""
        for worker in self._workers.values():
            drains = self._stopped_by == signal.SIGTERM or not worker.started
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGTERM if drains else signal.SIGINT)
        end = time.monotonic() + self._options.drain + STOP_SECONDS
        for worker in self._workers.values():
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.messages.close()


def _work(
    address: tuple[str, int], stage: Path, options: ServerOptions, grpc: socket.socket | None, messages: Connection
) -> None:
    """Answer requests in a worker process, until SIGTERM or until the parent has ended."""
    os.setsid()  # Ctrl-C in a terminal goes to the parent only, which then stops the workers
    lock = threading.Lock()

    def send(kind: str, text: str = "") -> None:
        with lock, suppress(OSError):
            messages.send((kind, text))

    from ultr.serving.http.server import run_server

    threading.Thread(target=_stop_without_parent, daemon=True).start()
    try:
        served = _Staged(stage / LIVE, say=lambda text, level="info": send(level, text))
        listener = listen(*address, shared=True)
    except UltrError as error:
        send("failed", str(error))
        return
    options = replace(options, poll=min(options.poll, RELOAD_SECONDS))
    run_server(listener, served, options, grpc=grpc, on_start=lambda: send("started"))


def _stop_without_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Staged(Served):
    """The model that the link of the stage points to; the parent has checked it, and has said that it is loaded."""

    def __init__(self, link: Path, say: Say) -> None:
        super().__init__(link, any_schema=True, say=say)
        self.announce = silent

    def _load(self, stopped: threading.Event | None = None) -> Scorer:
        scorer = super()._load(stopped)
        return replace(scorer, version=Path(self.folder).resolve().name)
