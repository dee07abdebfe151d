"""Logs, lists, runs and scores in an object store: a server on this machine that speaks the protocol of S3."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from ultr import train
from ultr.errors import DataError, NetworkError, OptionError, OutputError
from ultr.log import read_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.readers import read_batches
from ultr.log.sampling import read_for_audit
from ultr.log.shards import Shards
from ultr.training import update
from ultr.utils import stores
from ultr.utils.files import atomic_path, check_output

DAYS = ("2026-11-01", "2026-11-02")
SMALL = ["--ranker", "mlp", "--steps", 5, "--label", "click", "--set", "bias_steps=5", "--set", "hidden=4"]


@pytest.fixture(scope="module")
def server():
    """Start moto's server; return its address."""
    moto = pytest.importorskip("moto.server", reason="the object store for this test needs: pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(scope="module")
def bucket(server):
    """A bucket with the log of two days, as Parquet and as CSV."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": server,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        address = server.removeprefix("http://")
        files = pyarrow.fs.S3FileSystem(
            endpoint_override=address, scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        files.create_dir("logs")
        for number, day in enumerate(DAYS):
            frame = rows(number)
            pq.write_table(pa.Table.from_pandas(frame), f"logs/days/date={day}/part-0.parquet", filesystem=files)
            with files.open_output_stream(f"logs/csv/date={day}/part-0.csv.gz", compression="gzip") as stream:
                stream.write(frame.to_csv(index=False).encode())
        yield "s3://logs"
    stores._filesystem.cache_clear()
    stores._fetched.cache_clear()


def rows(day: int, requests: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(day)
    n = 4 * requests
    frame = pd.DataFrame({"request": [f"{day}-{i // 4}" for i in range(n)], "position": np.arange(n) % 4 + 1})
    frame["item"], frame["click"] = np.arange(n), (rng.random(n) < 0.6 / frame["position"]).astype(int)
    return frame.assign(f1=rng.normal(size=n), f2=rng.normal(size=n))


@pytest.mark.parametrize("kind", ["days", "csv"])
def test_a_log_in_a_store_is_read_as_one_on_this_machine(kind, bucket, tmp_path):
    expected = read_log(pd.concat([rows(0), rows(1)]))
    folder = f"{bucket}/{kind}"
    for source, requests in (
        (folder, 120),
        (f"{folder}/date=2026-11-0?", 120),
        (f"{folder}/date=*/part-*", 120),
        ([f"{folder}/date={DAYS[0]}", f"{folder}/date={DAYS[1]}/"], 120),
        (f"{folder}/date={DAYS[1]}", 60),
    ):
        log = read_log(source)
        assert len(log) == requests
        assert np.allclose(log.features, expected.features[-log.rows :])
    assert len(read_log(folder, where=["date = 2026-11-02"])) == 60
    _, batches = read_batches(folder, feature_names=("f1", "f2"), where=["date = 2026-11-02"])
    assert sum(batch.log.rows for batch in batches) == 240
    assert len(read_for_audit(folder)[1]) == 120
    manifest = prepare_lists(folder, tmp_path / "lists", where=["date = 2026-11-02"], segment="date")
    assert manifest.about["requests"] == 60
    assert set(Shards(tmp_path / "lists").read_all().context["segment"].to_pylist()) == {"2026-11-02"}
    with pytest.raises(DataError, match="no such file or folder; check the URL"):
        read_log(f"{bucket}/nothing")
    with pytest.raises(DataError, match="no file matches this pattern"):
        read_log(f"{bucket}/days/*.csv")


def test_outputs_in_a_store_are_complete_or_absent(bucket, tmp_path):
    for content in ("one", "two"):
        with atomic_path(f"{bucket}/out/lists", overwrite=content == "two", folder=True) as folder:
            (folder / "train").mkdir()
            (folder / "train" / f"{content}.parquet").write_text(content)
            (folder / "lists.json").write_text(content)
    found = stores.fetched(f"{bucket}/out/lists")
    assert sorted(path.name for path in found.rglob("*.*")) == ["lists.json", "two.parquet"]
    exists = r"s3://logs/out/lists: output exists already; .*--overwrite"
    with pytest.raises(OutputError, match=exists), atomic_path(f"{bucket}/out/lists", folder=True):
        pass
    with pytest.raises(RuntimeError, match="stop"), atomic_path(f"{bucket}/out/half.txt") as path:
        path.write_text("half")
        raise RuntimeError("stop")
    assert stores.find(f"{bucket}/out/half.txt") is None
    with pytest.raises(OutputError, match="the URL names no file or folder"), atomic_path("s3://logs", folder=True):
        pass
    absent = r"the store cannot be used \(.*AWS_ENDPOINT_URL"
    with pytest.raises(OutputError, match=absent), atomic_path("s3://no-such-bucket/log.txt") as path:
        path.write_text("x")


def test_commands_read_and_write_in_a_store(ultr, bucket, own_cache, tmp_path):
    days = f"{bucket}/days"
    done = ultr("prepare", days, "--out", f"{bucket}/lists", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["about"]["requests"] == 120
    done = ultr("bias", days, "--where", "date >= 2026-11-01", "--out", f"{bucket}/bias", "--bootstrap", 10)
    assert done.returncode == 0, done.stderr
    done = ultr("train", f"{bucket}/lists", "--out", f"{bucket}/run", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "s3://logs/run" in done.stderr
    done = ultr("score", f"{bucket}/run", days, "--out", f"{bucket}/scores.parquet")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(stores.fetched(f"{bucket}/scores.parquet")).num_rows == 480
    for data in (days, f"{bucket}/lists"):
        done = ultr("evaluate", f"{bucket}/run", "--data", data, "--json")
        assert done.returncode == 0, done.stderr
    assert list((own_cache / "runs").glob("*")) == []
    done = ultr("train", days, "--out", f"{bucket}/run", *SMALL)
    assert (done.returncode, "output exists already" in done.stderr) == (1, True)


def test_other_stores_are_read_through_fsspec():
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    with memory.open("/logs/date=2026-11-01/log.csv", "w") as file:
        rows(0).to_csv(file, index=False)
    assert len(read_log("memory://logs", where=["date < 2026-12-01"])) == 60
    with pytest.raises(DataError, match="this kind of URL is not supported, got https://x; use one of file://, s3://"):
        read_log("https://x/log.csv")


def test_the_files_that_say_that_a_folder_is_complete_are_sent_last(tmp_path):
    """A run of two rankers has the models of both in folders, which are sent before the model of their sum."""
    fsspec = pytest.importorskip("fsspec")
    names = ["config.json", "model/model.json", "fits/mlp/model/model.json", "outcome/a"]
    for name in names:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(name)
    stores.send(tmp_path / "run", "memory://order/run", last=stores.COMPLETE)
    store = fsspec.filesystem("memory")
    created = {name: store.created(f"/order/run/{name}") for name in names}
    assert sorted(names, key=created.get) == [
        "config.json",
        "outcome/a",
        "fits/mlp/model/model.json",
        "model/model.json",
    ]


# --- Every command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(bucket, tmp_path_factory):
    """A run in the store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ULTR_CACHE", str(tmp_path_factory.mktemp("cache")))
        options = {"ranker": "mlp", "steps": 5, "label": "click", "bias_steps": 5, "hidden": [4]}
        train(f"{bucket}/days", f"{bucket}/first", **options)
    return f"{bucket}/first"


OPEN = ["--min-evidence", 0, "--allow", "all", "--gate", 0.999999]  # for logs of a few requests
COMPARED = [
    "--methods",
    "pointwise,pal-click",
    "--seeds",
    2,
    "--lrs",
    "0.1",
    "--steps",
    3,
    "--jobs",
    1,
    "--set",
    "bias_steps=5",
]


def stored_names(url):
    return sorted(file.url[len(url) + 1 :] for file in stores.files_below(stores.find(url)))


def test_an_update_in_a_store_is_complete_or_absent(ultr, run, bucket, own_cache, monkeypatch):
    command = ["update", run, "--log", f"{bucket}/days", "--out", f"{bucket}/second", *OPEN, "--steps", 3]
    sends, content = stores._write, {}

    def cut(filesystem, url, target, file=None):
        if file is not None and file.name == "config.json":
            raise KeyboardInterrupt
        sends(filesystem, url, target, file)

    monkeypatch.setattr(stores, "_write", cut)
    assert ultr(*command).returncode == 130
    monkeypatch.setattr(stores, "_write", sends)
    assert stores.SENDING in stored_names(f"{bucket}/second")
    done = ultr("score", f"{bucket}/second", f"{bucket}/days", "--out", f"{bucket}/no.parquet")
    assert "it is being written, or the command that wrote it was stopped" in done.stderr
    for again in (False, True):
        done = ultr(*command, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run"] == f"{bucket}/second"
        assert "model/model.json" in stored_names(f"{bucket}/second")
        assert stores.SENDING not in stored_names(f"{bucket}/second")
        content[again] = stores.stored_files(f"{bucket}/second")
        assert list((own_cache / "runs").glob("*")) == []
    assert content[True] == content[False]  # nothing was written again
    done = ultr(*command[:-1], 4)
    assert (done.returncode, f"{bucket}/second: output exists already" in done.stderr) == (1, True), done.stderr
    assert ultr(*command[:-1], 4, "--overwrite").returncode == 0
    assert stores.stored_files(f"{bucket}/second") != content[True]


def test_a_rejected_update_is_next_to_its_output_in_the_store(ultr, run, bucket, own_cache, monkeypatch):
    def reject(run, data, out, **options):
        result = update_run(run, data, out, **options)
        return replace(result, run=out.rename(out.with_name(f"{out.name}{update.CANDIDATE}")), status="worse")

    update_run = update.update_run
    monkeypatch.setattr(update, "update_run", reject)
    done = ultr("update", run, "--log", f"{bucket}/days", "--out", f"{bucket}/worse", *OPEN, "--steps", 3)
    assert (done.returncode, f"the new run is in {bucket}/worse.candidate" in done.stderr) == (3, True), done.stderr
    assert "model/model.json" in stored_names(f"{bucket}/worse.candidate")
    assert stores.find(f"{bucket}/worse") is None


def test_pages_tables_and_models_are_written_to_a_store(ultr, run, bucket, own_cache):
    for command in (
        ["report", run, "--out", f"{bucket}/report.html"],
        ["export", run, "--out", f"{bucket}/exported"],
        ["explore", f"{bucket}/days", "--out", f"{bucket}/swaps.csv"],
        ["compare", f"{bucket}/days", *COMPARED, "--out", f"{bucket}/compared"],
    ):
        done = ultr(*command)
        assert done.returncode == 0, done.stderr
        assert f"wrote {bucket}/" in done.stderr
        out = command[command.index("--out") + 1]
        assert stores.find(out) is not None
        if command[0] != "compare":
            done = ultr(*command)
            assert (done.returncode, f"{out}: output exists already" in done.stderr) == (1, True), done.stderr
    assert "comparison.json" in stored_names(f"{bucket}/compared")


def test_a_served_model_of_a_store_is_replaced(run, bucket, own_cache, tmp_path):
    served_module = pytest.importorskip("ultr.serving.http.served")
    url, said = f"{bucket}/live", list[str]()
    stores.send(stores.fetched(run), url, last=stores.COMPLETE)
    served = served_module.Served(url, say=lambda text, *_: said.append(text))
    first = served.scorer.version
    served.reload()
    assert said == []
    train(f"{bucket}/days", tmp_path / "newer", ranker="mlp", steps=5, label="click", bias_steps=5, hidden=[4], seed=1)
    filesystem, base = stores._place(url)
    stores._write(filesystem, url, f"{base}/{stores.SENDING}")
    served.reload()  # a model that is being sent is not read
    assert said == [f"{url} has no model now; still serving version {first}"]
    stores.send(tmp_path / "newer", url, last=stores.COMPLETE)
    served.reload()
    assert said[1:] == [f"now serving version {served.scorer.version} in place of {first}"]
    with pytest.raises(DataError, match=rf"{bucket}/nothing: no such file or folder"):
        served_module.Served(f"{bucket}/nothing")
    with pytest.raises(DataError, match=rf"{bucket}/days: there is no model here"):
        served_module.Served(f"{bucket}/days")


# --- Broken URLs, and stores that do not answer -----------------------------------------------------------------------


def test_a_password_in_the_url_of_a_store_is_an_error_since_runs_record_urls():
    with pytest.raises(OptionError, match=r"must not have a password, got 's3://\*\*\*@logs/x'; set the environment"):
        check_output("s3://key:secret@logs/x", overwrite=False)
    assert stores.as_url("abfss://container@account.dfs.core.windows.net/x")
    assert stores.as_url("http://anna:word@host/x")  # a tracking server


@pytest.mark.parametrize("url", ["s3:/bucket/x", "s3:bucket/x", "s3:///x", "gs:/bucket/x", "s3://"])
def test_a_mistyped_url_never_becomes_a_folder(url, ultr, tmp_path, monkeypatch, own_cache):
    monkeypatch.chdir(tmp_path)
    rows(0).to_csv("log.csv", index=False)
    for command in (
        ["update", "run", "--log", "log.csv", "--out", url],
        ["update", url, "--log", "log.csv", "--out", "run"],
        ["train", "log.csv", "--out", url],
        ["train", url, "--out", "run"],
        ["prepare", "log.csv", "--out", url],
        ["prepare", "log.csv", "--append", url],
        ["bias", "log.csv", "--out", url],
        ["report", "run", "--out", f"{url}/x.html"],
        ["score", "run", "log.csv", "--out", f"{url}/x.csv"],
        ["explore", "log.csv", "--out", url],
        ["judgments", "log.csv", "--out", f"{url}/x.csv"],
        ["simulate", "synthetic", "--out", f"{url}/x.parquet"],
        ["compare", "log.csv", "--methods", "pointwise", "--out", url],
        ["export", "run", "--out", url],
        ["serve", url],
    ):
        done = ultr(*command)
        assert (done.returncode, "this is not a complete URL" in done.stderr) == (2, True), (command, done.stderr)
    for command in (["demo", "--out", url], ["reproduce", "table1", "--out", url]):
        assert ultr(*command).returncode == 2, command
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.fixture
def dead_store(request, monkeypatch):
    """A store that refuses connections, never answers, or closes each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if request.param == "refuses":
        listener.close()
    elif request.param == "closes":

        def close_all():
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                return

        threading.Thread(target=close_all, daemon=True).start()
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in {**names, "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 1)
    stores._filesystem.cache_clear()
    yield
    listener.close()
    stores._filesystem.cache_clear()


@pytest.mark.parametrize("dead_store", ["refuses", "is silent", "closes"], indirect=True)
def test_a_store_that_does_not_answer_is_a_network_error(ultr, dead_store, tmp_path):
    start = time.monotonic()
    done = ultr("describe", "s3://dead/log.parquet")
    assert (done.returncode, "the connection failed" in done.stderr) == (4, True), done.stderr
    assert time.monotonic() - start < 20
    rows(0).to_csv(tmp_path / "log.csv", index=False)
    done = ultr("bias", tmp_path / "log.csv", "--out", "s3://dead/bias")  # found before the work starts
    assert (done.returncode, "the connection failed" in done.stderr) == (4, True), done.stderr


@pytest.fixture
def cut_store(server, bucket, monkeypatch):
    """The store behind a relay that is cut after a number of bytes; return the relay's counter."""
    listener, left, pairs = socket.create_server(("127.0.0.1", 0)), [1 << 40], []
    host, port = server.removeprefix("http://").split(":")

    def forward(source, target):
        try:
            while (content := source.recv(1 << 16)) and left[0] > 0:
                left[0] -= len(content)
                target.sendall(content)
        except OSError:
            pass
        for each in (source, target):
            each.close()

    def accept():
        try:
            while True:
                client = listener.accept()[0]
                if left[0] <= 0:
                    client.close()
                    continue
                store = socket.create_connection((host, int(port)))
                pairs.append((client, store))
                for pair in ((client, store), (store, client)):
                    threading.Thread(target=forward, args=pair, daemon=True).start()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 1)
    stores._filesystem.cache_clear()
    yield left
    listener.close()
    for pair in pairs:
        for each in pair:
            each.close()
    stores._filesystem.cache_clear()


@pytest.mark.parametrize("command", ["train", "prepare", "bias --engine duckdb", "score"])
def test_a_connection_that_is_cut_is_a_network_error(command, ultr, run, cut_store, bucket, own_cache, tmp_path):
    large = f"{bucket}/large-{command.split()[0]}.parquet"
    with atomic_path(large) as path:
        pq.write_table(pa.Table.from_pandas(rows(0, 50_000)), path)
    name, *options = command.split()
    source = [stores.fetched(run), large] if name == "score" else [large]
    cut_store[0] = 1_000_000  # bytes of several
    done = ultr(name, *source, *options, "--out", tmp_path / "out.parquet")
    assert (done.returncode, "the connection failed" in done.stderr) == (4, True), done.stderr
    assert "Parquet (" not in done.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_an_output_is_checked_before_the_work(bucket, tmp_path):
    with pytest.raises(OutputError, match=r"s3://no-such-bucket/x: the store cannot be used"):
        stores.check_writable("s3://no-such-bucket/x", overwrite=False, folder=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write into .*file \(it is not a folder\)"):
        check_output(tmp_path / "file" / "out", overwrite=False)
    with pytest.raises(OptionError, match="this is not a complete URL, got 's3:/x'; write two slashes"):
        check_output("s3:/x", overwrite=False)
    assert NetworkError("x").exit_code == 4
