"""The demonstration: generated data, users with position bias, and what that bias costs those who learn from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ultr.checkpoint import read_json
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.labels import DEFAULT_LABEL
from ultr.log import Log, write_log
from ultr.log.summary import by_position
from ultr.models import load_model
from ultr.preparing import RunConfig
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.stages import mean_figures
from ultr.training import TrainingOptions


@dataclass(frozen=True, eq=False)
class Demo:
    """By position: what users examined, what they clicked, how relevant the items were, and how relevant they look."""

    log: Log
    positions: np.ndarray
    examined: np.ndarray  # share of items that were examined, which no log shows
    clicked: np.ndarray  # click rate, which the log shows
    looks: np.ndarray  # click rate relative to the first position: relevance, to a naive reader
    truth: np.ndarray  # the mean chance to be found relevant, relative to the first position

    @property
    def overstated(self) -> float:
        """How many times too large the naive reader finds the gap between the first position and the last."""
        return float(self.truth[-1] / self.looks[-1])


def run_demo(out: Path, *, sessions: int = 6000, seed: int = 0) -> Demo:
    """Generate data, show it ranked by a Ranking-SVM on 1% of it, draw clicks and dwell, and write `log.parquet`."""
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
class Outcome:
    """What a ranker comes to on test requests, by true labels."""

    name: str
    ndcg: float
    reward: float


@dataclass(frozen=True, eq=False)
class Learned:
    """What rankers come to, and what the correction of bias found out about examination."""

    outcomes: list[Outcome]  # the ranker in production, without correction, with it, and without position bias
    theta: np.ndarray  # by position, relative to the first, as learned
    true_theta: np.ndarray
    runs: list[Path]


def run_learning(out: Path, *, seed: int = 0, steps: int = 300) -> Learned:
    """Learn with and without correction of bias, and from feedback without position bias."""
    data = load_dataset("synthetic")
    user = User(max_grade=data.max_grade)

    def outcome(name: str, scores: np.ndarray) -> Outcome:
        figures = mean_figures(data.test, scores, ["ndcg@10", "reward@10"], user=user, label=DEFAULT_LABEL)
        return Outcome(name, figures["ndcg@10"], figures["reward@10"])

    outcomes = [outcome("the ranker that wrote the log", ranking_svm(data.train, seed=seed)(data.test.features))]
    runs = []
    for name, method, learn_from in (
        ("LambdaRank on the feedback", "lambdarank", "feedback"),
        ("pairwise-em on the feedback", "pairwise-em", "feedback"),
        ("LambdaRank, had users seen it all", "lambdarank", "no-bias"),
    ):
        config = RunConfig(
            data="synthetic",
            users="pbm",
            method=method,
            learn_from=learn_from,  # type: ignore[arg-type]
            ranker_options={"hidden": [64, 32]},
            select="ndcg@10",
            training=TrainingOptions(
                steps=steps, bias_steps=1000, batch=128, lr=0.05, evaluate_every=50, seed=seed, device="cpu"
            ),
        )
        runs.append(run_training(config, out / f"run-{method}-{learn_from}", overwrite=True))
        outcomes.append(outcome(name, load_model(runs[-1]).score(data.test)))
    bias = read_json(out / "run-pairwise-em-feedback" / "bias.json")
    theta, truth = np.array(bias["theta"]), user.theta(torch.tensor(bias["positions"])).numpy()
    return Learned(outcomes, theta / theta[0], truth / truth[0], runs)
