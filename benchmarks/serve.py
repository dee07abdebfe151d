"""The latency that `ultr serve` adds to scoring, and its reliability while models are reloaded under load.

    python benchmarks/serve.py [--rounds 40] [--threads 1]
    python benchmarks/serve.py --minutes 10 --reload-every 30 [--rate 100] [--exported]

| result                                | compared with                                              | bound |
|---------------------------------------|------------------------------------------------------------|-------|
| p50 of a request by tritonclient      | onnxruntime in this process, the same threads and features | 3     |
| failed requests and wrong answers     | the scores of both models by torch                         | 0     |
| resident memory of the server         | the memory after the first two reloads                     | flat  |

A request has 100 candidates of 136 features in binary; the model is the default network. Server and client share the
machine. With --minutes, a link switches between two runs (or exported folders) at every reload.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import tritonclient.http as triton

from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.log import Log, write_log
from ultr.rankers.model import load_model
from ultr.serving.export import export_run, onnx_bytes
from ultr.serving.exported import onnx_scores, onnx_session
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.run import run_training

CANDIDATES, FEATURES = 100, 136
PATH = "/v2/models/ranker/infer"


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
    config = RunConfig(data=str(folder / "log.parquet"), method="pointwise", select="feedback-ndcg@10")
    steps = TrainingOptions(steps=2, batch=16, evaluate_every=2, device="cpu")
    return [
        run_training(replace(config, training=replace(steps, seed=seed)), folder / f"run-{seed}") for seed in (0, 1)
    ]


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
        tensor = {"name": "features", "shape": features.shape, "datatype": "FP32"}
        content = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": features.nbytes}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(content).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", PATH, text + features.tobytes(), headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {body[:200]!r}")
        return np.frombuffer(body[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")

    return ask


def latency(folder: Path, rounds: int, threads: int) -> None:
    """Measure clients and bare onnxruntime in turns, so that other load of the machine affects all of them."""
    run = make_runs(folder)[0]
    features = np.random.default_rng(1).normal(size=(CANDIDATES, FEATURES)).astype(np.float32)
    session = onnx_session(onnx_bytes(load_model(run)), threads=1)
    with server(run, "--threads", threads) as (port, _):
        clients = {
            "bare onnxruntime": lambda x: onnx_scores(session, x[None])[0],
            "tritonclient": by_tritonclient(port),
            "http.client": by_http_client(port),
        }
        times: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(rounds + 1):
            for name, ask in clients.items():
                for _ in range(50):
                    start = time.perf_counter()
                    scores = ask(features)
                    if turn:  # the first turn is a warm-up
                        times[name].append(time.perf_counter() - start)
                np.testing.assert_allclose(scores, clients["bare onnxruntime"](features), atol=1e-5)
    bare = np.median(times["bare onnxruntime"])
    print(f"{'':<18} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'p50 ratio':>10}")
    for name, values in times.items():
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        print(f"{name:<18} {p50 * 1e3:8.2f} {p90 * 1e3:8.2f} {p99 * 1e3:8.2f} {p50 / bare:10.2f}")


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
    """Return the resident memory of the server in MiB."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    memory = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    assert memory is not None
    return float(memory[1]) / 2**20


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
            print(f"{turn * reload_every:6.0f} s  {memory[-1]:7.1f} MiB  {len(load.seconds):8,} answers", flush=True)
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
    print(f"memory after two reloads {first:.1f} MiB, at the end {last:.1f} MiB: {last / first - 1:+.1%}")
    return load.failed == load.wrong == 0 and reloads > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 50 requests by each client")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server")
    parser.add_argument("--minutes", type=float, help="test reloads under load for this time instead")
    parser.add_argument("--reload-every", type=float, default=30.0, help="seconds between newer models")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--exported", action="store_true", help="reload exported folders, not runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.minutes is None:
            latency(Path(name), options.rounds, options.threads)
            return
        passed = steady(
            Path(name), options.minutes, options.reload_every, options.rate, options.exported, options.threads
        )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
