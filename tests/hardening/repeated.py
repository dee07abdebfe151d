"""Do work in another process and print digests of its files: `python repeated.py FOLDER NAME ...`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ultr.bias.audit import audit
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.log import Log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.training.compare import compare
from ultr.training.config import RunConfig, TrainingOptions, with_training
from ultr.training.run import run_training

LOG = Path("log.parquet")
TRAINING = TrainingOptions(steps=6, bias_steps=6, batch=16, evaluate_every=3, device="cpu")
CONFIG = RunConfig(data=str(LOG), ranker_options={"hidden": [8], "dropout": 0.1}, training=TRAINING)
TREES = {"ranker_options": {"min_data_in_leaf": 5}, "ranker": "lightgbm"}


def shown_log() -> Log:
    rng = np.random.default_rng(7)
    requests, items = 120, 6
    rows = requests * items
    shown = Log(
        features=rng.normal(size=(rows, 5)).astype(np.float32),
        offsets=np.arange(0, rows + 1, items),
        request_ids=pa.array([f"r{i}" for i in range(requests)]),
        feature_names=tuple("abcde"),
        positions=np.tile(np.arange(1, items + 1), requests),
        relevance=rng.integers(0, 5, rows).astype(np.float32),
    )
    return replace(simulate_log(shown, User(max_grade=4), seed=1)[0], relevance=None)


def digest(path: Path) -> str:
    """Return a digest of the names and contents of all files below a folder."""
    sha = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.suffix != ".lock" and p.name != ".lock"):
        sha.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    return sha.hexdigest()


def network(out: Path) -> None:
    run_training(CONFIG, out)


def users(out: Path) -> None:
    """Train on users who are simulated at each step."""
    config = replace(CONFIG, data="synthetic", users="pbm", ranker_options={"hidden": [8]}, select="ndcg@10")
    run_training(config, out)


def lightgbm(out: Path) -> None:
    run_training(replace(CONFIG, **TREES), out)


def xgboost(out: Path) -> None:
    run_training(replace(CONFIG, ranker="xgboost", ranker_options={}), out)


def simulated(out: Path) -> None:
    data = load_dataset("synthetic")
    log = simulate_log(show(data.train, ranking_svm(data.train)(data.train.features)), User(), sessions=300, seed=2)[0]
    write_log(log, out / "log.parquet")


def prepared(out: Path, threads: int = 1) -> None:
    prepare_lists(LOG, out, threads=threads)


def streamed(out: Path, workers: int = 1) -> None:
    if not Path("lists").is_dir():
        prepare_lists(LOG, "lists", threads=1)
    run_training(replace(CONFIG, data="lists", stream="yes", workers=workers), out)


def bias(out: Path) -> None:
    from ultr.log import read_log

    out.mkdir()
    (out / "bias.json").write_text(json.dumps(audit(read_log(LOG), bootstrap=20).to_json()))


def compared(out: Path, jobs: int = 1) -> None:
    config = with_training(replace(CONFIG, ranker="linear", ranker_options={}), steps=4)
    compare(config, ["pointwise", "pairwise-em"], out, seeds=2, rates=[0.05, 0.1], jobs=jobs)


WORK = {work.__name__: work for work in (network, users, lightgbm, xgboost, simulated, prepared, streamed, bias)}


def main(folder: str, *names: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    for name in names:
        WORK[name](Path(name))
    print(json.dumps({name: digest(Path(name)) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
