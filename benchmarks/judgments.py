"""Compare judgments from feedback with the relevance grades of a real search log, and their intervals with a truth.

    ULTR_DATA=DATA python benchmarks/judgments.py [--half test] [--bootstrap 1000] [--seeds 20] [--jobs 1]

The log is `clara2`: 998 queries, 10 results, few clicks. No estimate reads its grades. Half of the queries, by a hash,
chose the settings of `ultr judgments` (`--half choose`); the default reports the other half. It is not known who made
the grades, and grade 5 is almost only at position 1, so a part of the agreement with the logged order may be circular.

Scores of each pair of a query and an item, which order the items of a query:

- `judgments`, and with other weights: the relevance of `ultr.judgments`; `predicted`: that of production alone
- `logged`: the mean logged position, the first is best
- `ctr`: clicks over impressions; `coec`: clicks over the clicks that are expected at the positions; `coec-best`: the
  same, with all impressions at the best position of the pair, as OpenSearch computes it
- `pbm`, `ubm`: attraction by EM; `sdbn`: attraction times satisfaction, by counting, each with the prior Beta(1, 1)
  (Chuklin, Markov and de Rijke, Click Models for Web Search, 2015)
- `ultr-pbm`, `ultr-ubm`, `ultr-sdbn`: the same models with a normal prior, by `ultr.bias.click_models`

The output, as JSON, has for each: `ndcg@10` by the grades (gain 2^grade - 1, ties averaged), Kendall's `tau` (tau-b) in
queries with several grades, each a mean over queries with its 95% interval from a bootstrap over queries, and the
`difference` of NDCG@10 to `logged`. `agreement` is the share of pairs whose grade is that of the log, of sure pairs and
of all. The log's grades up to 2 are one grade, and those from 4 on. Grades of judgments are those of the default cut
points (up to 1, 2, and 3). Other scores are cut so that grades have the shares that they have in the choosing half.

`coverage` has the share of pairs whose relevance is in their 95% interval in the simulated worlds of
`tests/bias/judged.py`, if examination is estimated, for two weights: means over `--seeds`, with their standard errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bias"))

from judged import judged_world  # type: ignore[import-not-found]

import ultr
from ultr.bias.click_models import ClickLists, fit_and_evaluate, make_click_model
from ultr.bias.counts import impressions
from ultr.bias.relevance import WEIGHT, Judgments
from ultr.evaluation.scores import evaluate_scores

WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
ITERATIONS = 50  # of EM
LOWEST = 2.0  # grades up to this one are one grade, and those from 4 on: the log has few others
HIGHEST = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("choose", "test"), default="test", help="the queries that are reported")
    parser.add_argument("--bootstrap", type=int, default=1000, help="bootstrap replicates")
    parser.add_argument("--seeds", type=int, default=20, help="simulated worlds for the coverage")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        covered = {
            weight: pool.map(coverage, range(options.seeds), [weight] * options.seeds) for weight in (WEIGHT, 1.0)
        }
        report = real_log(options.half, options.bootstrap)
        report["coverage"] = {str(weight): _mean(list(values)) for weight, values in covered.items()}
    print(json.dumps({**vars(options), **report}, indent=1))


def coverage(seed: int, weight: float) -> float:
    """Return the share of the pairs of a simulated world whose relevance is in the interval."""
    world = judged_world(seed + 100, weight=weight)
    found = ultr.judgments(world.log, weight=weight)
    truth = world.truth(found.pairs)
    return float(((found.low <= truth) & (truth <= found.high)).mean())


def _mean(values: list[float]) -> dict[str, float]:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return {"mean": round(float(np.mean(values)), 4), "standard_error": round(float(error), 4)}


# --- Scores -----------------------------------------------------------------------------------------------------------


class Clicks:
    """The rows of the log as arrays [requests, positions], and the pair of each row."""

    def __init__(self, log: ultr.Log, found: Judgments) -> None:
        pairs = found.pairs
        names = list(zip(pairs.queries.to_pylist(), pairs.items.to_pylist(), strict=True))
        number = {name: i for i, name in enumerate(names)}
        queries = log.context["query"].take(pa.array(log.request_of_row)).to_pylist()
        of_row = [number[name] for name in zip(queries, log.item_ids.to_pylist(), strict=True)]
        width = int(log.lengths.max())
        self.size, self.log = len(pairs), log
        self.shown = np.arange(width) < log.lengths[:, None]
        self.clicked, self.pair = np.zeros(self.shown.shape, bool), np.zeros(self.shown.shape, np.int64)
        self.clicked[self.shown], self.pair[self.shown] = log.actions["click"] > 0, of_row
        self.rank = np.broadcast_to(np.arange(width), self.shown.shape)

    def sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.pair[self.shown], values[self.shown], self.size)

    @property
    def rates(self) -> np.ndarray:
        """Return the click rate of each rank."""
        return np.asarray((self.clicked & self.shown).sum(0) / self.shown.sum(0))

    def coec(self) -> np.ndarray:
        return np.asarray(self.sums(self.clicked) / self.sums(self.rates[self.rank]))

    def coec_best(self) -> np.ndarray:
        best = np.full(self.size, self.shown.shape[1])
        np.minimum.at(best, self.pair[self.shown], self.rank[self.shown])
        return np.asarray(self.sums(self.clicked) / self.sums(np.ones(self.shown.shape)) / self.rates[best])

    def by_em(self, state: np.ndarray) -> np.ndarray:
        """Return the attraction of pairs, if rows with one `state` are examined equally often, by EM."""
        attraction, examination = np.full(self.size, 0.5), np.full(int(state.max()) + 1, 0.5)
        shown, states = self.sums(np.ones(self.shown.shape)), np.bincount(state[self.shown])
        for _ in range(ITERATIONS):
            a, e = attraction[self.pair], examination[state]
            missed = 1 / np.maximum(1 - a * e, 1e-9)
            attracted = np.where(self.clicked, 1, a * (1 - e) * missed)
            examined = np.where(self.clicked, 1, e * (1 - a) * missed)
            attraction = (1 + self.sums(attracted)) / (2 + shown)
            examination = (1 + np.bincount(state[self.shown], examined[self.shown])) / (2 + states)
        return attraction

    def last_click(self) -> np.ndarray:
        """Return the rank of the last click above each row, from 1; 0 without one."""
        last = np.maximum.accumulate(np.where(self.clicked, self.rank + 1, 0), axis=1)
        return np.column_stack([np.zeros(len(last), np.int64), last[:, :-1]])

    def sdbn(self) -> np.ndarray:
        """Return attraction times satisfaction: users read down to the last click, or to the end without one."""
        last = np.where(self.clicked, self.rank, -1).max(1, keepdims=True)
        examined = (self.rank <= last) | (last < 0)
        clicks = self.sums(self.clicked)
        attraction = (1 + clicks) / (2 + self.sums(examined))
        return np.asarray(attraction * (1 + self.sums(self.clicked & (self.rank == last))) / (2 + clicks))

    def fitted(self, name: str) -> np.ndarray:
        """Return the attraction (times satisfaction) of pairs by a click model of the package, fitted to all rows."""
        seen = impressions(self.log, self.log.actions["click"] > 0)
        lists = ClickLists(seen, None)
        every = torch.arange(len(self.log))
        model = make_click_model(name, len(lists.positions))
        _, fit = fit_and_evaluate(model, lists, self.log, (every, every[::10], every[::10]), name=name)
        assert seen.items is not None
        score = (fit.mean + fit.table).detach().sigmoid().prod(-1).numpy()
        scores = np.empty(self.size)
        scores[self.pair[self.shown]] = score[seen.items]
        return scores


# --- Report -----------------------------------------------------------------------------------------------------------


def real_log(half: str, bootstrap: int) -> dict[str, Any]:
    path = Path(os.environ["ULTR_DATA"]) / "clara2" / "dev.parquet"
    table = pq.read_table(path, columns=["request", "query", "item", "position", "click", "grade"])
    log = ultr.read_log(table.drop_columns("grade"), features=[])
    found = {weight: ultr.judgments(log, weight=weight) for weight in WEIGHTS}
    judged = found[WEIGHT]
    graded = table.group_by(["query", "item"]).aggregate([("grade", "max")])
    names = zip(graded["query"].to_pylist(), graded["item"].to_pylist(), strict=True)
    of_pair = dict(zip(names, graded["grade_max"].to_pylist(), strict=True))
    queries, items = judged.pairs.queries.to_pylist(), judged.pairs.items.to_pylist()
    grades = np.array([of_pair[name] for name in zip(queries, items, strict=True)], np.float64)  # NaN: three pairs
    chosen = np.array([int(hashlib.md5(query.encode()).hexdigest(), 16) % 2 == 0 for query in queries])
    clicks = Clicks(log, judged)
    scores = {"judgments": judged.relevance}
    scores |= {f"judgments, weight {weight:g}": each.relevance for weight, each in found.items() if weight != WEIGHT}
    scores |= {"predicted": judged.predicted, "logged": -judged.pairs.mean_rank}
    scores |= {"ctr": judged.pairs.clicks / judged.pairs.impressions, "coec": clicks.coec()}
    scores |= {"coec-best": clicks.coec_best(), "sdbn": clicks.sdbn(), "pbm": clicks.by_em(clicks.rank)}
    scores |= {"ubm": clicks.by_em(clicks.rank * (clicks.rank.max() + 2) + clicks.last_click())}
    scores |= {f"ultr-{name}": clicks.fitted(name) for name in ("sdbn", "pbm", "ubm")}
    used = (chosen == (half == "choose")) & np.isfinite(grades)
    query = np.unique(judged.pairs.query[used], return_inverse=True)[1]
    results = _orders({name: each[used] for name, each in scores.items()}, grades[used], query, bootstrap)
    return {
        "queries": int(query.max()) + 1,
        "pairs": int(used.sum()),
        "sure": round(float(judged.sure[used].mean()), 4),
        "results": results,
        "agreement": _agreement(scores, judged, grades, chosen, used),
    }


def _orders(
    scores: dict[str, np.ndarray], grades: np.ndarray, query: np.ndarray, bootstrap: int
) -> dict[str, dict[str, Any]]:
    """Return NDCG@10 and tau of each score, with intervals over queries."""
    sizes = np.bincount(query)
    offsets = np.append(0, np.cumsum(sizes))
    lists = ultr.Log(
        features=np.empty((len(query), 0)),
        offsets=offsets,
        request_ids=pa.array(np.arange(len(sizes))),
        feature_names=(),
        relevance=grades,
    )
    graded = np.array([len(set(grades[a:b])) > 1 for a, b in pairwise(offsets)])
    draws = np.random.default_rng(0).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=bootstrap)

    def interval(values: np.ndarray, some: np.ndarray | None = None) -> list[float]:
        weights = draws if some is None else draws * some
        means = weights @ values / weights.sum(1)
        mean = values.mean() if some is None else values[some].mean()
        return [round(float(each), 4) for each in (mean, *np.quantile(means, [0.025, 0.975]))]

    ndcg = {name: evaluate_scores(lists, each, "ndcg@10")["ndcg@10"] for name, each in scores.items()}
    results = {}
    for name, each in scores.items():
        parts = [kendalltau(each[a:b], grades[a:b]).statistic for a, b in pairwise(offsets)]
        tau = np.nan_to_num(np.array(parts))  # a score that does not order the items has tau 0
        results[name] = {
            "ndcg@10": interval(ndcg[name]),
            "difference": interval(ndcg[name] - ndcg["logged"]),
            "tau": interval(tau, graded),
        }
    return results


def _agreement(
    scores: dict[str, np.ndarray], judged: Judgments, grades: np.ndarray, chosen: np.ndarray, used: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return how often grades are those of the log."""
    truth = np.clip(np.nan_to_num(grades) - LOWEST, 0, HIGHEST).astype(np.int64)
    choosing = chosen & np.isfinite(grades)
    random = np.random.default_rng(0)
    made = {}
    for name, each in scores.items():
        rank = np.empty(len(each))
        rank[np.lexsort((random.random(len(each)), each))] = np.arange(len(each))  # ties in random order
        cuts = np.quantile(rank[choosing], [(truth[choosing] < grade).mean() for grade in range(1, HIGHEST + 1)])
        made[f"{name}, cut by shares"] = np.searchsorted(cuts, rank, "right")
    made["judgments"] = np.clip(judged.grade - 1, 0, HIGHEST)
    made["always the most frequent"] = np.full(len(truth), np.bincount(truth[choosing]).argmax())
    parts = {"sure": used & judged.sure, "all": used}
    return {
        name: {part: round(float((each == truth)[rows].mean()), 4) for part, rows in parts.items()}
        for name, each in made.items()
    }


if __name__ == "__main__":
    main()
