"""A server in another process: clients of the protocol, the token, reloads under load, and its end."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from serving.http.client import FEATURES, INFER, MAX_ROWS, binary_body, json_body, rows
from serving.http.malformed import broken_http, malformed
from serving.http.running import Server
from ultr.errors import TRAIN_PACKAGES
from ultr.rankers.model import load_model
from ultr.serving.http.served import _export, load_scorer
from ultr.serving.http.server import _OneWrite

TOKEN = "a-token-of-tests"  # noqa: S105


@pytest.fixture(scope="module")
def server(folders):
    """A server of a run with a network."""
    with Server(folders.network, "--max-rows", MAX_ROWS) as running:
        yield running


@pytest.fixture
def exported(folders, tmp_path):
    """A server of a link to an exported folder, with a token."""
    (tmp_path / "live").symlink_to(folders.exported)
    with Server(tmp_path / "live", "--poll", "0.1", ULTR_TOKEN=TOKEN) as running:
        yield running


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [(30,), (4, 5)])
def test_tritonclient_gets_the_scores_of_torch(binary, shape, server, folders):
    features = rows(*shape)
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ranker")
        about = client.get_model_metadata("ranker")
        assert about["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, FEATURES]}]
        tensor = triton.InferInput("features", features.shape, "FP32")
        tensor.set_data_from_numpy(features, binary_data=binary)
        wanted = triton.InferRequestedOutput("scores", binary_data=binary)
        answer = client.infer("ranker", [tensor], outputs=[wanted], request_id="r1")
        assert answer.get_response()["id"] == "r1"
        assert answer.get_response()["model_version"] == about["versions"][0]
        expected = load_model(folders.network).score_features(features.reshape(-1, FEATURES)).reshape(shape)
        np.testing.assert_allclose(answer.as_numpy("scores"), expected, atol=1e-5)
        wrong = triton.InferInput("features", [1, 9], "FP32").set_data_from_numpy(np.zeros((1, 9), np.float32))
        with pytest.raises(triton.InferenceServerException, match="the shape of 'features' does not fit the model"):
            client.infer("ranker", [wrong])


def test_it_accepts_connections_only_from_this_machine(server):
    socket.create_connection(("127.0.0.1", server.port)).close()
    with pytest.raises(ConnectionRefusedError):  # a server that listens at all addresses accepts this one
        socket.create_connection(("127.0.0.2", server.port))


def test_the_server_survives_thousands_of_malformed_requests(server):
    expected = server.fetch("POST", INFER, json_body(rows(3))).scores
    connection = server.connect()
    for request in malformed(2000, seed=1):
        try:
            connection.putrequest(request.method, re.sub(r"[^!-~]", "x", request.path))
            for name, value in request.headers:
                connection.putheader(name, value)
        except ValueError:  # the client itself rejects it
            connection.close()
            continue
        connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body)
        response = connection.getresponse()
        body = response.read()
        assert 400 <= response.status < 500, (request, body)
        assert json.loads(body)["error"], request
    connection.close()
    statuses = []
    for raw in broken_http(500, seed=2):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
            plain.sendall(raw)
            with contextlib.suppress(OSError):  # the server may have closed the connection
                plain.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := plain.recv(65536):
                    answer += part
        if answer:
            statuses.append(int(answer.split()[1]))
            assert statuses[-1] in (200, 400, 404, 405, 413), (raw, answer)  # 200: an unusual request for /v2
    assert statuses.count(400) > 100
    assert server.process.poll() is None
    np.testing.assert_array_equal(server.fetch("POST", INFER, json_body(rows(3))).scores, expected)


def test_a_head_without_end_and_a_body_too_long_are_errors(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.sendall(b"GET /v2 HTTP/1.1\r\nX: ")
        with contextlib.suppress(OSError):
            for _ in range(1000):
                plain.sendall(b"x" * 10_000)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n".encode())
        assert plain.recv(100).startswith(b"HTTP/1.1 413")
    assert server.fetch("GET", "/v2/health/live").status == 200


def test_the_head_and_the_body_of_an_answer_are_one_write(server):
    class Transport:
        def __init__(self):
            self.calls = []

        def write(self, data):
            self.calls.append(data)

        def close(self):
            self.calls.append("close")

    transport = Transport()
    one = _OneWrite(transport)
    one.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    one.write(b"HTTP/1.1 200 OK\r\n\r\n")
    one.write(b"HTTP/1.1 is a body too")
    one.flush()
    one.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    one.flush()
    one.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    one.close()
    assert transport.calls == [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 is a body too",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "close",
    ]
    assert server.fetch("HEAD", "/v2").status == 200
    body = json_body(rows(3))
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.sendall(head.encode())
        assert plain.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        plain.sendall(body)
        assert plain.recv(10_000).endswith(b"]}]}")


def has_no_torch(server) -> bool:
    """Return True if the process has not loaded torch, or if the system cannot say."""
    maps = Path(f"/proc/{server.process.pid}/maps")
    return not maps.exists() or ("onnxruntime" in maps.read_text() and "torch" not in maps.read_text())


def test_models_are_served_without_torch(server, exported):
    assert has_no_torch(server)
    assert has_no_torch(exported)


WITHOUT_TRAINING = (
    "import runpy, sys\n"
    f"for name in {sorted(TRAIN_PACKAGES - {'pydantic'})}: sys.modules[name] = None\n"  # new versions of typer need it
    "runpy.run_module('ultr', run_name='__main__', alter_sys=True)"
)


def test_an_exported_model_is_served_where_nothing_of_training_is_installed(folders):
    with Server(folders.exported, python=("-c", WITHOUT_TRAINING)) as running:
        answer = running.fetch("POST", INFER, json_body(rows(3)))
    np.testing.assert_allclose(answer.scores, load_scorer(folders.exported)(rows(3)), atol=1e-6)


def test_a_run_that_is_not_exported_needs_an_extra(folders, tmp_path, monkeypatch):
    for name in TRAIN_PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    _export(str(folders.network), str(tmp_path / "out"), str(tmp_path / "error"), False)
    assert (tmp_path / "error").read_text() == (
        "serving a run that is not exported needs the package 'torch', which is not installed; "
        "install it with: pip install 'ultr[export]'"
    )


def test_the_token_is_required(exported, folders):
    assert exported.fetch("GET", "/v2/health/ready").status == 200
    assert exported.fetch("POST", INFER, json_body(rows(2))).status == 401
    right = {"Authorization": f"Bearer {TOKEN}"}
    answer = exported.fetch("POST", INFER, json_body(rows(2)), right)
    np.testing.assert_allclose(answer.scores, load_scorer(folders.exported)(rows(2)), atol=1e-6)
    assert b"ultr_rows_total" in exported.fetch("GET", "/metrics", b"", right).body
    assert TOKEN not in "".join(exported.lines)


def test_newer_models_are_loaded_under_load_and_no_request_fails(exported, folders, tmp_path):
    features = rows(20)
    models = {
        scorer.version: scorer(features) for scorer in map(load_scorer, (folders.exported, folders.exported_trees))
    }
    body, headers = binary_body(features)
    headers["Authorization"] = f"Bearer {TOKEN}"
    stop, seen, wrong = threading.Event(), [], []

    def load():
        connection = exported.connect()
        while not stop.is_set():
            try:
                answer = exported.fetch("POST", INFER, body, headers, connection=connection)
                version = json.loads(answer.body[: int(answer.headers["inference-header-content-length"])])[
                    "model_version"
                ]
                np.testing.assert_allclose(answer.scores, models[version], atol=1e-6)
                seen.append(version)
            except Exception as error:
                wrong.append(repr(error))
                return
        connection.close()

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for turn in range(6):
            folder = (folders.exported_trees, folders.exported)[turn % 2]
            (tmp_path / "next").symlink_to(folder)
            (tmp_path / "next").replace(tmp_path / "live")
            wanted, start = load_scorer(folder).version, time.monotonic()
            while not seen or seen[-1] != wanted:
                assert not wrong
                assert time.monotonic() - start < 20
                time.sleep(0.02)
        shutil.copytree(folders.exported, tmp_path / "broken")
        (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
        (tmp_path / "next").symlink_to(tmp_path / "broken")
        (tmp_path / "next").replace(tmp_path / "live")
        time.sleep(0.5)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert not wrong
    assert len(seen) > 50
    assert sum("now serving version" in line for line in exported.lines) == 6
    assert sum("cannot be loaded" in line for line in exported.lines) == 1


def test_after_a_signal_to_stop_it_finishes_requests_and_exits_with_0(exported, folders):
    body, headers = binary_body(rows(200))
    head = [f"POST {INFER} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    half = len(body) // 2
    with socket.create_connection(("127.0.0.1", exported.port), timeout=20) as started:
        started.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body[:half])
        idle = exported.connect()
        assert exported.fetch("GET", "/v2/health/live", connection=idle).status == 200
        exported.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        while time.monotonic() - start < 20:
            try:
                socket.create_connection(("127.0.0.1", exported.port), timeout=5).close()
            except ConnectionRefusedError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("it still accepts connections")
        assert exported.process.poll() is None
        started.sendall(body[half:])
        answer = b""
        while part := started.recv(65536):
            answer += part
        idle.close()
    assert answer.startswith(b"HTTP/1.1 200")
    np.testing.assert_allclose(np.frombuffer(answer[-800:], "<f4"), load_scorer(folders.exported)(rows(200)), atol=1e-6)
    assert exported.process.wait(30) == 0
    assert exported.lines[-1] == "stopped\n"


def test_an_interrupt_ends_it_with_exit_code_0_and_without_a_drain(folders):
    with Server(folders.exported, "--drain", "60") as running:
        idle = running.connect()
        assert running.fetch("GET", "/v2/health/live", connection=idle).status == 200
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
        idle.close()


def test_a_draining_server_is_alive_but_not_ready_and_closes_its_connections(folders):
    with Server(folders.exported, "--drain", "60") as running:
        kept, idle = running.connect(), running.connect()
        for connection in (kept, idle):
            answer = running.fetch("GET", "/v2/health/ready", connection=connection)
            assert (answer.status, answer.json, answer.headers.get("connection")) == (200, {"ready": True}, None)
        running.process.terminate()
        time.sleep(0.5)
        answer = running.fetch("GET", "/v2/health/ready", connection=kept)
        assert (answer.status, answer.json, answer.headers["connection"]) == (503, {"ready": False}, "close")
        assert running.fetch("GET", "/v2/models/ranker/ready").status == 503
        assert running.fetch("GET", "/v2/health/live").status == 200  # over a new connection
        answer = running.fetch("POST", INFER, json_body(rows(3)), connection=idle)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        start = time.monotonic()
        assert running.process.wait(30) == 0  # no connection is open, so it does not wait for the rest of the minute
        assert time.monotonic() - start < 10


class KeptAlive(threading.Thread):
    """A client that sends requests over one connection, and opens another only after an answer that closes it."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.answers, self.error, self.stop = server, 0, None, False

    def run(self) -> None:
        connection, body = self.server.connect(), json_body(rows(3))
        while not self.stop:
            try:
                if connection.sock is None:
                    connection.connect()
            except ConnectionRefusedError:
                return  # the server is gone
            except OSError as error:
                self.error = error
                return
            try:
                answer = self.server.fetch("POST", INFER, body, connection=connection)
                assert answer.status == 200
                assert (connection.sock is None) == (answer.headers.get("connection") == "close")
                self.answers += 1
            except Exception as error:
                self.error = error
                return
        connection.close()


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("workers", [1, 2])
def test_no_request_of_64_kept_alive_clients_fails_when_the_server_stops(workers, turn, folders):
    with Server(folders.exported, "--workers", workers, "--drain", 2) as running:
        clients = [KeptAlive(running) for _ in range(64)]
        for client in clients:
            client.start()
        try:
            time.sleep(1)
            running.process.terminate()
            assert running.process.wait(30) == 0
        finally:
            for client in clients:
                client.join(30)
                client.stop = True
        assert [client.error for client in clients if client.error] == []
        assert min(client.answers for client in clients) > 0


