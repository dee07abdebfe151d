"""Check that a seed gives the same bits: again, in another process, and with other numbers of threads and workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hardening import repeated
from hardening.repeated import CONFIG, LOG, WORK, digest
from ultr.log import read_log, write_log
from ultr.methods import METHODS
from ultr.training.run import run_training


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A temporary working folder with a log, so that relative paths are the same in every process."""
    monkeypatch.chdir(tmp_path)
    write_log(repeated.shown_log(), LOG)
    return tmp_path


def elsewhere(folder: Path, names: list[str], hash_seed: int) -> dict[str, str]:
    """Return digests of the work of another process, with another hash seed for sets and dicts."""
    folder.mkdir()
    shutil.copy(LOG, folder)
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, repeated.__file__, str(folder), *names],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    digests: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return digests


def again(name: str) -> tuple[str, str]:
    for number in (1, 2):
        WORK[name](Path(f"{name}-{number}"))
    return digest(Path(f"{name}-1")), digest(Path(f"{name}-2"))


def test_a_network_has_the_same_bits_again_and_in_another_process(tmp_path):
    first, second = again("network")
    assert first == second
    assert elsewhere(tmp_path / "elsewhere", ["network"], 4321) == {"network": first}
    run_training(CONFIG.with_options(seed=1), "other")
    assert digest(Path("other") / "model") != digest(Path("network-1") / "model")


def test_lists_do_not_depend_on_threads_or_the_order_of_rows():
    for threads in (1, 4):
        repeated.prepared(Path(f"threads-{threads}"), threads=threads)
    log = read_log(LOG).to_table()
    shuffled = log.take(np.random.default_rng(0).permutation(len(log)))
    pq.write_table(shuffled, LOG)
    repeated.prepared(Path("shuffled"), threads=2)
    shards = [sorted(p.name for p in Path(name, "train").iterdir()) for name in ("threads-1", "threads-4", "shuffled")]
    assert shards[0] == shards[1] == shards[2]
    assert digest(Path("threads-1")) == digest(Path("threads-4"))
    for split in ("train", "validation", "test"):
        assert digest(Path("threads-1", split)) == digest(Path("shuffled", split))


def test_batches_do_not_depend_on_the_number_of_workers():
    for workers in (1, 3):
        repeated.streamed(Path(f"workers-{workers}"), workers=workers)
    for part in ("model", "outcome", "metrics.jsonl", "bias.json"):
        one, three = Path("workers-1", part), Path("workers-3", part)
        assert (digest(one) == digest(three)) if one.is_dir() else (one.read_bytes() == three.read_bytes()), part


def test_simulated_users_do_the_same_again(tmp_path):
    first, second = again("simulated")
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("name", WORK)
def test_all_work_has_the_same_bits_again_and_in_another_process(name, tmp_path):
    first, second = again(name)
    assert first == second
    for hash_seed in (0, 4321):
        assert elsewhere(tmp_path / f"elsewhere-{hash_seed}", [name], hash_seed) == {name: first}


@pytest.mark.long
def test_a_comparison_does_not_depend_on_the_number_of_jobs():
    for jobs in (1, 2):
        repeated.compared(Path(f"jobs-{jobs}"), jobs=jobs)
    one, two = (json.loads(Path(f"jobs-{jobs}", "comparison.json").read_text()) for jobs in (1, 2))
    assert one == two
    runs = sorted(p.relative_to("jobs-1") for p in Path("jobs-1/runs").rglob("weights.safetensors"))
    assert len(runs) > 4
    for run in runs:
        assert Path("jobs-1", run).read_bytes() == Path("jobs-2", run).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_the_same_bits_again(method):
    config = CONFIG.with_options(method=method, select="feedback-ndcg@10")
    for number in (1, 2):
        run_training(config, f"run-{number}")
    assert digest(Path("run-1")) == digest(Path("run-2"))
