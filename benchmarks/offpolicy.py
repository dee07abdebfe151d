"""Compare off-policy estimators on simulated logs: order of rankers, coverage, and the loss of selecting by each.

    python benchmarks/offpolicy.py [--replications 100] [--sessions 12000] [--label click] [--bootstrap 0]

Position-based users see lists in the order of a Ranking-SVM trained on 1% of the requests. Half of the sessions
estimate θ, with a bootstrap, and the direct model; the other half estimates the value of three rankers, which re-rank
the shown items. `much` is a Ranking-SVM on all requests, `little` is one on another 1%, and `noisy` is the first plus
noise of three times its standard deviation. The truth is the exact expected reward over all lists. For each estimator,
the output has these results over all replications, as JSON:

- `order`: how often the three rankers are in the true order
- `loss`: the mean loss of true reward, in %, if the ranker with the highest estimate is selected
- `covered`: how often the 95% interval contains the truth
- `pairs`: the same for differences of two rankers, and how often these are significant with the right or wrong sign
- `bias`, `deviation`, `half_width` of the interval: in % of the truth
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import combinations

import numpy as np
import torch

from ultr.bias.counts import counted, impressions, replicates
from ultr.bias.estimators import position_based
from ultr.bias.logging_policy import logging_score, strata_of
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User, make_user, simulate_log
from ultr.evaluation.off_policy import CLIP, ESTIMATORS, OffPolicyValue, compare_values, fit_direct, off_policy_value
from ultr.evaluation.scores import evaluate_scores
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label

METRIC = "reward@10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="a data set with true labels")
    parser.add_argument("--label", default=DEFAULT_LABEL, help="the label, an expression of actions")
    parser.add_argument("--replications", type=int, default=100, help="simulated logs")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first log")
    parser.add_argument("--sessions", type=int, default=12_000, help="sessions per log, half of them for θ")
    parser.add_argument("--bootstrap", type=int, default=20, help="bootstrap replicates of θ")
    parser.add_argument("--clip", type=float, default=CLIP, help="the largest inverse propensity")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    data = load_dataset(options.data)
    user = make_user("pbm", max_grade=data.max_grade)
    shown = show(data.train, ranking_svm(data.train)(data.train.features))
    rankers = _rankers(data.train, shown)
    truth = {
        name: float(evaluate_scores(shown, scores, METRIC, user=user, label=options.label)[METRIC].mean())
        for name, scores in rankers.items()
    }
    logged = logging_score(shown).score  # the same in every replication, because it needs no feedback
    seeds = range(options.first_seed, options.first_seed + options.replications)
    replications = [_replication(shown, rankers, logged, user, options, seed) for seed in seeds]
    report = {estimator: _summary([values[estimator] for values in replications], truth) for estimator in ESTIMATORS}
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({**vars(options), "seconds": seconds, "truth": truth, **report}, indent=1))


def _rankers(train: Log, shown: Log) -> dict[str, np.ndarray]:
    """Return the scores of the shown rows, by ranker."""
    much = ranking_svm(train, share=1.0)(shown.features)
    little = ranking_svm(train, share=0.01, seed=1)(shown.features)
    noise = np.random.default_rng(0).standard_normal(shown.rows)
    return {"much": much, "little": little, "noisy": much + 3 * much.std() * noise}


def _replication(
    shown: Log, rankers: dict[str, np.ndarray], logged: np.ndarray, user: User, options: argparse.Namespace, seed: int
) -> dict[str, dict[str, OffPolicyValue]]:
    """Return the value of each ranker by each estimator, from simulated feedback on randomly drawn lists."""
    drawn = np.random.default_rng(seed).integers(len(shown), size=options.sessions)
    log = simulate_log(shown.select(drawn), user, seed=seed)[0]
    rows = np.arange(log.rows) + np.repeat(shown.offsets[drawn] - log.offsets[:-1], log.lengths)
    half = np.arange(options.sessions) < options.sessions // 2
    first, second = log.select(half), log.select(~half)
    theta, *theta_replicates = _theta(first, logged[rows[: first.rows]], options.label, options.bootstrap, seed)
    direct = fit_direct(first, theta=theta, label=options.label)(second)
    return {
        estimator: {
            name: off_policy_value(
                second,
                scores[rows[first.rows :]],
                theta=theta,
                label=options.label,
                estimator=estimator,
                clip=options.clip,
                direct=direct if estimator == "dr" else None,
                replicates=theta_replicates,
            )
            for name, scores in rankers.items()
        }
        for estimator in ESTIMATORS
    }


def _theta(log: Log, logged: np.ndarray, label: str, number: int, seed: int) -> list[dict[int, float]]:
    """Return θ by strata of the logging score, as in `estimate_examination`, and its bootstrap replicates."""
    clicked = np.asarray(Label(label)(log.actions)) > 0
    seen = impressions(log, clicked, seed=seed)
    counts = counted(seen, strata_of(log, logged, clicks=float(clicked.sum())))
    draws = position_based(counts, replicates(int(seen.group.max()) + 1, number, seed=seed))
    return [dict(zip(seen.positions.tolist(), draw.tolist(), strict=True)) for draw in draws]


def _summary(estimates: list[dict[str, OffPolicyValue]], truth: dict[str, float]) -> dict[str, object]:
    """Return the results of one estimator over all replications."""
    values = {name: np.array([each[name].value for each in estimates]) for name in truth}
    widths = {name: np.array([each[name].high - each[name].value for each in estimates]) for name in truth}
    orders = np.argsort([values[name] for name in truth], axis=0).T
    true_order = np.argsort(list(truth.values()))
    chosen = np.array(list(truth.values()))[orders[:, -1]]
    pairs = {}
    for a, b in combinations(truth, 2):
        tests, difference = [compare_values(each[a], each[b]) for each in estimates], truth[a] - truth[b]
        right_sign = [test.difference * difference > 0 for test in tests if test.significant]
        covered, right = sum(test.low <= difference <= test.high for test in tests), sum(right_sign)
        pairs[f"{a} - {b}"] = {"covered": covered, "right sign": right, "wrong sign": len(right_sign) - right}

    def percent(amounts: dict[str, np.floating]) -> dict[str, float]:
        return {name: round(100 * float(amount) / truth[name], 2) for name, amount in amounts.items()}

    return {
        "order": int((orders == true_order).all(1).sum()),
        "covered": {name: int((np.abs(values[name] - truth[name]) <= widths[name]).sum()) for name in truth},
        "pairs": pairs,
        "loss": round(100 * float((max(truth.values()) - chosen).mean() / max(truth.values())), 3),
        "bias": percent({name: values[name].mean() - truth[name] for name in truth}),
        "deviation": percent({name: values[name].std() for name in truth}),
        "half_width": percent({name: widths[name].mean() for name in truth}),
        "effective_clicks": round(float(np.mean([v.effective_clicks for each in estimates for v in each.values()]))),
        "clipped": round(float(np.mean([v.clipped for each in estimates for v in each.values()])), 3),
    }


if __name__ == "__main__":
    main()