# --- The command, in this process -------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_message_and_exit_code_1(ultr, folders):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = ultr("serve", folders.exported, "--port", port)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use); stop the other server" in done.stderr


def test_other_machines_without_a_token_are_a_warning(ultr, folders, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("ultr.serving.http.workers.serve", lambda _listener, _run, options, **_: calls.append(options))
    monkeypatch.delenv("ULTR_TOKEN", raising=False)
    done = ultr("serve", folders.exported, "--port", 0, "--host", "0.0.0.0")  # noqa: S104
    assert "warning: everyone who can reach 0.0.0.0 can use this server; pass --token-file" in done.stderr
    assert ultr("serve", folders.exported, "--port", 0).stderr == ""
    (tmp_path / "token").write_text("abc\n")
    done = ultr("serve", folders.exported, "--port", 0, "--host", "0.0.0.0", "--token-file", tmp_path / "token")  # noqa: S104
    assert done.stderr == ""
    assert [options.token for options in calls] == [None, None, "abc"]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--poll", "nan"], {}, "Invalid value for '--poll'"),
        (["--poll", "inf"], {}, "Invalid value for '--poll'"),
        (["--name", "a/b"], {}, "'name' must have 1 to 100 letters"),
        (["--host", "x" * 70], {}, "the host is unknown"),
        (["--token-file", "absent"], {}, "the token cannot be read"),
        ([], {"ULTR_TOKEN": ""}, "ULTR_TOKEN: the token must be one word of ASCII"),
        ([], {"ULTR_TOKEN": "two words"}, "ULTR_TOKEN: the token must be one word of ASCII"),
    ],
)
def test_wrong_options_exit_with_2(arguments, environment, message, ultr, folders, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = ultr("serve", folders.exported, "--port", 0, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_folder_without_a_model_exits_with_5(ultr, tmp_path):
    done = ultr("serve", tmp_path, "--port", 0)
    assert done.returncode == 5
    assert "there is no model here; pass a finished run, or a folder that ultr export wrote" in done.stderr


def test_slow_clients_are_disconnected_and_others_are_served(folders):
    with Server(folders.exported, "--max-rows", MAX_ROWS) as running, contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(100)]
        for number, client in enumerate(silent):
            client.settimeout(30)
            if number % 2:
                client.send(b"POST /v2/models/ranker/infer HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        assert running.fetch("POST", INFER, json_body(rows(3))).status == 200
        assert time.monotonic() - began < 5
        answers = [client.recv(1000) for client in silent]
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        assert running.fetch("POST", INFER, json_body(rows(3))).status == 200


def test_a_connection_too_many_is_told_to_come_back(folders):
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90)); "
    start = limit + "sys.argv = ['ultr', *sys.argv[1:]]; runpy.run_module('ultr', run_name='__main__')"
    with (
        Server(folders.exported, python=("-c", start)) as running,
        contextlib.ExitStack() as opened,
    ):
        for _ in range(26):  # 90 files, less 64 for everything else
            opened.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        refused = opened.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        refused.settimeout(30)
        answer = refused.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
