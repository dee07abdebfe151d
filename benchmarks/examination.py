"""Measure how well examination is recovered: the largest relative error of θ_k/θ_1, by data set, order and seed.

    python benchmarks/examination.py [--data synthetic,ml-1m] [--seeds 5] [--sessions 768000]

Lists are in the order of a Ranking-SVM trained on 1% of the requests, or in random order. Users are position-based.
The baseline is the error of θ estimated by ratios of click rates.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch

from ultr.bias.examination import estimate_examination
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User
from ultr.log.labels import Label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="data sets, separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="runs per data set and order")
    parser.add_argument("--sessions", type=int, default=768_000, help="simulated sessions per run")
    options = parser.parse_args()
    for name in options.data.split(","):
        data = load_dataset(name)
        user = User(max_grade=data.max_grade)
        for order in ("Ranking-SVM", "random"):
            errors: list[float] = []
            naive: list[float] = []
            for seed in range(options.seeds):
                rng = np.random.default_rng(seed)
                scores = ranking_svm(data.train, seed=seed)(data.train.features)
                log = show(data.train, scores if order != "random" else rng.random(data.train.rows).astype(np.float32))
                estimate = estimate_examination(
                    replace(log, weights=None), Label(), user=user, sessions=options.sessions, seed=seed
                )
                truth = user.theta(torch.tensor(estimate.positions)).numpy()
                rates = estimate.clicks / estimate.impressions
                for results, theta in ((errors, estimate.theta), (naive, rates)):
                    results.append(float(np.abs(theta / theta[0] / (truth / truth[0]) - 1).max()))
            each = " ".join(f"{error:.1%}" for error in errors)
            print(f"{name}, {order} order: error {np.mean(errors):.1%} ({each}); of click rates {np.mean(naive):.1%}")


if __name__ == "__main__":
    main()
