"""The demo: generate data, simulate users with position bias, and show its cost for rankers trained on their log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User, simulate_log
from ultr.evaluation.off_policy import request_metrics
from ultr.log import Log, write_log
from ultr.log.labels import DEFAULT_LABEL
from ultr.log.table import by_position
from ultr.rankers.model import load_model
from ultr.training.config import make_config
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json


@dataclass(frozen=True, eq=False)
class Demo:
    """A simulated log, with examination, clicks, apparent relevance and true relevance by position."""

    log: Log
    positions: np.ndarray
    examined: np.ndarray  # share of items that users looked at; a real log does not have it
    clicked: np.ndarray  # share of items that were clicked
    looks: np.ndarray  # click rate relative to the first position: the apparent relevance
    truth: np.ndarray  # mean probability of relevance, relative to the first position

    @property
    def overstated(self) -> float:
        """The factor by which clicks overstate the fall of relevance from the first position to the last."""
        return float(self.truth[-1] / self.looks[-1])


def run_demo(out: Path, *, sessions: int = 6000, seed: int = 0) -> Demo:
    """Generate data, rank it with a Ranking-SVM trained on 1% of it, simulate users, and write log.parquet to `out`."""
    data = load_dataset("synthetic")
    initial = ranking_svm(data.train, seed=seed)
    user = User(max_grade=data.max_grade)
    log, feedback = simulate_log(show(data.train, initial(data.train.features)), user, seed=seed, sessions=sessions)
    written = replace(log, relevance=None)
    write_log(written, out / "log.parquet", overwrite=True)
    attracted = user.attracted(torch.from_numpy(log.true_relevance)).numpy()
    table = by_position(log)
    place = np.searchsorted(table.positions, np.asarray(log.positions))
    relevant = np.bincount(place, attracted) / table.impressions
    clicked = table.rates["click"]
    return Demo(
        log=written,
        positions=table.positions,
        examined=np.bincount(place, feedback.examined.numpy()) / table.impressions,
        clicked=clicked,
        looks=clicked / clicked[0],
        truth=relevant / relevant[0],
    )


@dataclass(frozen=True)
class DemoResult:
    """The metrics of a ranker on test requests, by true labels."""

    name: str
    ndcg: float
    reward: float


@dataclass(frozen=True, eq=False)
class Learned:
    """The metrics of rankers, the examination that pairwise-em estimated, and the run directories."""

    results: list[DemoResult]  # logging ranker, uncorrected, corrected, trained without position bias
    theta: np.ndarray  # estimated examination by position, relative to the first
    true_theta: np.ndarray
    runs: list[Path]


def run_learning(out: Path, *, seed: int = 0, steps: int = 300) -> Learned:
    """Train rankers with and without bias correction, and on feedback without position bias; evaluate them on test."""
    data = load_dataset("synthetic")
    user = User(max_grade=data.max_grade)

    def evaluate(name: str, scores: np.ndarray) -> DemoResult:
        metrics = request_metrics(data.test, ["ndcg@10", "reward@10"], user=user, label=DEFAULT_LABEL)(scores)
        return DemoResult(name, float(metrics["ndcg@10"].mean()), float(metrics["reward@10"].mean()))

    results = [evaluate("the logging ranker", ranking_svm(data.train, seed=seed)(data.test.features))]
    base = make_config("synthetic", users="pbm", ranker="mlp", hidden=(64, 32), select="ndcg@10", device="cpu")
    base = base.with_options(steps=steps, bias_steps=1000, batch=128, lr=0.05, seed=seed)
    runs = []
    for name, method, learn_from in (
        ("LambdaRank on the feedback", "lambdarank", "feedback"),
        ("pairwise-em on the feedback", "pairwise-em", "feedback"),
        ("LambdaRank on unbiased feedback", "lambdarank", "no-bias"),
    ):
        config = base.with_options(method=method, learn_from=learn_from)
        runs.append(run_training(config, out / f"run-{method}-{learn_from}", overwrite=True))
        results.append(evaluate(name, load_model(runs[-1]).score(data.test)))
    bias = read_json(out / "run-pairwise-em-feedback" / "bias.json")
    theta, truth = np.array(bias["theta"]), user.theta(torch.tensor(bias["positions"])).numpy()
    return Learned(results, theta / theta[0], truth / truth[0], runs)
