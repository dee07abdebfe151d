"""Write a small folder of each kind with this version, which later versions must read.

Run `python tests/hardening/make_golden.py FOLDER` for a new format only. From the first release on, each format has a
new folder, and existing ones stay.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
FEATURES = np.linspace(-2, 2, 36, dtype=np.float32).reshape(12, 3)[:, ::-1]


def make(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conftest import make_shown_log
    from lists_folder import write_lists
    from ultr.datasets.users import User, simulate_log
    from ultr.log import write_log
    from ultr.rankers.model import load_model
    from ultr.serving.export import export_run
    from ultr.training.comparing.plan import compare
    from ultr.training.config import make_config
    from ultr.training.run import run_training

    folder.mkdir(parents=True)
    os.chdir(folder)  # so that the files contain no path of this machine
    log = replace(simulate_log(make_shown_log(40, seed=5), User(max_grade=4), seed=0)[0], relevance=None)
    write_log(log, "log.parquet")
    write_lists(log, Path("lists"))
    few = {"steps": 4, "evaluate_every": 2, "device": "cpu"}
    network = {"bias_steps": 3, "batch": 16}
    run_training(make_config("log.parquet", ranker="mlp", hidden=(4,), **network, **few), "network")
    plain = {"method": "pointwise", "select": "feedback-ndcg@10", **few}
    parameters = {"num_leaves": 3, "min_data_in_leaf": 5}
    run_training(make_config("log.parquet", ranker="lightgbm", tree_parameters=parameters, **plain), "trees")
    export_run("network", "exported")
    linear = make_config("log.parquet", ranker="linear", **network, **plain)
    compare(linear, ["pointwise"], Path("compared"), seeds=1, rates=[0.1], jobs=1)
    scores = {run: load_model(run).score_features(FEATURES).tolist() for run in ("network", "trees")}
    Path("scores.json").write_text(json.dumps(scores))
    for unread in (*Path().glob("*/fits"), Path("compared/runs"), Path("compared/logged")):  # by any test
        shutil.rmtree(unread)
    for lock in Path().rglob(".lock"):
        lock.unlink()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
