"""What `ultr serve` adds to scoring, and whether it lives through newer models under load.

    python benchmarks/serve.py [--rounds 40] [--threads 1]
    python benchmarks/serve.py --minutes 10 --reload-every 30 [--rate 100] [--exported]

| figure                                | compared with                                              | bound |
|---------------------------------------|------------------------------------------------------------|-------|
| a request, by tritonclient, p50       | onnxruntime in this process, the same threads and features | 3     |
| failed requests and wrong answers     | both models' scores by torch                               | 0     |
| resident memory of the server         | what it was after the first two reloads                    | flat  |

A request is 100 candidates of 136 features in binary; the model is the default network. Server and client share the
machine. With --minutes, a link is switched between two runs (or exported folders) at every reload.
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

from ultr.export import export_run, onnx_bytes
from ultr.exported import onnx_scores, onnx_session
from ultr.log import Log, write_log
from ultr.models import load_model
from ultr.preparing import RunConfig
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions

CANDIDATES, FEATURES = 100, 136
PATH = "/v2/models/ranker/infer"


def make_runs(folder: Path) -> list[Path]:
    """Two runs of the default network, hardly trained: what it has learned is not asked here."""
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
    """`ultr serve` in a process of its own: its port, and what it says."""
    command = [sys.executable, "-m", "ultr", "serve", str(folder), "--port", "0", *map(str, options)]
    said: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None and (line := process.stderr.readline()):
            said.append(line)
            found = re.search(r"serves at http://127.0.0.1:(\d+)/", line)
        if found is None:
            sys.exit("".join(said))
        listener = threading.Thread(target=said.extend, args=(process.stderr,))
        listener.start()
        try:
            yield int(found[1]), said
        finally:
            process.terminate()
            code = process.wait(60)
            listener.join()
            print(f"the server ended with exit code {code}")


def by_tritonclient(port: int) -> Callable[[np.ndarray], np.ndarray]:
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")

    def ask(features: np.ndarray) -> np.ndarray:
        given = triton.InferInput("features", features.shape, "FP32").set_data_from_numpy(features)
        answer = client.infer("ranker", [given], outputs=[triton.InferRequestedOutput("scores")])
        return np.asarray(answer.as_numpy("scores"))

    return ask


def by_http_client(port: int) -> Callable[[np.ndarray], np.ndarray]:
    """Python's own client, kept open."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(features: np.ndarray) -> np.ndarray:
        about = {"name": "features", "shape": features.shape, "datatype": "FP32"}
        asked = {
            "inputs": [{**about, "parameters": {"binary_data_size": features.nbytes}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(asked).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", PATH, text + features.tobytes(), headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {body[:200]!r}")
        return np.frombuffer(body[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")

    return ask


def latency(folder: Path, rounds: int, threads: int) -> None:
    """Clients and bare onnxruntime in turns, so that what else the machine does weighs on all of them."""
    run = make_runs(folder)[0]
    features = np.random.default_rng(1).normal(size=(CANDIDATES, FEATURES)).astype(np.float32)
    session = onnx_session(onnx_bytes(load_model(run)), threads=1)
    with server(run, "--threads", threads) as (port, _):
        ways = {
            "bare onnxruntime": lambda x: onnx_scores(session, x[None])[0],
            "tritonclient": by_tritonclient(port),
            "http.client": by_http_client(port),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, ask in ways.items():
                for _ in range(50):
                    start = time.perf_counter()
                    scores = ask(features)
                    if turn:  # the first is to warm up
                        times[name].append(time.perf_counter() - start)
                np.testing.assert_allclose(scores, ways["bare onnxruntime"](features), atol=1e-5)
    bare = np.median(times["bare onnxruntime"])
    print(f"{'':<18} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'p50 ratio':>10}")
    for name, values in times.items():
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        print(f"{name:<18} {p50 * 1e3:8.2f} {p90 * 1e3:8.2f} {p99 * 1e3:8.2f} {p50 / bare:10.2f}")


@dataclass
class Load:
    """Requests at a steady rate, and what became of them."""

    port: int
    inputs: np.ndarray  # [inputs, candidates, features]
    expected: list[np.ndarray]  # of each model
    rate: float
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: list[float] = field(default_factory=list)
    of_model: list[int] = field(default_factory=list)  # which model each answer is by
    failed: int = 0
    wrong: int = 0

    def run(self) -> None:
        ask, number, due = by_http_client(self.port), 0, time.perf_counter()
        while not self.stopped.wait(max(0.0, due - time.perf_counter())):
            due = max(due + 1 / self.rate, time.perf_counter() - 1)
            which = number % len(self.inputs)
            number += 1
            start = time.perf_counter()
            try:
                scores = ask(self.inputs[which])
            except Exception as error:
                self.failed += 1
                print(f"failed: {error!r}", flush=True)
                ask = by_http_client(self.port)
                continue
            self.seconds.append(time.perf_counter() - start)
            off = [np.abs(scores - expected[which]).max() for expected in self.expected]
            if min(off) > 1e-5:
                self.wrong += 1
            self.of_model.append(int(np.argmin(off)))


def resident(port: int) -> float:
    """Mebibytes that the server holds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1]) / 2**20


def switch(link: Path, target: Path) -> None:
    beside = link.with_name("next")
    beside.symlink_to(target)
    beside.replace(link)


def steady(folder: Path, minutes: float, reload_every: float, rate: float, exported: bool, threads: int) -> bool:
    runs = make_runs(folder)
    inputs = np.random.default_rng(1).normal(size=(8, CANDIDATES, FEATURES)).astype(np.float32)
    expected = [np.stack([load_model(run).score_features(x) for x in inputs]) for run in runs]
    served = [export_run(run, folder / f"{run.name}-exported").folder for run in runs] if exported else runs
    link = folder / "live"
    link.symlink_to(served[0])
    with server(link, "--poll", 1, "--threads", threads) as (port, said):
        load = Load(port, inputs, expected, rate)
        client = threading.Thread(target=load.run)
        client.start()
        held = []
        start = time.monotonic()
        for turn in range(1, max(3, int(minutes * 60 / reload_every)) + 1):
            time.sleep(max(0.0, start + turn * reload_every - time.monotonic()))
            held.append(resident(port))
            print(f"{turn * reload_every:6.0f} s  {held[-1]:7.1f} MiB  {len(load.seconds):8,} answers", flush=True)
            switch(link, served[turn % 2])
        time.sleep(min(10.0, reload_every))
        load.stopped.set()
        client.join()
        held.append(resident(port))
    taken = sum("serves now" in line for line in said)
    p50, p99, most = np.percentile(load.seconds, [50, 99, 100]) * 1e3
    print(f"{len(load.seconds):,} answers, {load.failed} failed, {load.wrong} wrong; {taken} newer models taken")
    print(f"answers by each model: {np.bincount(load.of_model, minlength=2).tolist()}")
    print(f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {most:.0f} ms, at {rate:g} a second")
    first = held[2]
    print(f"memory after two reloads {first:.1f} MiB, at the end {held[-1]:.1f} MiB: {held[-1] / first - 1:+.1%}")
    return load.failed == load.wrong == 0 and taken > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of 50 requests each way")
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--minutes", type=float, help="keep it under load for so long instead")
    parser.add_argument("--reload-every", type=float, default=30.0, help="seconds between newer models")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--exported", action="store_true", help="reload exported folders, not runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.minutes is None:
            latency(Path(name), options.rounds, options.threads)
            return
        well = steady(
            Path(name), options.minutes, options.reload_every, options.rate, options.exported, options.threads
        )
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
