"""The application, without a socket: it scores like the model, and answers malformed requests with errors."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import orjson
import pytest

from serving.http.client import FEATURES, INFER, MAX_ROWS, binary_body, fetch, fetch_async, json_body, rows
from serving.http.conftest import train
from serving.http.malformed import malformed
from ultr.errors import DataError, UltrError
from ultr.rankers.model import load_model
from ultr.serving.http import ServerOptions
from ultr.serving.http import app as app_module
from ultr.serving.http.app import ARRIVED, App
from ultr.serving.http.served import Scorer, Served, Watch, load_scorer
from ultr.utils.jsonfiles import load_json

MODEL, TREES = "/v2/models/ranker", "/v2/models/trees/infer"


@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (3, 4), (2, 0), (MAX_ROWS,)])
def test_scores_are_those_of_the_run(shape, network, folders):
    features = rows(*shape)
    expected = load_model(folders.network).score_features(features.reshape(-1, FEATURES)).reshape(shape)
    for answer in (
        fetch(network, "POST", INFER, json_body(features)),
        fetch(network, "POST", INFER, *binary_body(features)),
        fetch(network, "POST", INFER, *binary_body(features), parts=3),
    ):
        assert answer.status == 200, answer.body
        np.testing.assert_allclose(answer.scores, expected, atol=1e-5)


@pytest.mark.parametrize("binary", [False, True])
def test_a_parameter_asks_for_expected_feedback_too(binary, network, folders):
    features, model = rows(6), load_model(folders.network)
    for position, at in (("", None), ("2", 2), (2, 2)):
        content = orjson.loads(json_body(features))
        content["parameters"] = {"expected_at": position, "binary_data_output": binary}
        answer = fetch(network, "POST", INFER, orjson.dumps(content))
        expected = model.calibration.expected(model.score_features(features), at and str(at))
        if binary:
            found = np.frombuffer(answer.body[-8 * 6 :], "<f8")
        else:
            scores, output = answer.json["outputs"]
            assert (scores["name"], output["name"], output["datatype"]) == ("scores", "expected", "FP64")
            found = output["data"]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for position, message in (("77", "was not in the training log"), (1.5, "must be a position")):
        content["parameters"] = {"expected_at": position}
        answer = fetch(network, "POST", INFER, orjson.dumps(content))
        assert answer.status == 400
        assert message in answer.json["error"]


def test_trees_get_the_scores_of_the_run_with_missing_values(trees, folders):
    features = rows(20)
    features[::3, 1], features[1, -1] = np.nan, 0
    expected = load_model(folders.trees).score_features(features)
    assert len(set(expected)) > 1
    answer = fetch(trees, "POST", TREES, *binary_body(features))
    np.testing.assert_array_equal(answer.scores, expected)
    nulls = [None if np.isnan(x) else float(x) for x in features.ravel()]
    content = {"inputs": [{"name": "features", "shape": [20, FEATURES], "datatype": "FP64", "data": nulls}]}
    np.testing.assert_array_equal(fetch(trees, "POST", TREES, orjson.dumps(content)).scores, expected)
    features[0, 0] = np.inf
    answer = fetch(trees, "POST", TREES, *binary_body(features))
    assert answer.status == 400
    assert "'f0' in row 0 is not finite" in answer.json["error"]


def test_an_exported_folder_scores_as_its_run(folders, network, trees):
    features = rows(50)
    for folder, run in ((folders.exported, network), (folders.exported_trees, trees)):
        exported, scorer = load_scorer(folder), run.served.scorer
        np.testing.assert_allclose(exported(features), scorer(features), atol=1e-6)
        assert exported.keeps_missing == scorer.keeps_missing
        assert exported.largest_codes == scorer.largest_codes == {FEATURES - 1: 3}


def test_the_server_describes_itself_and_its_model(network):
    def get(path):
        answer = fetch(network, "GET", path)
        assert answer.status == 200
        return answer.json

    version = network.served.scorer.version
    assert get("/v2")["name"] == "ultr"
    assert get("/v2/models") == {"models": ["ranker"]}
    assert get("/v2/health/live") == {"live": True}
    assert get("/v2/health/ready") == {"ready": True}
    assert get(f"{MODEL}/ready") == get(f"{MODEL}/versions/{version}/ready") == {"name": "ranker", "ready": True}
    assert get(MODEL) == {
        "name": "ranker",
        "versions": [version],
        "platform": "onnxruntime",
        "inputs": [{"name": "features", "datatype": "FP32", "shape": [-1, FEATURES]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1]}],
        "parameters": {"feature_names": [*network.served.scorer.feature_names], "categorical": ["shop"]},
    }
    answer = fetch(network, "POST", f"{MODEL}/versions/{version}/infer", json_body(rows(1), id="x"))
    assert (answer.json["model_name"], answer.json["model_version"], answer.json["id"]) == ("ranker", version, "x")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("GET", INFER, b"", {}, 405, "use POST"),
        ("DELETE", "/v2", b"", {}, 405, "use GET or HEAD"),
        ("POST", "/v2/models/other/infer", b"", {}, 404, "the model is unknown, got 'other'; use 'ranker'"),
        ("GET", f"{MODEL}/versions/9", b"", {}, 404, "the version is not served, got '9'; use"),
        ("GET", "/v3", b"", {}, 404, "the path is unknown, got '/v3'; POST to /v2/models/ranker/infer"),
        ("POST", INFER, b"{}", {"Content-Type": "text/plain"}, 415, "send application/json"),
        ("POST", INFER, b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
        ("POST", INFER, b"{}", {"Content-Length": "99999999"}, 413, "the body is too long"),
        ("POST", INFER, b"x" * 200_000, {}, 413, "the body is too long"),
        ("POST", INFER, b"{", {}, 400, "the request is not JSON"),
        ("POST", INFER, json_body(rows(1) + 99), {}, 400, "'shop' in row 0 is not a code of a category"),
    ],
)
def test_an_error_has_its_status_and_says_why(method, path, body, headers, status, message, network):
    answer = fetch(network, method, path, body, headers, parts=5)
    assert answer.status == status
    assert message in answer.json["error"]
    assert list(answer.json) == ["error"]


def test_without_the_token_only_probes_are_answered(network):
    app = App(network.served, ServerOptions("ranker", max_rows=5, token="s3cret"))  # noqa: S106
    right = {"Authorization": "Bearer s3cret"}
    body = json_body(rows(1))
    assert fetch(app, "POST", INFER, body, right).status == 200
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"):
        assert fetch(app, "GET", path).status == 200
    for path in ("/v2", "/v2/models", MODEL, "/metrics"):
        assert fetch(app, "GET", path).status == 401
        assert fetch(app, "GET", path, b"", right).status == 200
    for wrong in ("", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer é"):
        answer = fetch(app, "POST", INFER, body, {"Authorization": wrong})
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    twice = [("Authorization", "Bearer s3cret")] * 2
    assert fetch(app, "POST", INFER, body, twice).status == 400
    assert fetch(app, "GET", "/nowhere").status == 401
    app.close()


def test_ten_thousand_malformed_requests_get_errors_and_the_next_gets_scores(network):
    expected = fetch(network, "POST", INFER, json_body(rows(3))).scores

    async def send_all():
        statuses: Counter = Counter()
        for i, request in enumerate(malformed(10_000, seed=0)):
            answer = await fetch_async(network, request.method, request.path, request.body, request.headers)
            assert 400 <= answer.status < 500, (request, answer)
            assert answer.json["error"], request
            statuses[request.kind, answer.status] += 1
            if i % 1000 == 0:
                right = await fetch_async(network, "POST", INFER, json_body(rows(3)))
                np.testing.assert_array_equal(right.scores, expected)
        return statuses

    statuses = asyncio.run(send_all())
    assert {status for _, status in statuses} == {400, 404, 405, 413, 415}
    assert len({kind for kind, _ in statuses}) >= 12


def test_metrics_count_scores_and_errors(network):
    def values():
        lines = fetch(network, "GET", "/metrics").body.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = values()
    for features in (rows(4), rows(2, 3)):
        assert fetch(network, "POST", INFER, json_body(features)).status == 200
    assert fetch(network, "POST", INFER, b"no").status == 400
    after = values()
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


def test_probes_are_answered_while_a_long_request_is_scored(network):
    quick = network.served.scorer
    started, done = threading.Event(), threading.Event()

    def slow(features):
        started.set()
        assert done.wait(20)
        return quick.score(features)

    served = Served.__new__(Served)
    served.scorer = replace(quick, score=slow, seconds_per_row=1.0)
    app = App(served, ServerOptions("ranker", max_rows=5))

    async def both():
        long = asyncio.create_task(fetch_async(app, "POST", INFER, json_body(rows(2))))
        while not started.is_set():
            await asyncio.sleep(0.01)
        assert (await fetch_async(app, "GET", "/v2/health/live")).status == 200
        assert not long.done()
        done.set()
        return await long

    assert asyncio.run(both()).status == 200
    app.close()


def test_a_body_that_does_not_arrive_is_a_timeout(network, monkeypatch):
    monkeypatch.setattr("ultr.serving.http.app.BODY_SECONDS", 0.05)
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


def test_a_run_that_is_trained_again_is_loaded_and_a_deleted_one_stays_served(folders, tmp_path):
    run, lines = tmp_path / "run", []
    shutil.copytree(folders.trees, run)
    served = Served(run, say=lambda text, _="info": lines.append(text))
    old = served.scorer
    served.reload()
    assert served.scorer is old
    shutil.rmtree(run / "model")
    served.reload()
    served.reload()
    assert served.scorer is old
    assert [line for line in lines if "has no model now; still serving" in line] == lines
    train(folders.log, run, ranker="lightgbm", seed=5, overwrite=True)
    served.reload()
    assert served.scorer.version != old.version
    np.testing.assert_allclose(served.scorer(rows(9)), load_model(run).score_features(rows(9)), atol=1e-5)
    assert f"in place of {old.version}" in lines[-1]


def test_a_switched_link_is_reloaded_unless_the_model_is_the_same(folders, tmp_path):
    link, reloads = tmp_path / "live", []
    link.symlink_to(folders.exported)
    served = Served(link)
    served.on_reload = reloads.append
    old = served.scorer
    shutil.copytree(folders.exported, tmp_path / "same")
    for target in (tmp_path / "same", folders.exported_trees, folders.exported):
        other = tmp_path / "other"
        other.symlink_to(target)
        other.replace(link)
        served.reload()
        assert (served.scorer is old) == (target == tmp_path / "same")
    assert served.scorer.version == old.version
    assert reloads == [True, True]


@pytest.mark.parametrize("file", ["model.onnx", "model.json"])
def test_a_broken_newer_model_is_reported_once_and_the_old_one_stays_served(file, folders, tmp_path):
    folder, lines = tmp_path / "exported", []
    shutil.copytree(folders.exported, folder)
    served = Served(folder, say=lambda text, level="info": lines.append(f"{level}: {text}"))
    reloads: list[bool] = []
    served.on_reload = reloads.append
    old = served.scorer
    (folder / file).write_bytes(b"broken")
    for _ in range(3):
        served.reload()
    assert served.scorer is old
    assert len(lines) == 1
    assert lines[0].startswith("warning: the newer model cannot be loaded")
    assert f"still serving version {old.version}" in lines[0]
    shutil.rmtree(folder)
    shutil.copytree(folders.exported_trees, folder)
    served.reload()
    assert served.scorer.version != old.version
    assert reloads == [False, True]


def test_a_watch_reloads_until_it_stops(folders):
    served = Served(folders.exported)
    reloaded = threading.Event()
    served.reload = reloaded.set
    with Watch(served, 0.01):
        assert reloaded.wait(10)
    assert not any(thread.name == "ultr-watch" for thread in threading.enumerate())


def test_a_stop_ends_a_reload(folders, tmp_path):
    link, lines = tmp_path / "live", []
    link.symlink_to(folders.exported)
    served = Served(link, say=lambda text, _="info": lines.append(text))
    old = served.scorer
    link.unlink()
    link.symlink_to(folders.trees)
    served.stopped.set()
    start = time.monotonic()
    served.reload()
    assert time.monotonic() - start < 5
    assert (served.scorer, lines) == (old, [])


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(DataError, match="there is no model here; pass a finished run"):
        Served(tmp_path)


def test_the_error_of_an_export_is_the_error_of_the_server(folders, tmp_path):
    run = shutil.copytree(folders.trees, tmp_path / "run")
    (run / "model" / "rows.safetensors").unlink()
    with pytest.raises(UltrError, match=r"no rows to test the exported model with; .* --out DIR --rows LOG"):
        Served(run)


def test_trees_without_onnx_are_not_served(folders, tmp_path):
    folder = shutil.copytree(folders.exported_trees, tmp_path / "exported")
    about = load_json(folder / "model.json")
    del about["files"]["model.onnx"]
    (folder / "model.json").write_text(json.dumps({**about, "no_onnx": "the leaves are linear models"}))
    with pytest.raises(
        DataError, match=r"lightgbm trees have no ONNX \(the leaves are linear models\), so they cannot be served"
    ):
        Served(folder)


# --- Limits and other features ----------------------------------------------------------------------------------------


def scorer_with(names: tuple[str, ...], **vocabularies: tuple[str, ...]) -> Scorer:
    return Scorer("v", names, vocabularies, False, lambda features: features[:, 0], 0.0)


@pytest.mark.parametrize(
    ("newer", "change"),
    [
        (scorer_with(("a", "shop"), shop=("x", "y")), None),
        (scorer_with(("a", "shop"), shop=("x", "y", "z")), None),
        (scorer_with(("shop", "a"), shop=("x", "y")), "feature 1 is 'shop' in place of 'a'"),
        (scorer_with(("a", "shop", "b"), shop=("x", "y")), "feature 3 is 'b' in place of absent"),
        (scorer_with(("a",)), "feature 2 is absent in place of 'shop'"),
        (scorer_with(("a", "shop"), shop=("y", "x")), "the values of 'shop' have other codes"),
        (scorer_with(("a", "shop"), shop=("x",)), "the values of 'shop' have other codes"),
        (scorer_with(("a", "shop")), "'shop' is a number now"),
        (scorer_with(("a", "shop"), a=("1",), shop=("x", "y")), "'a' is a category now"),
    ],
)
def test_a_newer_model_may_not_misread_what_clients_send(newer, change):
    assert newer.misreads(scorer_with(("a", "shop"), shop=("x", "y"))) == change


@pytest.mark.parametrize("allowed", [False, True])
def test_a_newer_model_with_other_features_is_loaded_only_if_that_is_allowed(allowed, folders, tmp_path, monkeypatch):
    (tmp_path / "live").symlink_to(folders.exported)
    said: list[str] = []
    served = Served(tmp_path / "live", any_schema=allowed, say=lambda text, _="info": said.append(text))
    old = served.scorer
    newer = replace(old, version="newer", feature_names=old.feature_names[::-1])
    monkeypatch.setattr("ultr.serving.http.served.load_scorer", lambda *_, **__: newer)
    (tmp_path / "new").symlink_to(folders.exported_trees)
    (tmp_path / "new").rename(tmp_path / "live")
    served.reload()
    assert served.scorer is (newer if allowed else old)
    assert ("now serving version newer" if allowed else "--allow-schema-change") in said[0]
    served.reload()
    assert len(said) == 1


def test_large_bodies_that_do_not_fit_are_refused_and_small_ones_are_not(network, monkeypatch):
    small, large = json_body(rows(2)), json_body(rows(200))
    monkeypatch.setattr(app_module, "MOST_BYTES", len(large) + 10)
    monkeypatch.setattr(app_module, "SMALL_BODY", len(small))

    async def talk():
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def receive():
            begun.set()
            await go_on.wait()
            return {"type": "http.request", "body": large, "more_body": False}

        async def send(message):
            sent.append(message)

        sent: list[dict] = []
        headers = [(b"content-length", str(len(large)).encode())]
        scope = {"type": "http", "method": "POST", "path": INFER, "headers": headers}
        first = asyncio.create_task(network(scope, receive, send))
        await begun.wait()
        second = await fetch_async(network, "POST", INFER, large, {"Content-Length": str(len(large))})
        third = await fetch_async(network, "POST", INFER, small)
        go_on.set()
        await first
        return sent[0]["status"], second, third

    first, second, third = asyncio.run(talk())
    assert (first, second.status, third.status) == (200, 503, 200)
    assert second.headers["retry-after"] == "1"
    assert "too many large requests are in progress" in second.json["error"]
    assert fetch(network, "POST", INFER, large).status == 200  # nothing is left of the others


def test_a_request_behind_too_many_others_is_told_to_come_back(network, monkeypatch):
    monkeypatch.setattr(app_module, "MOST_WAITING", 0)
    scope = {"type": "http", "method": "POST", "path": INFER, "headers": [], app_module.WAITING: 0}
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    asyncio.run(network(scope, None, send))
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert fetch(network, "GET", "/v2/health/live").status == 200


def test_the_time_of_a_request_includes_its_wait(network):
    before = network._seconds._sum.get()
    scope = {"type": "http", "method": "GET", "path": INFER, "headers": [], ARRIVED: time.perf_counter() - 5}

    async def send(_message):
        pass

    asyncio.run(network(scope, None, send))
    assert network._seconds._sum.get() - before >= 5
