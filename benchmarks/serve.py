"""The latency that `ultr serve` adds to scoring, and its reliability while models are reloaded under load.

    python benchmarks/serve.py [--rounds 40] [--threads 1]
    python benchmarks/serve.py --connections 64 [--seconds 3] [--rounds 6]
    python benchmarks/serve.py --attack [--workers 1]
    python benchmarks/serve.py --minutes 10 --reload-every 30 [--rate 100] [--exported]

| result                                | compared with                                              | bound  |
|---------------------------------------|------------------------------------------------------------|--------|
| p50 of a request over a socket        | onnxruntime in this process, the same threads and features | 2      |
| p99 with 64 connections               | p50 of the same requests                                   | 3      |
| requests a second with two workers    | one worker, in turns                                       | 1.6    |
| memory with --attack                  |                                                            | 500 MB |
| failed requests and wrong answers     | the scores of both models by torch                         | 0      |
| resident memory of the server         | the memory after the first two reloads                     | flat   |

A request has 100 candidates of 136 features in binary; the model is the default network of large logs, 512-256-128.
Server and client share the machine. With --minutes, a link switches between two models at every reload.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import tritonclient.http as triton

from ultr.datasets.users import User, simulate_log
from ultr.log import Log, write_log
from ultr.rankers.model import load_model
from ultr.serving.export import export_run, onnx_bytes
from ultr.serving.exported import onnx_scores, onnx_session
from ultr.training.config import make_config
from ultr.training.run import run_training

CANDIDATES, FEATURES = 100, 136
PATH = "/v2/models/ranker/infer"
EXAMPLE = np.random.default_rng(1).normal(size=(CANDIDATES, FEATURES)).astype(np.float32)


def make_runs(folder: Path) -> list[Path]:
    """Train two runs of the default network for two steps: this benchmark does not measure their quality."""
    rng = np.random.default_rng(0)
    requests, items = 40, 10
    log = Log(
        features=rng.normal(size=(requests * items, FEATURES)).astype(np.float32),
        offsets=np.arange(requests + 1) * items,
        request_ids=pa.array([f"r{i}" for i in range(requests)]),
        feature_names=tuple(f"f{i}" for i in range(FEATURES)),
        positions=np.tile(np.arange(items) + 1, requests),
        relevance=rng.integers(0, 5, requests * items).astype(np.float32),
    )
    clicks, _ = simulate_log(log, User())
    write_log(replace(clicks, relevance=None), folder / "log.parquet")
    config = make_config(str(folder / "log.parquet"), method="pointwise", select="feedback-ndcg@10", device="cpu")
    config = config.with_options(ranker="mlp", hidden=(512, 256, 128), steps=2, batch=16, evaluate_every=2)
    return [run_training(config.with_options(seed=seed), folder / f"run-{seed}") for seed in (0, 1)]


@contextmanager
def server(folder: Path, *options: object) -> Iterator[tuple[int, list[str]]]:
    """Start `ultr serve` in another process; yield its port, and the list of lines that it prints."""
    command = [sys.executable, "-m", "ultr", "serve", str(folder), "--port", "0", *map(str, options)]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = None
        while address is None and (line := process.stderr.readline()):
            lines.append(line)
            address = re.search(r" at http://127.0.0.1:(\d+)/", line)
        if address is None:
            sys.exit("".join(lines))
        listener = threading.Thread(target=lines.extend, args=(process.stderr,))
        listener.start()
        try:
            yield int(address[1]), lines
        finally:
            process.terminate()
            code = process.wait(60)
            listener.join()
            print(f"the server stopped with exit code {code}")


def by_tritonclient(port: int) -> Callable[[np.ndarray], np.ndarray]:
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")

    def ask(features: np.ndarray) -> np.ndarray:
        tensor = triton.InferInput("features", features.shape, "FP32").set_data_from_numpy(features)
        answer = client.infer("ranker", [tensor], outputs=[triton.InferRequestedOutput("scores")])
        return np.asarray(answer.as_numpy("scores"))

    return ask


def by_http_client(port: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that sends requests with Python's http.client, on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(features: np.ndarray) -> np.ndarray:
        head, _, body = whole_request(features).partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        connection.request("POST", PATH, body, headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {body[:200]!r}")
        return np.frombuffer(body[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")

    return ask


def whole_request(features: np.ndarray) -> bytes:
    """Return the bytes of a request: head, JSON and features in binary."""
    tensor = {"name": "features", "shape": features.shape, "datatype": "FP32"}
    content = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": features.nbytes}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(content).encode()
    lengths = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + features.nbytes}"
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n".encode() + text + features.tobytes()


def read_scores(connection: socket.socket) -> np.ndarray:
    """Return the scores of an answer: the server sends it at once, and it is smaller than the buffer."""
    answer = connection.recv(1 << 16)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{answer[:300]!r}")
    return np.frombuffer(answer[-4 * CANDIDATES :], "<f4")


def by_socket(port: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that sends a request with one system call, and reads the answer with another."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)

    def ask(features: np.ndarray) -> np.ndarray:
        connection.sendall(whole_request(features))
        return read_scores(connection)

    return ask


def latency(folder: Path, rounds: int, threads: int) -> None:
    """Measure clients and bare onnxruntime in turns, so that other load of the machine affects all of them."""
    run = make_runs(folder)[0]
    session = onnx_session(onnx_bytes(load_model(run)), threads=1)
    with server(run, "--threads", threads) as (port, _):
        clients = {
            "bare onnxruntime": lambda x: onnx_scores(session, x[None])[0],
            "socket": by_socket(port),
            "tritonclient": by_tritonclient(port),
            "http.client": by_http_client(port),
        }
        times: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(rounds + 1):
            for name, ask in clients.items():
                for _ in range(50):
                    start = time.perf_counter()
                    scores = ask(EXAMPLE)
                    if turn:  # the first turn is a warm-up
                        times[name].append(time.perf_counter() - start)
                np.testing.assert_allclose(scores, clients["bare onnxruntime"](EXAMPLE), atol=1e-5)
    bare = np.median(times["bare onnxruntime"])
    print(f"{'':<18} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'p50 ratio':>10}")
    for name, values in times.items():
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        print(f"{name:<18} {p50 * 1e3:8.2f} {p90 * 1e3:8.2f} {p99 * 1e3:8.2f} {p50 / bare:10.2f}")


@dataclass
class Closed:
    """The results of connections that each send the next request when they have the answer to the last."""

    seconds: np.ndarray  # of each request
    rate: float  # requests a second
    client: float  # the share of one core that the client took


def closed_loop(port: int, connections: int, duration: float) -> Closed:
    """Keep one request of each connection in progress; the client is one thread with few system calls."""
    request = whole_request(EXAMPLE)
    waiting = selectors.DefaultSelector()
    sent: dict[socket.socket, float] = {}
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        waiting.register(connection, selectors.EVENT_READ)
        sent[connection] = time.perf_counter()
        connection.sendall(request)
    times: list[float] = []
    start, cpu = time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) < start + duration:
        for key, _ in waiting.select(1.0):
            answered: socket.socket = key.fileobj  # type: ignore[assignment]
            read_scores(answered)
            now = time.perf_counter()
            times.append(now - sent[answered])
            sent[answered] = now
            answered.sendall(request)
    cpu, elapsed = time.process_time() - cpu, now - start
    for connection in sent:
        connection.close()
    return Closed(np.array(times[connections:]), len(times) / elapsed, cpu / elapsed)


def throughput(folder: Path, connections: int, duration: float, rounds: int) -> None:
    """Compare one worker with two, in turns; both servers run all the time."""
    exported = export_run(make_runs(folder)[0], folder / "exported").folder
    with server(exported) as (one, _), server(exported, "--workers", 2) as (two, _):
        ports = {"1 worker": one, "2 workers": two}
        results: dict[str, list[Closed]] = {name: [] for name in ports}
        for turn in range(rounds + 1):
            for name, port in ports.items():
                result = closed_loop(port, connections, duration if turn else 0.5)
                if turn:  # the first turn is a warm-up
                    results[name].append(result)
    print(f"{connections} connections, {rounds} turns of {duration:g} s, median over turns")
    print(f"{'':<12} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'p99/p50':>8} {'client':>8}")
    for name, parts in results.items():
        p50, p99 = (np.median([np.percentile(part.seconds, q) for part in parts]) * 1e3 for q in (50, 99))
        spread = np.median([np.percentile(part.seconds, 99) / np.median(part.seconds) for part in parts])
        rate, client = (np.median([getattr(part, field) for part in parts]) for field in ("rate", "client"))
        print(f"{name:<12} {rate:8.0f} {p50:8.1f} {p99:8.1f} {spread:8.2f} {client:7.0%}")
    ratios = [b.rate / a.rate for a, b in zip(*results.values(), strict=True)]
    print(f"two workers over one: {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def attack(folder: Path, workers: int, duration: float = 30.0) -> bool:
    """Keep 1,000 connections that send a byte at a time and 500 that send large bodies; meanwhile ask for scores.

    Half of the slow ones stay in the head of a request, the others in its body. Those that the server closes come back.
    """
    exported = export_run(make_runs(folder)[0], folder / "exported").folder
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    large = head + b"Content-Length: 30000000\r\n\r\n" + bytes(30_000_000)
    begun = [head, head + b"Content-Length: 1000\r\n\r\n"] * 500 + [large] * 500
    times, refused, most = [], 0, 0.0
    with server(exported, "--workers", workers) as (port, _), ExitStack() as opened:
        ask = by_socket(port)
        bad: list[socket.socket | None] = [None] * len(begun)
        at = [0] * len(begun)  # bytes sent
        start = time.monotonic()
        while time.monotonic() - start < duration:
            for i, content in enumerate(begun):
                if (sender := bad[i]) is None:
                    sender = bad[i] = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                    sender.setblocking(False)
                    at[i] = 0
                end = at[i] + (1 << 18 if content is large else 1 if at[i] else len(content) - 3)
                try:
                    at[i] += sender.send(memoryview(content)[at[i] : end] if at[i] < len(content) else b"x")
                except BlockingIOError:
                    continue
                except OSError:
                    sender.close()
                    bad[i], refused = None, refused + 1
            for _ in range(5):
                asked = time.perf_counter()
                ask(EXAMPLE)
                times.append(time.perf_counter() - asked)
            most = max(most, resident(port))
        remaining = sum(sender is not None for sender in bad)
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    print(f"{remaining} bad connections at the end, {refused:,} closed by the server; most memory {most:.0f} MB")
    print(f"{len(times):,} answers to the good client, none failed; p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return most < 500


@dataclass
class Load:
    """Requests at a steady rate, and their results."""

    port: int
    inputs: np.ndarray  # [inputs, candidates, features]
    expected: list[np.ndarray]  # the scores of each model
    rate: float
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: list[float] = field(default_factory=list)
    of_model: list[int] = field(default_factory=list)  # the index of the model that gave each answer
    failed: int = 0
    wrong: int = 0

    def run(self) -> None:
        ask, number, due = by_http_client(self.port), 0, time.perf_counter()
        while not self.stopped.wait(max(0.0, due - time.perf_counter())):
            due = max(due + 1 / self.rate, time.perf_counter() - 1)
            index = number % len(self.inputs)
            number += 1
            start = time.perf_counter()
            try:
                scores = ask(self.inputs[index])
            except Exception as error:
                self.failed += 1
                print(f"failed: {error!r}", flush=True)
                ask = by_http_client(self.port)
                continue
            self.seconds.append(time.perf_counter() - start)
            differences = [np.abs(scores - expected[index]).max() for expected in self.expected]
            if min(differences) > 1e-5:
                self.wrong += 1
            self.of_model.append(int(np.argmin(differences)))


def resident(port: int) -> float:
    """Return the resident memory of the server in MB, that of all its workers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    memory = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    assert memory is not None
    return float(memory[1]) / 1e6


