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
from ultr.datasets import ranking_svm, show
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import User, simulate_log
from ultr.log import Log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.training.comparing.plan import compare
from ultr.training.config import make_config
from ultr.training.run import run_training

LOG = Path("log.parquet")
FEW = {"network.steps": 6, "network.evaluate_every": 3, "batch": 16, "bias_steps": 6, "rounds": 6}
CONFIG = make_config(str(LOG), ranker="mlp", hidden=(8,), dropout=0.1, device="cpu", **FEW)
LEAVES = {"min_data_in_leaf": 5}


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
    run_training(CONFIG.with_options(data="synthetic", users="pbm", dropout=0.0, select="ndcg@10"), out)


def both(out: Path) -> None:
    """Train a network and trees, and sum them."""
    run_training(CONFIG.with_options(ranker="auto", tree_parameters=LEAVES), out)


def xgboost(out: Path) -> None:
    run_training(CONFIG.with_options(ranker="xgboost"), out)


def simulated(out: Path) -> None:
    shown = make_synthetic(requests=(50, 5, 5)).train
    log = simulate_log(show(shown, ranking_svm(shown, share=1.0)(shown.features)), User(), sessions=300, seed=2)[0]
    write_log(log, out / "log.parquet")


def prepared(out: Path, threads: int = 1) -> None:
    prepare_lists(LOG, out, threads=threads)


def streamed(out: Path, workers: int = 1) -> None:
    if not Path("lists").is_dir():
        prepare_lists(LOG, "lists", threads=1)
    run_training(CONFIG.with_options(data="lists", stream="yes", workers=workers), out)


def bias(out: Path) -> None:
    from ultr.log import read_log

    out.mkdir()
    (out / "bias.json").write_text(json.dumps(audit(read_log(LOG), bootstrap=20).to_json()))


def compared(out: Path, jobs: int = 1) -> None:
    base = CONFIG.with_options(ranker="linear", steps=4)
    compare(base, ["pointwise", "pairwise-em"], out, seeds=2, rates=[0.05, 0.1], jobs=jobs)


WORK = {work.__name__: work for work in (network, users, both, xgboost, simulated, prepared, streamed, bias)}


def main(folder: str, *names: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    for name in names:
        WORK[name](Path(name))
    print(json.dumps({name: digest(Path(name)) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
