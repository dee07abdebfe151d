"""Logs, lists, runs and scores in an object store: a server on this machine that speaks the protocol of S3."""

from __future__ import annotations

import json
import logging

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from ultr.errors import DataError, OutputError
from ultr.log import read_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.readers import read_batches
from ultr.log.sampling import read_for_audit
from ultr.log.shards import Shards
from ultr.utils import stores
from ultr.utils.files import atomic_path

DAYS = ("2026-11-01", "2026-11-02")


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
    small = ["--ranker", "mlp", "--steps", 5, "--label", "click", "--set", "bias_steps=5", "--set", "hidden=4"]
    done = ultr("train", f"{bucket}/lists", "--out", f"{bucket}/run", *small)
    assert done.returncode == 0, done.stderr
    assert "s3://logs/run" in done.stderr
    done = ultr("score", f"{bucket}/run", days, "--out", f"{bucket}/scores.parquet")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(stores.fetched(f"{bucket}/scores.parquet")).num_rows == 480
    for data in (days, f"{bucket}/lists"):
        done = ultr("evaluate", f"{bucket}/run", "--data", data, "--json")
        assert done.returncode == 0, done.stderr
    assert list((own_cache / "runs").glob("*")) == []
    done = ultr("train", days, "--out", f"{bucket}/run", *small)
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