def switch(link: Path, target: Path) -> None:
    newer = link.with_name("next")
    newer.symlink_to(target)
    newer.replace(link)


def steady(folder: Path, minutes: float, reload_every: float, rate: float, exported: bool, threads: int) -> bool:
    runs = make_runs(folder)
    inputs = np.random.default_rng(1).normal(size=(8, CANDIDATES, FEATURES)).astype(np.float32)
    expected = [np.stack([load_model(run).score_features(x) for x in inputs]) for run in runs]
    served = [export_run(run, folder / f"{run.name}-exported").folder for run in runs] if exported else runs
    link = folder / "live"
    link.symlink_to(served[0])
    with server(link, "--poll", 1, "--threads", threads) as (port, lines):
        load = Load(port, inputs, expected, rate)
        client = threading.Thread(target=load.run)
        client.start()
        memory = []
        start = time.monotonic()
        for turn in range(1, max(3, int(minutes * 60 / reload_every)) + 1):
            time.sleep(max(0.0, start + turn * reload_every - time.monotonic()))
            memory.append(resident(port))
            print(f"{turn * reload_every:6.0f} s  {memory[-1]:7.1f} MB  {len(load.seconds):8,} answers", flush=True)
            switch(link, served[turn % 2])
        time.sleep(min(10.0, reload_every))
        load.stopped.set()
        client.join()
        memory.append(resident(port))
    reloads = sum("now serving" in line for line in lines)
    p50, p99, most = np.percentile(load.seconds, [50, 99, 100]) * 1e3
    print(f"{len(load.seconds):,} answers, {load.failed} failed, {load.wrong} wrong; {reloads} newer models loaded")
    print(f"answers by each model: {np.bincount(load.of_model, minlength=2).tolist()}")
    print(f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {most:.0f} ms, at {rate:g} a second")
    first, last = memory[2], memory[-1]
    print(f"memory after two reloads {first:.1f} MB, at the end {last:.1f} MB: {last / first - 1:+.1%}")
    return load.failed == load.wrong == 0 and reloads > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 50 requests by each client")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server")
    parser.add_argument("--connections", type=int, help="measure requests a second with this many connections instead")
    parser.add_argument("--seconds", type=float, default=3.0, help="the time of one turn, with --connections")
    parser.add_argument("--attack", action="store_true", help="test slow senders and large bodies instead")
    parser.add_argument("--workers", type=int, default=1, help="workers of the server, with --attack")
    parser.add_argument("--minutes", type=float, help="test reloads under load for this time instead")
    parser.add_argument("--reload-every", type=float, default=30.0, help="seconds between newer models")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--exported", action="store_true", help="reload exported folders, not runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.connections is not None:
            throughput(Path(name), options.connections, options.seconds, options.rounds)
            return
        if options.attack:
            sys.exit(0 if attack(Path(name), options.workers) else 1)
        if options.minutes is None:
            latency(Path(name), options.rounds, options.threads)
            return
        reloads = options.minutes, options.reload_every, options.rate, options.exported, options.threads
        sys.exit(0 if steady(Path(name), *reloads) else 1)


if __name__ == "__main__":
    main()
