"""The days of a platform engineer: a store, a new day each day, and commands that are killed at any moment."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from ultr.log.shards import SPLITS, Shards

DAYS = 7  # about eight minutes on two quiet cores
REQUESTS, ITEMS = 80, 5
ULTR = [sys.executable, "-c", "import sys, torch; torch.set_num_threads(1); from ultr.cli import main; main()"]
SMALL = ["--ranker", "mlp", "--label", "click", "--set", "hidden=4", "--set", "bias_steps=5", "--steps", "5"]

OPEN = ["--gate", "0.999999", "--min-evidence", "0", "--allow", "all"]  # for logs of a few requests


def day(number: int) -> pa.Table:
    rng, rows = np.random.default_rng(number), REQUESTS * ITEMS
    position = np.tile(np.arange(1, ITEMS + 1), REQUESTS)
    columns = {"request": np.repeat(np.arange(REQUESTS) + 1000 * number, ITEMS), "position": position}
    columns |= {"item": rng.integers(0, 40, rows), "f1": rng.normal(size=rows), "f2": rng.normal(size=rows)}
    return pa.table({**columns, "click": (rng.random(rows) < 0.7 / position).astype(int)})


@pytest.fixture
def store(tmp_path):
    """A bucket with the log of a week, and the environment of commands that use it."""
    moto = pytest.importorskip("moto.server", reason="the object store for this test needs: pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "{}:{}".format(*server.get_host_and_port())
    keys = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
    files = pyarrow.fs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True, **keys)
    files.create_dir("week")
    for number in range(1, DAYS + 1):
        pq.write_table(day(number), f"week/log/date=2026-01-0{number}/part-0.parquet", filesystem=files)
    environment = {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "us-east-1"}
    environment |= {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    yield files, {**os.environ, **environment, "PYTHONPATH": ":".join(sys.path)}
    server.stop()


def week(name: str, folder, environment, kills: random.Random | None) -> int:
    """Run the commands of a week, and return how many of them were killed; each of those runs again."""
    bucket, lists, killed = "s3://week", folder / "lists", 0
    log = [f"{bucket}/log/date=2026-01-0{number}" for number in range(1, DAYS + 1)]
    runs = [f"{bucket}/{name}/run{number}" for number in range(1, DAYS + 1)]
    commands = [["prepare", log[0], "--out", str(lists)], ["train", log[0], "--out", runs[0], *SMALL]]
    for number in range(1, DAYS):
        commands.append(["prepare", log[number], "--append", str(lists)])
        commands.append(["update", runs[number - 1], "--log", log[number], "--out", runs[number], *OPEN])
    environment = {**environment, "ULTR_CACHE": str(folder / "cache")}
    seconds = 4.0  # the time of a command, about
    for number, command in enumerate(commands):
        if kills is not None and number > 1:
            running = subprocess.Popen([*ULTR, *command], env=environment, stderr=subprocess.PIPE)
            time.sleep(kills.uniform(0.3, 1) * seconds)
            running.kill()
            running.communicate()
            killed += running.returncode == -9
        began = time.monotonic()
        done = subprocess.run([*ULTR, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        seconds = time.monotonic() - began
    return killed


@pytest.mark.long
def test_days_with_kills_have_the_bits_of_undisturbed_days(store, tmp_path):
    files, environment = store
    for name, kills in (("quiet", None), ("killed", random.Random(0))):  # noqa: S311
        (tmp_path / name).mkdir()
        killed = week(name, tmp_path / name, environment, kills)
    assert killed >= DAYS
    lists = tmp_path / "killed" / "lists"
    found = [name for split in SPLITS for name in Shards(lists, split).read_all().request_ids.to_pylist()]
    expected = [1000 * number + request for number in range(1, DAYS + 1) for request in range(REQUESTS)]
    assert sorted(found) == expected  # each request is there once
    for split in SPLITS:
        quiet = Shards(tmp_path / "quiet" / "lists", split).read_all()
        np.testing.assert_array_equal(Shards(lists, split).read_all().features, quiet.features)
    contents = {}
    for name in ("quiet", "killed"):
        found = files.get_file_info(pyarrow.fs.FileSelector(f"week/{name}/run{DAYS}/model", recursive=True))
        contents[name] = {i.base_name: files.open_input_stream(i.path).read() for i in found if i.is_file}
    assert contents["killed"] == contents["quiet"]
    assert "model.json" in contents["quiet"]
    left = files.get_file_info(pyarrow.fs.FileSelector("week", recursive=True))
    assert [info.path for info in left if ".ultr-" in info.path] == []
