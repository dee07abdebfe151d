"""The application, asked without a socket: it scores as the model does, and refuses all that is wrong in words."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import orjson
import pytest

from serving.asking import FEATURES, INFER, MAX_ROWS, ask, asked, binary_body, json_body, rows
from serving.conftest import train
from serving.malformed import malformed
from ultr.errors import DataError
from ultr.models import load_model
from ultr.serving.app import App
from ultr.serving.served import Served, Watch, load_scorer

MODEL, TREES = "/v2/models/ranker", "/v2/models/trees/infer"


@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (3, 4), (2, 0), (MAX_ROWS,)])
def test_scores_are_those_of_the_run(shape, network, folders):
    features = rows(*shape)
    expected = load_model(folders.network).score_features(features.reshape(-1, FEATURES)).reshape(shape)
    for answer in (
        asked(network, "POST", INFER, json_body(features)),
        asked(network, "POST", INFER, *binary_body(features)),
        asked(network, "POST", INFER, *binary_body(features), parts=3),
    ):
        assert answer.status == 200, answer.body
        np.testing.assert_allclose(answer.scores, expected, atol=1e-5)


def test_trees_score_as_the_run_does_with_what_is_missing(trees, folders):
    features = rows(20)
    features[::3, 1], features[1, -1] = np.nan, 0
    expected = load_model(folders.trees).score_features(features)
    assert len(set(expected)) > 1
    answer = asked(trees, "POST", TREES, *binary_body(features))
    np.testing.assert_array_equal(answer.scores, expected)
    nulls = [None if np.isnan(x) else float(x) for x in features.ravel()]
    asks = {"inputs": [{"name": "features", "shape": [20, FEATURES], "datatype": "FP64", "data": nulls}]}
    np.testing.assert_array_equal(asked(trees, "POST", TREES, orjson.dumps(asks)).scores, expected)
    features[0, 0] = np.inf
    refused = asked(trees, "POST", TREES, *binary_body(features))
    assert refused.status == 400
    assert "'f0' of row 0 is not finite" in refused.json["error"]


def test_an_exported_folder_scores_as_its_run(folders, network, trees):
    features = rows(50)
    for folder, run in ((folders.exported, network), (folders.exported_trees, trees)):
        exported, scorer = load_scorer(folder), run.served.scorer
        np.testing.assert_allclose(exported(features), scorer(features), atol=1e-6)
        assert (exported.sizes, exported.missing) == (scorer.sizes, scorer.missing)
        assert exported.sizes == {FEATURES - 1: 3}


def test_the_server_says_what_it_has(network):
    def told(path):
        answer = asked(network, "GET", path)
        assert answer.status == 200
        return answer.json

    version = network.served.scorer.version
    assert told("/v2")["name"] == "ultr"
    assert told("/v2/models") == {"models": ["ranker"]}
    assert told("/v2/health/live") == {"live": True}
    assert told("/v2/health/ready") == {"ready": True}
    assert told(f"{MODEL}/ready") == told(f"{MODEL}/versions/{version}/ready") == {"name": "ranker", "ready": True}
    assert told(MODEL) == {
        "name": "ranker",
        "versions": [version],
        "platform": "onnxruntime",
        "inputs": [{"name": "features", "datatype": "FP32", "shape": [-1, FEATURES]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1]}],
    }
    answer = asked(network, "POST", f"{MODEL}/versions/{version}/infer", json_body(rows(1), id="x"))
    assert (answer.json["model_name"], answer.json["model_version"], answer.json["id"]) == ("ranker", version, "x")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "said"),
    [
        ("GET", INFER, b"", {}, 405, "use POST"),
        ("DELETE", "/v2", b"", {}, 405, "use GET"),
        ("POST", "/v2/models/other/infer", b"", {}, 404, "no such model, got 'other'; ask for 'ranker'"),
        ("GET", f"{MODEL}/versions/9", b"", {}, 404, "this version does not serve, got '9'"),
        ("GET", "/v3", b"", {}, 404, "there is nothing here, got '/v3'"),
        ("POST", INFER, b"{}", {"Content-Type": "text/plain"}, 415, "send application/json"),
        ("POST", INFER, b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
        ("POST", INFER, b"{}", {"Content-Length": "99999999"}, 413, "the body is too long"),
        ("POST", INFER, b"x" * 200_000, {}, 413, "the body is too long"),
        ("POST", INFER, b"{", {}, 400, "the request is no JSON"),
        ("POST", INFER, json_body(rows(1) + 99), {}, 400, "'shop' of row 0 is no code of a category"),
    ],
)
def test_a_refusal_has_its_status_and_says_why(method, path, body, headers, status, said, network):
    answer = asked(network, method, path, body, headers, parts=5)
    assert answer.status == status
    assert said in answer.json["error"]
    assert list(answer.json) == ["error"]


def test_without_the_token_only_health_is_told(network):
    app = App(network.served, name="ranker", max_rows=5, token="s3cret")  # noqa: S106
    right = {"Authorization": "Bearer s3cret"}
    body = json_body(rows(1))
    assert asked(app, "POST", INFER, body, right).status == 200
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"):
        assert asked(app, "GET", path).status == 200
    for path in ("/v2", "/v2/models", MODEL, "/metrics"):
        assert asked(app, "GET", path).status == 401
        assert asked(app, "GET", path, b"", right).status == 200
    for wrong in ("", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer é"):
        answer = asked(app, "POST", INFER, body, {"Authorization": wrong})
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    twice = [("Authorization", "Bearer s3cret")] * 2
    assert asked(app, "POST", INFER, body, twice).status == 400
    assert asked(app, "GET", "/nowhere").status == 401
    app.close()


def test_ten_thousand_malformed_requests_are_refused_and_the_next_is_answered(network):
    expected = asked(network, "POST", INFER, json_body(rows(3))).scores

    async def all_of_them():
        found: Counter = Counter()
        for i, request in enumerate(malformed(10_000, seed=0)):
            answer = await ask(network, request.method, request.path, request.body, request.headers)
            assert 400 <= answer.status < 500, (request, answer)
            assert answer.json["error"], request
            found[request.kind, answer.status] += 1
            if i % 1000 == 0:
                right = await ask(network, "POST", INFER, json_body(rows(3)))
                np.testing.assert_array_equal(right.scores, expected)
        return found

    found = asyncio.run(all_of_them())
    assert {status for _, status in found} == {400, 404, 405, 413, 415}
    assert len({kind for kind, _ in found}) >= 12


def test_metrics_count_what_was_scored_and_refused(network):
    def figures():
        lines = asked(network, "GET", "/metrics").body.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = figures()
    for features in (rows(4), rows(2, 3)):
        assert asked(network, "POST", INFER, json_body(features)).status == 200
    assert asked(network, "POST", INFER, b"no").status == 400
    after = figures()
    model = 'model_name="ranker"'
    for name, more in {
        f"ultr_rows_total{{{model}}}": 10,
        f'ultr_requests_total{{code="200",{model}}}': 2,
        f'ultr_requests_total{{code="400",{model}}}': 1,
        f"ultr_request_seconds_count{{{model}}}": 3,
        f"request_predict_seconds_count{{{model}}}": 2,
    }.items():
        assert after[name] - before.get(name, 0) == more, name
    version = network.served.scorer.version
    assert any(name.startswith("ultr_model_info") and version in name for name in after)
    assert after["process_resident_memory_bytes"] > 0


def test_health_is_told_while_a_long_request_is_scored(network):
    quick = network.served.scorer
    begun, done = threading.Event(), threading.Event()

    def slow(features):
        begun.set()
        assert done.wait(20)
        return quick.score(features)

    served = Served.__new__(Served)
    served.scorer = replace(quick, score=slow, seconds_per_row=1.0)
    app = App(served, name="ranker", max_rows=5)

    async def both():
        long = asyncio.create_task(ask(app, "POST", INFER, json_body(rows(2))))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await ask(app, "GET", "/v2/health/live")).status == 200
        assert not long.done()
        done.set()
        return await long

    assert asyncio.run(both()).status == 200
    app.close()


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(network, monkeypatch):
    monkeypatch.setattr("ultr.serving.app.BODY_SECONDS", 0.05)
    sent = []

    async def receive():
        await asyncio.sleep(5)

    async def send(message):
        sent.append(message)

    start = time.monotonic()
    asyncio.run(network({"type": "http", "method": "POST", "path": INFER, "headers": []}, receive, send))
    assert time.monotonic() - start < 2
    assert sent[0]["status"] == 408


# --- Newer models -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_trained_anew_takes_over_and_is_kept_while_it_is_gone(folders, tmp_path):
    run, said = tmp_path / "run", []
    shutil.copytree(folders.trees, run)
    served = Served(run, say=said.append)
    old = served.scorer
    served.look()
    assert served.scorer is old
    shutil.rmtree(run / "model")
    served.look()
    served.look()
    assert served.scorer is old
    assert [text for text in said if "has no model now" in text] == said
    train(folders.log, run, ranker="lightgbm", seed=5, overwrite=True)
    served.look()
    assert served.scorer.version != old.version
    np.testing.assert_allclose(served.scorer(rows(9)), load_model(run).score_features(rows(9)), atol=1e-5)
    assert f"it was {old.version}" in said[-1]


def test_a_switched_link_takes_over_and_the_same_model_elsewhere_does_not(folders, tmp_path):
    link, heard = tmp_path / "live", []
    link.symlink_to(folders.exported)
    served = Served(link)
    served.heard = heard.append
    old = served.scorer
    shutil.copytree(folders.exported, tmp_path / "same")
    for target in (tmp_path / "same", folders.exported_trees, folders.exported):
        other = tmp_path / "other"
        other.symlink_to(target)
        other.replace(link)
        served.look()
        assert (served.scorer is old) == (target == tmp_path / "same")
    assert served.scorer.version == old.version
    assert heard == [True, True]


@pytest.mark.parametrize("file", ["model.onnx", "model.json"])
def test_a_broken_newer_model_is_said_once_and_the_old_one_serves_on(file, folders, tmp_path):
    folder, said = tmp_path / "exported", []
    shutil.copytree(folders.exported, folder)
    served = Served(folder, say=said.append)
    heard: list[bool] = []
    served.heard = heard.append
    old = served.scorer
    (folder / file).write_bytes(b"broken")
    for _ in range(3):
        served.look()
    assert served.scorer is old
    assert len(said) == 1
    assert "is not taken" in said[0]
    assert f"version {old.version} serves on" in said[0]
    shutil.rmtree(folder)
    shutil.copytree(folders.exported_trees, folder)
    served.look()
    assert served.scorer.version != old.version
    assert heard == [False, True]


def test_a_watch_looks_until_it_is_left(folders):
    served = Served(folders.exported)
    looked = threading.Event()
    served.look = looked.set
    with Watch(served, 0.01):
        assert looked.wait(10)
    assert not any(thread.name == "ultr-watch" for thread in threading.enumerate())


def test_what_has_no_model_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no model here; name a finished run"):
        Served(tmp_path)
