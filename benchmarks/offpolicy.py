"""How well a log tells rankers apart: order, coverage and the loss of choosing by each estimator of `ultr.offpolicy`.

    python benchmarks/offpolicy.py [--replications 100] [--sessions 12000] [--label click] [--bootstrap 0]

Position-based users see lists in the order of a Ranking-SVM on 1% of the requests. θ, with a bootstrap, and the direct
model come from one half of the sessions, values from the other. Three rankers re-rank what was shown: `much`, a
Ranking-SVM on all requests, `little`, one on another 1%, and `noisy`, the first with three times its spread of noise.
The truth is the exact expected reward over all lists. Of each estimator it prints as JSON, of all replications:

- `order`: how often the three stand as in truth; `loss`: of true reward by taking the one that it puts first, mean in %
- `covered`: how often the truth is in the 95% interval; `pairs`: the same of differences, and how often these are
  significant, rightly and wrongly
- `bias`, `deviation`, `half_width` of the interval: in % of the truth
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import combinations

import numpy as np
import torch

from ultr.datasets import load_dataset, ranking_svm, show
from ultr.evaluation import evaluate_scores
from ultr.examination import logging_score, strata_of
from ultr.labels import DEFAULT_LABEL, Label
from ultr.log import Log
from ultr.offpolicy import CLIP, ESTIMATORS, OffPolicyValue, compare_values, fit_direct, off_policy_value
from ultr.propensity.counts import counted, impressions, replicates
from ultr.propensity.estimators import position_based
from ultr.simulate import User, make_user, simulate_log

METRIC = "reward@10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--label", default=DEFAULT_LABEL)
    parser.add_argument("--replications", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=12_000, help="of a replication, half of them for θ")
    parser.add_argument("--bootstrap", type=int, default=20, help="replicates of θ")
    parser.add_argument("--clip", type=float, default=CLIP)
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
    logged = logging_score(shown).score  # from the lists alone, and so the same in every replication
    seeds = range(options.first_seed, options.first_seed + options.replications)
    found = [_replication(shown, rankers, logged, user, options, seed) for seed in seeds]
    report = {estimator: _judged([each[estimator] for each in found], truth) for estimator in ESTIMATORS}
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({**vars(options), "seconds": seconds, "truth": truth, **report}, indent=1))


def _rankers(train: Log, shown: Log) -> dict[str, np.ndarray]:
    """Scores of the rows that were shown."""
    much = ranking_svm(train, share=1.0)(shown.features)
    little = ranking_svm(train, share=0.01, seed=1)(shown.features)
    noise = np.random.default_rng(0).standard_normal(shown.rows)
    return {"much": much, "little": little, "noisy": much + 3 * much.std() * noise}


def _replication(
    shown: Log, rankers: dict[str, np.ndarray], logged: np.ndarray, user: User, options: argparse.Namespace, seed: int
) -> dict[str, dict[str, OffPolicyValue]]:
    """The value of each ranker by each estimator, from users of lists drawn at random."""
    drawn = np.random.default_rng(seed).integers(len(shown), size=options.sessions)
    log = simulate_log(shown.select(drawn), user, seed=seed)[0]
    rows = np.arange(log.rows) + np.repeat(shown.offsets[drawn] - log.offsets[:-1], log.lengths)
    half = np.arange(options.sessions) < options.sessions // 2
    first, second = log.select(half), log.select(~half)
    theta, *others = _theta(first, logged[rows[: first.rows]], options.label, options.bootstrap, seed)
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
                replicates=others,
            )
            for name, scores in rankers.items()
        }
        for estimator in ESTIMATORS
    }


def _theta(log: Log, logged: np.ndarray, label: str, number: int, seed: int) -> list[dict[int, float]]:
    """θ by strata of the logging score, the estimator of `estimate_examination`, and its bootstrap replicates."""
    clicked = np.asarray(Label(label)(log.actions)) > 0
    seen = impressions(log, clicked, seed=seed)
    counts = counted(seen, strata_of(log, logged, clicks=float(clicked.sum())).numpy())
    draws = position_based(counts, replicates(int(seen.group.max()) + 1, number, seed=seed))
    return [dict(zip(seen.positions.tolist(), draw.tolist(), strict=True)) for draw in draws]


def _judged(found: list[dict[str, OffPolicyValue]], truth: dict[str, float]) -> dict[str, object]:
    values = {name: np.array([each[name].value for each in found]) for name in truth}
    widths = {name: np.array([each[name].high - each[name].value for each in found]) for name in truth}
    orders = np.argsort([values[name] for name in truth], axis=0).T
    right = np.argsort(list(truth.values()))
    chosen = np.array(list(truth.values()))[orders[:, -1]]
    pairs = {}
    for a, b in combinations(truth, 2):
        tests, difference = [compare_values(each[a], each[b]) for each in found], truth[a] - truth[b]
        sure = [test.difference * difference > 0 for test in tests if test.significant]
        covered = sum(test.low <= difference <= test.high for test in tests)
        pairs[f"{a} - {b}"] = {"covered": covered, "rightly": sum(sure), "wrongly": len(sure) - sum(sure)}

    def percent(figures: dict[str, np.floating]) -> dict[str, float]:
        return {name: round(100 * float(figure) / truth[name], 2) for name, figure in figures.items()}

    return {
        "order": int((orders == right).all(1).sum()),
        "covered": {name: int((np.abs(values[name] - truth[name]) <= widths[name]).sum()) for name in truth},
        "pairs": pairs,
        "loss": round(100 * float((max(truth.values()) - chosen).mean() / max(truth.values())), 3),
        "bias": percent({name: values[name].mean() - truth[name] for name in truth}),
        "deviation": percent({name: values[name].std() for name in truth}),
        "half_width": percent({name: widths[name].mean() for name in truth}),
        "effective_clicks": round(float(np.mean([v.effective_clicks for each in found for v in each.values()]))),
        "clipped": round(float(np.mean([v.clipped for each in found for v in each.values()])), 3),
    }


if __name__ == "__main__":
    main()
