"""Several workers on one port: the same model and common metrics, restarts, and the stop."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from serving.http.client import INFER, binary_body, json_body, rows
from serving.http.running import Server
from ultr.serving.http.served import load_scorer

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="the tests find workers in /proc")


def workers_of(pid: int) -> set[int]:
    """Return the workers of a server; it also has a process that tracks resources."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()}


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def files(server: Server) -> dict[int, int]:
    """Return the number of open files, with connections, of each worker."""
    return {pid: len([*Path(f"/proc/{pid}/fd").iterdir()]) for pid in workers_of(server.process.pid)}


def metric(server: Server, name: str) -> float:
    text = server.fetch("GET", "/metrics").body.decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def versions(server: Server, number: int = 20) -> set[str]:
    """Return the versions of answers on new connections, which go to all workers."""
    return {server.fetch("GET", "/v2/models/ranker").json["versions"][0] for _ in range(number)}


def point(link: Path, folder: Path) -> None:
    newer = link.with_name("next")
    newer.symlink_to(folder)
    newer.replace(link)


@pytest.fixture(scope="module")
def link(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("workers") / "live"


@pytest.fixture(scope="module")
def server(folders, link):
    link.symlink_to(folders.exported)
    with Server(link, "--workers", "2", "--poll", "0.1") as running:
        yield running


def test_workers_share_the_port_and_their_metrics_are_summed(server, folders):
    expected = load_scorer(folders.exported)(rows(3))
    assert "2 workers" in server.lines[0]
    assert len(workers_of(server.process.pid)) == 2
    before = metric(server, "ultr_requests_total")
    opened = files(server)
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(30)]
    wait_for(lambda: sum(files(server).values()) >= sum(opened.values()) + 25)
    assert all(number > opened[pid] for pid, number in files(server).items())  # each worker has some of them
    for connection in connections:
        connection.close()
    for _ in range(30):
        np.testing.assert_allclose(server.fetch("POST", INFER, json_body(rows(3))).scores, expected, atol=1e-6)
    wait_for(lambda: metric(server, "ultr_requests_total") == before + 30)  # a request is counted after its answer
    assert metric(server, "ultr_rows_total") == 3 * (before + 30)
    assert metric(server, "ultr_model_info") == 1
    assert metric(server, "process_resident_memory_bytes") > 1e8  # of both


def test_a_worker_that_ends_is_replaced_and_requests_are_answered_meanwhile(server):
    before, counted = workers_of(server.process.pid), metric(server, "ultr_requests_total")
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    message = re.compile(r"warning: worker [12] ended with signal SIGKILL; starting another")
    wait_for(lambda: any(map(message.match, server.lines)))  # until then, the system may give it a new connection
    for _ in range(10):
        assert server.fetch("POST", INFER, json_body(rows(3))).status == 200
    wait_for(lambda: len(workers_of(server.process.pid) - {killed}) == 2)
    wait_for(lambda: metric(server, "ultr_requests_total") == counted + 10)  # the counts of the killed worker stay


def test_all_workers_load_newer_models_and_no_worker_starts_with_a_broken_one(server, folders, link, tmp_path):
    newer = load_scorer(folders.exported_trees).version
    point(link, folders.exported_trees)
    wait_for(lambda: versions(server) == {newer})
    assert sum(f"now serving version {newer}" in line for line in server.lines) == 1
    shutil.copytree(folders.exported, tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
    point(link, tmp_path / "broken")
    wait_for(lambda: any("cannot be loaded" in line for line in server.lines))
    before = workers_of(server.process.pid)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(workers_of(server.process.pid) - before) == 2)
    wait_for(server.accepts)
    assert versions(server, 5) == {newer}
    assert metric(server, "ultr_reloads_total") == 2  # one taken, one broken


def test_sigterm_stops_all_workers_after_their_requests(folders):
    body, headers = binary_body(rows(200))
    head = [f"POST {INFER} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    with (
        Server(folders.exported, "--workers", "2") as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=20) as started,
    ):
        started.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body[:100])
        time.sleep(0.3)
        workers = workers_of(running.process.pid)
        running.process.terminate()
        time.sleep(0.5)
        assert running.process.poll() is None
        started.sendall(body[100:])
        answer = b""
        while part := started.recv(65536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert running.process.wait(30) == 0
        assert all(map(ended, workers))
        wait_for(lambda: running.lines[-1] == "stopped\n")
        assert len(running.lines) == 2  # no traceback


@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_no_worker_outlives_its_parent(how, folders):
    with Server(folders.exported, "--workers", "2") as running:
        workers = workers_of(running.process.pid)
        if how == "ctrl-c":  # a terminal sends the signal to all processes of its group
            os.killpg(running.process.pid, signal.SIGINT)
            assert running.process.wait(30) == 0
        else:
            running.process.kill()
            running.process.wait()
        wait_for(lambda: all(map(ended, workers)))
    assert not any("Traceback" in line for line in running.lines)
