"""Make the results page about real logs: examination, click models, a ranker, and the tests of `ultr bias`.

    ULTR_DATA=DATA python benchmarks/real_logs.py [--out docs/results] [--open-bandit FOLDER] [--bootstrap 200]
        [--splits 5] [--folds 5]

`--out` writes real-logs.md, its plots, and real-logs.json, which they are made from. A data set that is absent is left
out, and the page says where to get it. No estimate, click model or ranker reads the grades of `clara2`.

All intervals are over queries, not over rows: requests of one query have the same items, so they are not independent.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy import stats

import ultr
from ultr import Log, read_log
from ultr.bias.audit import BiasReport, audit, standardised, summary, with_click_models
from ultr.bias.click_models import (
    MODELS,
    ClickLists,
    Fit,
    compare_click_models,
    conditional_log_likelihood,
    fit_and_evaluate,
    make_click_model,
    split_requests,
)
from ultr.bias.counts import Counts, Impressions, clicked_rows, counted, impressions, log_counts, replicates
from ultr.bias.estimators import fit_trust, harvest, pools, position_based, regression
from ultr.bias.identification import Estimate, agreement, estimate
from ultr.bias.logging_policy import recovered_score, strata_of
from ultr.evaluation.scores import evaluate_scores
from ultr.experiments.lab import ExperimentResult, write_docs
from ultr.log.splits import codes
from ultr.report.page import Part, Section, Table, Text
from ultr.report.plots import line_plot
from ultr.training.config import make_config
from ultr.training.run import run_training
from ultr.utils.jsonfiles import finite

NAME, TITLE = "real-logs", "Three real logs"
FEW = 20  # replicates of the estimators that take long
EM_STEPS = 200
DRAWS = 2000  # of queries, for intervals of differences
LEAST = 1000  # impressions of a grade whose click rates are shown
SHOWN = (2, 3, 4, 5, 7, 10)  # positions in the tables of estimates; the JSON file has all
LOGGED = "the logged order"
FEATURES = ("mean_position", "best_position", "times_shown", "queries_of_item")
WITH_FEATURES = ("pbm", "ubm")  # click models that are fitted with features too
GRADED = ("equal grade", "equal query and grade")
PLOTTED = ("harvest", "items", "pbm, click model", "strata", "regression", *GRADED)

ABOUT = (
    "Estimates on logs of real users. None of the search logs has requests in random order, so no estimate of "
    "examination on them is confirmed by an experiment. Examination is relative to position 1. All intervals are 95% "
    "intervals of the sampling error, over queries where there are queries: they do not cover wrong assumptions."
)
CAUTION = (
    "**Caution.** It is not documented who graded the items of clara2. Grade 5 is almost only at position 1, so a "
    "part of the agreement between the logged order and the grades may be circular. Click rates of items with equal "
    "grades are therefore no truth: items of one grade may still be better at the top. The grades are read here to "
    "evaluate, and never in training."
)
HALVES = (
    "Features are what production knows without clicks and grades: the mean and the best position of the item for"
    " the query, how often it was shown for the query, and for how many queries. They come from a random half of "
    "the sessions, or of the requests where sessions are unknown. `strata`, `regression` and models with features"
    " then learn from the other half. Features of the same requests would contain the position that they should "
    "explain."
)
ABSENT = {
    "clara2": "put dev.parquet of CLARA2 (NAVER, the repository naver-pyclick) into the folder clara2 of ULTR_DATA",
    "yandex": "put the sample of the Yandex relevance challenge into yandex-clicks/impressions.csv.gz of ULTR_DATA",
    "Open Bandit": (
        "run `pip download --no-deps obp==0.4.1`, unpack the wheel, and pass its folder obp/dataset/obd with "
        "--open-bandit"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(os.environ.get("ULTR_DATA", "."))
    parser.add_argument("--out", type=Path, help="folder of the page")
    parser.add_argument("--open-bandit", type=Path, default=data / "open-bandit", help="the folder obp/dataset/obd")
    parser.add_argument("--bootstrap", type=int, default=200, help="bootstrap replicates of queries")
    parser.add_argument("--splits", type=int, default=5, help="splits of requests for click models")
    parser.add_argument("--folds", type=int, default=5, help="folds of queries for rankers")
    options = parser.parse_args()
    readers: dict[str, tuple[Path, Callable[[Path], Log]]] = {
        "clara2": (data / "clara2" / "dev.parquet", read_clara2),
        "yandex": (data / "yandex-clicks" / "impressions.csv.gz", lambda path: read_log(path, features=[])),
    }
    logs = {name: read(path) for name, (path, read) in readers.items() if path.is_file()}
    bandit = read_open_bandit(options.open_bandit) if options.open_bandit.is_dir() else None
    result = made(logs, bandit, bootstrap=options.bootstrap, splits=options.splits, folds=options.folds)
    if options.out is not None:
        write_docs(result, options.out, "python benchmarks/real_logs.py --out docs/results")
    print(result.text())


def made(
    logs: Mapping[str, Log], bandit: pd.DataFrame | None, *, bootstrap: int, splits: int, folds: int
) -> ExperimentResult:
    """Return the content of the page; `bandit` has the rows of the Open Bandit sample."""
    sections: list[Section] = []
    results: dict[str, Any] = {}
    for name, log in logs.items():
        parts, results[name] = search_log(log, bootstrap=bootstrap, splits=splits, folds=folds)
        if log.relevance is not None:
            results[name]["item_scores"] = judged_scores("test", 5 * bootstrap)
            parts.append(item_scores(results[name]["item_scores"]))
        sections.append(Section(name, parts))
    if bandit is not None:
        parts, results["Open Bandit"] = open_bandit(bandit, bootstrap=bootstrap)
        sections.append(Section("Open Bandit", parts))
    sections.append(Section("What real data support, and what they do not", conclusions(results)))
    absent = {name: why for name, why in ABSENT.items() if name not in results}
    return ExperimentResult(NAME, TITLE, ABOUT, sections, [], dict(finite(results)), absent)


def read_clara2(path: Path) -> Log:
    columns = ["request", "session", "query", "item", "position", "click", "grade"]
    table = pq.read_table(path, columns=columns)
    ungraded = table.filter(pa.compute.is_null(table["grade"]))["request"].combine_chunks()
    table = table.filter(pa.compute.invert(pa.compute.is_in(table["request"], value_set=ungraded)))
    log = read_log(table.drop_columns(["session"]), features=[], actions=["click"], relevance="grade")
    session = dict(zip(table["request"].to_pylist(), table["session"].to_pylist(), strict=True))
    return replace(log, context={**log.context, "session": pa.array(map(session.get, log.request_ids.to_pylist()))})


def search_log(log: Log, *, bootstrap: int, splits: int, folds: int) -> tuple[list[Part], dict[str, Any]]:
    graded = log.relevance is not None
    clicks = replace(log, relevance=None)
    models = compare_click_models(clicks, list(MODELS), label="click")
    report = with_click_models(audit(clicks, label="click", bootstrap=bootstrap), models)
    estimates, pool = examination(log, bootstrap=bootstrap)
    results: dict[str, Any] = {
        "facts": facts(log),
        "audit": {"summary": summary(report), "tests": [vars(test) for test in report.refutations]},
        "examination": examination_figures(report, estimates, pool),
        "click_models": click_models(clicks, splits),
    }
    parts: list[Part] = [Text(facts_text(results["facts"]))]
    parts += [Text(CAUTION)] if graded else []
    parts += [*audit_parts(results["audit"]), *examination_parts(results["examination"])]
    if graded:
        parts.append(grades_table(log))
    parts.append(models_table(results["click_models"], splits))
    if graded:
        curves = results["examination"]["estimates"]
        results["rankers"] = rankers(log, folds, {name: curves[name] for name in ("items", GRADED[0])})
        parts.append(rankers_table(results["rankers"], folds))
    return parts, results


# --- The logs ---------------------------------------------------------------------------------------------------------


def facts(log: Log) -> dict[str, float]:
    seen = impressions(log, clicked_rows(log, "click"))
    places = pd.DataFrame({"pair": seen.items, "place": seen.place}).groupby("pair")["place"].nunique()
    clicked = np.add.reduceat(seen.clicked, log.offsets[:-1])
    largest = np.bincount(codes(log.context["query"])).max() / len(log)
    return {
        "requests": len(log),
        "queries": len(log.context["query"].unique()),
        "impressions": log.rows,
        "clicks": int(seen.clicked.sum()),
        "requests_without_click": float((clicked == 0).mean()),
        "pairs_at_several_positions": float((places > 1).mean()),
        "largest_query": float(largest),
    }


def facts_text(figures: Mapping[str, float]) -> str:
    return (
        f"{figures['requests']:,} requests of {figures['queries']:,} queries, {figures['impressions']:,} impressions, "
        f"{figures['clicks']:,} clicks. {figures['requests_without_click']:.0%} of the requests have no click; "
        f"{figures['pairs_at_several_positions']:.0%} of the pairs of query and item occur at several positions. The "
        f"most frequent query has {figures['largest_query']:.0%} of the requests."
    )


def audit_parts(figures: Mapping[str, Any]) -> Iterator[Part]:
    """Yield what `ultr bias` prints about a log."""
    lines = "\n".join(f"- {name}: {sentence}" for name, sentence in figures["summary"].items())
    yield Text(f"`ultr bias` says:\n\n{lines}")
    rows = [[test["name"], "passed" if test["passed"] else "failed", test["text"]] for test in figures["tests"]]
    yield Table(["test of the assumption", "result", ""], rows)


# --- Examination ------------------------------------------------------------------------------------------------------


def production_features(log: Log, seen: Impressions, before: np.ndarray) -> Log:
    """Return the log with features of its rows that come from the requests `before`, a mask, alone.

    A pair of query and item that these requests do not have has no positions.
    """
    pair, rows = np.asarray(seen.items), seen.of_rows(before)
    size = int(pair.max()) + 1
    place = seen.positions[seen.place].astype(float)
    shown = np.bincount(pair[rows], minlength=size).astype(float)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(pair[rows], place[rows], size) / shown
    best = np.full(size, np.nan)
    np.fmin.at(best, pair[rows], place[rows])
    item = codes(log.item_ids)
    query = seen.of_rows(codes(log.context["query"]))
    asked = np.unique(np.column_stack([item[rows], query[rows]]), axis=0)[:, 0]
    queries = np.bincount(asked, minlength=int(item.max()) + 1).astype(float)
    features = np.column_stack([mean[pair], best[pair], shown[pair], queries[item]])
    return replace(log, features=features.astype(np.float32), feature_names=FEATURES)


def visits(log: Log) -> np.ndarray:
    """Return a number for each request, which requests of one session share: their clicks are not independent."""
    return codes(log.context["session"]) if "session" in log.context else np.arange(len(log))


def halves(visit: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return True for the requests, about half of them, that features come from, given the visit of each request."""
    number = int(visit.max()) + 1
    return np.asarray((np.random.default_rng(seed).permutation(number) < number / 2)[visit])


def examination(log: Log, *, bootstrap: int) -> tuple[dict[str, Estimate], np.ndarray]:
    """Return estimates of examination by name, all with the same bootstrap replicates of queries, and their pools."""
    query = codes(log.context["query"])
    seen = replace(impressions(log, clicked_rows(log, "click")), group=query.astype(np.int32))
    items = log_counts(seen).sources["items"]
    pool = pools(items.total().compared_clicks(), seen.positions)
    pooled = seen.pooled(pool)
    compared = items.pooled(pool).compared()
    assert compared is not None
    weights = replicates(int(query.max()) + 1, bootstrap)
    few = weights[:, : 1 + min(FEW, bootstrap)]
    pairs = counted(pooled, np.asarray(seen.items))
    trust = [fit_trust(pairs.weighted(each)) for each in few.T]
    draws = {
        "harvest": harvest(compared, weights),
        "items": position_based(compared, weights),
        "pbm, plain EM": np.array([plain_em(pairs.weighted(each)) for each in few.T]),
        "pbm, click model": np.array([likely_theta(log, pooled, each[query]) for each in few.T]),
        "trust, θ": np.array([fit.theta for fit in trust]),
        **from_features(log, seen, pool, weights),
    }
    if log.relevance is not None:
        grade = log.relevance.astype(np.int64)
        strata = (grade, pooled.of_rows(query) * (int(grade.max()) + 1) + grade)
        draws |= {
            name: position_based(counted(pooled, each), weights) for name, each in zip(GRADED, strata, strict=True)
        }
    estimates = {name: estimate(name, theta[:, pool], 0) for name, theta in draws.items()}
    zeta = (trust[0].zeta / trust[0].theta[0])[pool]
    nothing = np.full(len(zeta), np.nan)
    return {**estimates, "trust, ζ": Estimate("trust, ζ", zeta, nothing, nothing, np.zeros((1, len(zeta))))}, pool


def from_features(log: Log, seen: Impressions, pool: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return θ [replicates, pools] by `strata` and `regression`, from the requests that features do not come from."""
    before = halves(visits(log))
    part = production_features(replace(log, relevance=None), seen, before).select(~before)
    sampled = seen.select(~before).pooled(pool)
    weights = weights[: int(sampled.group.max()) + 1]
    score = recovered_score(part, network=False).score
    counts = counted(sampled, strata_of(part, score, clicks=float(sampled.clicked.sum())))
    numbers = standardised(part.features, list(range(len(FEATURES))))
    return {"strata": position_based(counts, weights), "regression": regression(sampled, numbers, weights)}


def plain_em(cells: Counts) -> np.ndarray:
    """Return θ by EM of the position-based model with one relevance for each pair, smoothed as in PyClick."""
    pair, place, shown, clicked = cells.strata, cells.places, cells.shown, cells.clicked
    theta, beta = np.full(cells.size[1], 0.5), np.full(cells.size[0], 0.5)
    by_place, by_pair = np.bincount(place, shown, len(theta)), np.bincount(pair, shown, len(beta))
    for _ in range(EM_STEPS):
        look, like = theta[place], beta[pair]
        no_click = (shown - clicked) / (1 - look * like)
        examined = np.bincount(place, clicked + no_click * (1 - like) * look, len(theta))
        relevant = np.bincount(pair, clicked + no_click * (1 - look) * like, len(beta))
        theta, beta = (1 + examined) / (2 + by_place), (1 + relevant) / (2 + by_pair)
    return theta


def likely_theta(log: Log, seen: Impressions, weights: np.ndarray) -> np.ndarray:
    """Return θ of the click model `pbm`, with a weight for each request; a tenth of the requests stops the training."""
    lists = ClickLists(replace(seen, weights=weights), None)
    order = np.random.default_rng(0).permutation(len(log))
    stop, fitted = torch.from_numpy(order[: len(log) // 10]), torch.from_numpy(order[len(log) // 10 :])
    model = make_click_model("pbm", len(seen.positions))
    quality, _ = fit_and_evaluate(model, lists, log, (fitted, stop, stop), name="pbm")
    return np.array(quality.parameters["theta"])


def examination_figures(report: BiasReport, estimates: Mapping[str, Estimate], pool: np.ndarray) -> dict[str, Any]:
    items = estimates["items"]
    curves = {}
    for name, each in estimates.items():
        curves[name] = {"theta": each.theta.tolist(), "low": each.low.tolist(), "high": each.high.tolist()}
        test = (
            None
            if len(each.logs) < 2
            else agreement(each, items, report.positions, shown=report.impressions, pool=pool)
        )
        if test is not None and name != "items":
            curves[name] |= {"apart": test.typical, "agrees": test.agree}
    positions = report.positions.tolist()
    return {"positions": positions, "click_rate": report.rate.tolist(), "pools": pool.tolist(), "estimates": curves}


def examination_parts(figures: Mapping[str, Any]) -> Iterator[Part]:
    positions, curves = figures["positions"], figures["estimates"]
    yield Text(HALVES)
    names = [name for name in PLOTTED if name in curves]
    first = figures["click_rate"][0]
    lines = {name: (positions, curves[name]["theta"]) for name in names}
    lines["click rate"] = (positions, [rate / first for rate in figures["click_rate"]])
    bands = {name: (curves[name]["low"], curves[name]["high"]) for name in ("items", GRADED[0]) if name in curves}
    caption = "Relative to position 1. Bands: 95% intervals over queries."
    yield line_plot(
        "Examination by position", lines, x="position", y="examination", bands=bands, dashed=["click rate"],
        from_zero=True, caption=caption,
    )  # fmt: skip
    shown = [k for k in SHOWN if k in positions]
    rows = []
    for name, curve in curves.items():
        cells = [cell(curve, positions.index(k)) for k in shown]
        apart = f"{curve['apart']:.0%}, {'not clear' if curve['agrees'] else 'clear'}" if "apart" in curve else ""
        rows.append([name, *cells, apart])
    yield Table(["estimate", *(f"position {k}" for k in shown), "mean difference to `items`"], rows, ESTIMATES)


ESTIMATES = (
    "`harvest`, `items`, `strata` and `regression` are those of `ultr bias`. `pbm, plain EM` has the smoothing of "
    "PyClick, which pulls the relevance of pairs with few impressions towards one half. `pbm, click model` has a "
    "normal prior instead. `trust` is P(click) = θ β + ζ (1 - β), by EM; ζ is relative to θ of position 1. `equal "
    "grade` compares click rates of items with equal grades, and `equal query and grade` those under the same query. "
    "A difference is clear if its test, with replicates of queries, has p < 0.01."
)


def cell(curve: Mapping[str, Sequence[float | None]], at: int) -> str:
    """Return θ of a position with its interval as text."""
    theta, low, high = (curve[name][at] for name in ("theta", "low", "high"))
    if theta is None or not np.isfinite(theta):
        return "-"
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None and low < high else ""
    return f"{theta:.3f}{interval}"


def grades_table(log: Log) -> Table:
    assert log.relevance is not None
    grade, position = log.relevance.astype(int), log.shown_positions("this benchmark")
    shown = [g for g in range(grade.max() + 1) if (grade == g).sum() >= LEAST]
    rows = []
    for k in np.unique(position).tolist():
        cells = [str(k)]
        for g in shown:
            both = (grade == g) & (position == k)
            cells.append(f"{log.actions['click'][both].mean():.2%} ({both.sum():,})" if both.sum() >= 100 else "-")
        rows.append(cells)
    return Table(["position", *(f"grade {g}" for g in shown)], rows, "Click rates by grade (impressions in brackets):")


# --- Click models -----------------------------------------------------------------------------------------------------


def click_models(log: Log, splits: int) -> list[dict[str, Any]]:
    """Return held-out log-likelihoods of click models, and differences to the position-based model.

    Each split fits models to 70% of the requests (of the sessions, where known), and stops by another 10%. Models with
    features fit to one half of the 70%, and have the features of the other half, so all models have the same data.
    """
    clicked, query, visit = clicked_rows(log, "click"), codes(log.context["query"]), visits(log)
    names = [*MODELS, *(f"{name}, features" for name in WITH_FEATURES)]
    terms: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in names}
    for split in range(splits):
        seen = impressions(log, clicked, seed=split)
        if "session" in log.context:
            seen = replace(seen, group=np.random.default_rng(split).permutation(int(visit.max()) + 1)[visit])
        fitted, stop, held_out = split_requests(seen, None, seed=split)
        before = np.zeros(len(log), bool)
        before[fitted.numpy()] = halves(visit, split)[fitted.numpy()]
        described = production_features(log, seen, before)
        others = fitted[~torch.from_numpy(before[fitted.numpy()])]
        by_item, by_features = ClickLists(seen, None), ClickLists(seen, described.features)
        matrices = {}
        for name in names:
            kind, _, features = name.partition(", ")
            model = make_click_model(kind, len(seen.positions))
            lists, parts = (by_features, (others, stop, held_out)) if features else (by_item, (fitted, stop, held_out))
            _, fit = fit_and_evaluate(model, lists, described, parts, name=name, seed=split)
            matrices[name] = of_impressions(fit, lists, held_out)
        base = matrices["pbm"][0]
        for name, (values, modelled) in matrices.items():
            gain = np.where(modelled, values - base, 0).sum(1)
            terms[name].append((query[held_out.numpy()], values.sum(1), gain, modelled.sum(1)))
    return [{"model": name, **gain_figures(terms[name], int(query.max()) + 1)} for name in names]


@torch.no_grad()
def of_impressions(fit: Fit, lists: ClickLists, requests: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-likelihood of each impression of some requests, and a mask of those that the model has."""
    batch = lists.batch(requests)
    given = {**batch.given, "logits": fit.logits(batch), "parameters": fit.own}
    modelled = fit.model.modelled(batch.clicked, batch.where)
    return conditional_log_likelihood(fit.model, **given).double().numpy(), modelled.numpy()


def gain_figures(terms: Sequence[tuple[np.ndarray, ...]], queries: int) -> dict[str, float]:
    """Return the mean log-likelihood of an impression, and its gain with an interval over queries.

    `terms` has for each split, by request: query, log-likelihood, gain over the position-based model, and impressions.
    """
    gains = [gain.sum() / number.sum() for _, _, gain, number in terms]
    query, value, gain, number = (np.concatenate(column) for column in zip(*terms, strict=True))
    by_query = [np.bincount(query, each, queries) for each in (gain, number)]
    drawn = replicates(queries, DRAWS)[:, 1:].T
    low, high = np.quantile(drawn @ by_query[0] / (drawn @ by_query[1]), [0.025, 0.975])
    return {
        "log_likelihood": float(value.sum() / number.sum()),
        "impressions": float(number.sum() / len(terms)),
        "gain": float(gain.sum() / number.sum()),
        "low": float(low),
        "high": float(high),
        "smallest": float(min(gains)),
        "largest": float(max(gains)),
    }


def models_table(figures: Sequence[Mapping[str, Any]], splits: int) -> Table:
    rows = [
        [
            each["model"],
            f"{each['log_likelihood']:.5f}",
            "" if each["model"] == "pbm" else f"{each['gain']:+.5f} [{each['low']:+.5f}, {each['high']:+.5f}]",
            "" if each["model"] == "pbm" else f"{each['smallest']:+.5f} to {each['largest']:+.5f}",
            f"{each['impressions']:,.0f}",
        ]
        for each in sorted(figures, key=lambda each: -each["gain"])
    ]
    caption = (
        f"Click models on held-out requests, means of {splits} splits. The gain is that over `pbm`, on the "
        "impressions that the model has (`cascade` leaves out those after the first click). Without features, "
        "attraction is a parameter of each pair of query and item. A session is in one part alone, where sessions"
        " are known. Models with features have no such parameter; they use one half of the requests for features "
        "and fit to the other half."
    )
    head = ["model", "log-likelihood of an impression", "gain over `pbm`", "range over splits", "impressions"]
    return Table(head, rows, caption)


# --- Rankers ----------------------------------------------------------------------------------------------------------


def rankers(log: Log, folds: int, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return NDCG@10 by grade, and clicks by inverse weighting with each of some `curves` of θ, of several rankings.

    Rankers learn from the clicks of the queries of the other folds. Clicks and grades of the test queries are not read
    in training, and features come from other requests than those that are ranked. Items without features are left out.
    """
    seen, before = impressions(log, clicked_rows(log, "click")), halves(visits(log))
    described = production_features(log, seen, before)
    part = of_known_items(described, before)
    query = codes(part.context["query"])
    fold = np.random.default_rng(0).integers(0, folds, int(query.max()) + 1)[query]
    scores = {
        LOGGED: -part.shown_positions("this benchmark").astype(float),
        "mean position in the other half": -part.features[:, FEATURES.index("mean_position")],
        "`ultr train` with positions only": trained(without_features(part, FEATURES[2:]), fold),
        "`ultr train`": trained(part, fold),
        "`ultr train` with past clicks": trained(
            of_known_items(with_past_clicks(seen, before, described), before), fold
        ),
    }
    ndcg = {name: ndcg_of_queries(part, each, query) for name, each in scores.items()}
    queries = len(ndcg[LOGGED])
    drawn, drawn_all = (replicates(number, DRAWS)[:, 1:].T for number in (queries, int(query.max()) + 1))
    clicks = np.bincount(query, np.add.reduceat(part.actions["click"], part.offsets[:-1]))
    figures = []
    for name, each in scores.items():
        gain = ndcg[name] - ndcg[LOGGED]
        low, high = np.quantile(drawn @ gain / queries, [0.025, 0.975])
        values = {"ndcg": ndcg[name].mean(), "gain": gain.mean(), "low": low, "high": high, "queries": queries}
        by_clicks = {}
        for curve, theta in curves.items():
            moved = np.bincount(query, clicks_if_ranked(part, each, np.array(theta["theta"]))) - clicks
            low, high = np.quantile(drawn_all @ moved / (drawn_all @ clicks), [0.025, 0.975])
            by_clicks[curve] = {"gain": moved.sum() / clicks.sum(), "low": low, "high": high}
        figures.append({"ranker": name, **values, "clicks": by_clicks})
    return figures


def of_known_items(log: Log, before: np.ndarray) -> Log:
    """Return the requests that features do not come from, without the items that have no features."""
    rows = np.repeat(~before, log.lengths) & np.isfinite(log.features[:, 0])
    kept = np.add.reduceat(rows.astype(np.int64), log.offsets[:-1])
    return log.select(kept > 0).regroup(
        np.flatnonzero(rows[np.repeat(kept > 0, log.lengths)]), np.append(0, np.cumsum(kept[kept > 0]))
    )


def clicks_if_ranked(log: Log, scores: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return the clicks of each request in expectation, if its items took their positions in the order of the scores.

    A click at k counts θ_j / θ_k, where j is the new position. This is right if θ is.
    """
    request, place = log.request_of_row, log.shown_positions("this benchmark") - 1
    order = np.lexsort((place, -scores, request))  # ties keep the logged order
    new = np.empty_like(place)
    new[order] = place  # rows of a request are in the order of their positions
    return np.bincount(request, log.actions["click"] * theta[new] / theta[place], len(log))


def without_features(log: Log, names: Sequence[str]) -> Log:
    kept = [i for i, name in enumerate(log.feature_names) if name not in names]
    return replace(log, features=log.features[:, kept], feature_names=tuple(log.feature_names[i] for i in kept))


def with_past_clicks(seen: Impressions, before: np.ndarray, described: Log) -> Log:
    """Return a log with one more feature: clicks of the pair over those expected at its positions (COEC), `before`."""
    pair, rows = np.asarray(seen.items), seen.of_rows(before)
    rate = np.bincount(seen.place[rows], seen.clicked[rows]) / np.bincount(seen.place[rows])
    size = int(pair.max()) + 1
    clicks, expected = (np.bincount(pair[rows], each[rows], size) for each in (seen.clicked, rate[seen.place]))
    coec = ((clicks + 1) / (expected + 1))[pair].astype(np.float32)
    names = (*FEATURES, "coec")
    return replace(described, features=np.column_stack([described.features, coec]), feature_names=names)


def trained(log: Log, fold: np.ndarray) -> np.ndarray:
    """Return scores of rankers that `ultr train` with its defaults makes from the clicks of the other folds."""
    clicks = replace(log, relevance=None)
    scores = np.zeros(log.rows)
    for number in np.unique(fold):
        test = fold == number
        with tempfile.TemporaryDirectory() as folder:
            run = run_training(make_config(label="click", seed=0), Path(folder) / "run", source=clicks.select(~test))
            scores[np.repeat(test, log.lengths)] = ultr.load_model(run).score(clicks.select(test))
    return scores


def ndcg_of_queries(log: Log, scores: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the mean NDCG@10 of the requests of each query; requests whose grades are all 0 do not count."""
    values = pd.Series(evaluate_scores(log, scores, "ndcg@10")["ndcg@10"])
    return np.asarray(values.groupby(query).mean().dropna().to_numpy(float))


def rankers_table(figures: Sequence[Mapping[str, Any]], folds: int) -> Table:
    rows = [
        [
            each["ranker"],
            f"{each['ndcg']:.4f}",
            f"{each['gain']:+.4f} [{each['low']:+.4f}, {each['high']:+.4f}]" if i else "",
            *(f"{c['gain']:+.1%} [{c['low']:+.1%}, {c['high']:+.1%}]" if i else "" for c in each["clicks"].values()),
        ]
        for i, each in enumerate(figures)
    ]
    caption = (
        f"NDCG@10 by grade, the mean over {figures[0]['queries']:,} queries of the half of the sessions that "
        "features do not come from. Items that the other half did not show are left out. Rankers are trained on "
        f"clicks of other queries ({folds} folds). *Positions only* are the mean and the best position. *Past "
        "clicks* are clicks over expected clicks (COEC) of the pair in the other half. If the grades follow the "
        "logged order, as the caution says they may, any other order loses by them. The last columns have the "
        "change of clicks by inverse weighting, which is right if that estimate of examination is. The halves are"
        " random, not earlier and later sessions, so a user may be in both."
    )
    head = ["ranker", "NDCG@10", "difference to the logged order"]
    return Table([*head, *(f"clicks, θ of `{curve}`" for curve in figures[0]["clicks"])], rows, caption)


SCORES = {  # of pairs of a query and an item: name in `judgments.py` -> name on the page
    "judgments": "`ultr judgments`",
    "predicted": "its prediction from the logged position alone",
    "judgments, weight 1": "`ultr judgments --weight 1`, clicks alone",
    "logged": "logged order",
    "ctr": "click rate (CTR)",
    "coec": "COEC",
    "coec-best": "COEC, all impressions at the best position",
    "sdbn": "SDBN, by counting",
    "pbm": "PBM, EM",
    "ubm": "UBM, EM",
    "ultr-sdbn": "SDBN of `ultr bias`",
    "ultr-pbm": "PBM of `ultr bias`",
    "ultr-ubm": "UBM of `ultr bias`",
}


def judged_scores(half: str, bootstrap: int) -> dict[str, Any]:
    """Return the figures of `judgments.py` next to this file."""
    sys.path.append(str(Path(__file__).parent))
    from judgments import real_log

    return real_log(half, bootstrap)


def item_scores(figures: Mapping[str, Any]) -> Table:
    """Return the table of scores of pairs of a query and an item, against grades."""
    found, agreement = figures["results"], figures["agreement"]
    rows = []
    for name, title in SCORES.items():
        ndcg, gain, tau = (found[name][key] for key in ("ndcg@10", "difference", "tau"))
        agrees = agreement[name if name == "judgments" else f"{name}, cut by shares"]
        change = "" if name == "logged" else f"{gain[0]:+.4f} [{gain[1]:+.4f}, {gain[2]:+.4f}]"
        cells = [f"{ndcg[0]:.4f} [{ndcg[1]:.4f}, {ndcg[2]:.4f}]", change, f"{tau[0]:.3f} [{tau[1]:.3f}, {tau[2]:.3f}]"]
        rows.append([title, *cells, f"{agrees['sure']:.1%}", f"{agrees['all']:.1%}"])
    caption = (
        f"Scores of pairs of a query and an item against grades, over the {figures['queries']:,} queries that chose no "
        "setting of `ultr judgments`. *Same grade* is the share of pairs whose grade by the score is that of the log: "
        f"among the {figures['sure']:.1%} of the pairs of which `ultr judgments` is sure, and among all. Grades of "
        "judgments are by its own cut points; other scores are cut so that each grade is as frequent as in the log. "
        "Click models by EM and by counting have the flat prior of PyClick."
    )
    head = [
        "score",
        "NDCG@10",
        "difference to the logged order",
        "Kendall's tau",
        "same grade, sure",
        "same grade, all",
    ]
    return Table(head, rows, caption)


# --- Open Bandit ------------------------------------------------------------------------------------------------------


def read_open_bandit(folder: Path) -> pd.DataFrame:
    """Return the rows of the sample: each is one item in one of three slots. Rows of one page are not marked."""
    frames = []
    for path in sorted(folder.glob("*/*/*.csv")):
        if path.stem == path.parent.name:
            rows = pd.read_csv(path, usecols=["timestamp", "item_id", "position", "click"])
            frames.append(rows.assign(policy=path.parts[-3], query=path.stem))
    if not frames:
        raise SystemExit(f"{folder} has no files such as random/all/all.csv")
    data = pd.concat(frames, ignore_index=True).rename(columns={"item_id": "item"})
    return data.assign(request=np.arange(len(data)))


def open_bandit(data: pd.DataFrame, *, bootstrap: int) -> tuple[list[Part], dict[str, Any]]:
    parts: list[Part] = [Text(OPEN_BANDIT)]
    results: dict[str, Any] = {}
    titles = {"random": "random order", "bts": "Thompson sampling"}
    table = []
    for policy, title in titles.items():
        rows = data[data["policy"] == policy].sort_values("timestamp", kind="stable")
        columns = ["request", "query", "item", "position", "click"]
        report = audit(read_log(rows[columns], features=[]), bootstrap=bootstrap)
        slots = rows.groupby("position")["click"].agg(["size", "sum"])
        p = float(stats.chi2_contingency([slots["sum"], slots["size"] - slots["sum"]]).pvalue)
        items = report.estimates["items"]
        results[policy] = {
            "p": p,
            "summary": summary(report),
            "warnings": [f"{each.name}: {each.what}; {each.hint}" for each in report.pitfalls],
            "slots": slots["size"].tolist(),
            "clicks": slots["sum"].tolist(),
            "reference": report.reference,
            "theta": items.theta.tolist(),
            "low": items.low.tolist(),
            "high": items.high.tolist(),
        }
        for i, (slot, size, clicks) in enumerate(slots.itertuples()):
            interval = stats.binomtest(int(clicks), int(size)).proportion_ci(method="wilson")
            rate = f"{clicks / size:.2%} [{interval.low:.2%}, {interval.high:.2%}]"
            table.append([title, str(slot), f"{size:,}", f"{clicks:,}", rate, cell(results[policy], i)])
    head = ["policy", "slot", "impressions", "clicks", "click rate", "examination by `items`"]
    parts.append(Table(head, table, "Intervals here are over rows, as there are no queries."))
    for policy, title in titles.items():
        found = results[policy]
        lines = [f"- {name}: {found['summary'][name]}" for name in ("how biased", "verdict", "tests")]
        lines += [f"- warning: {each}" for each in found["warnings"]]
        lines.append(f"- click rates of slots: equal rates have p = {found['p']:.2f}")
        parts.append(Text(f"`ultr bias` says about {title}:\n\n" + "\n".join(lines)))
    return parts, results


OPEN_BANDIT = (
    "The small sample of the Open Bandit data set (Saito et al. 2021) that is in the package obp 0.4.1: fashion items"
    " in three slots side by side, in three campaigns. One half was drawn uniformly at random, the other by Thompson "
    "sampling. Each row is taken as a request of one item, because rows of one page are not marked, and the campaign "
    "as its query. The random half is an experiment: its click rates by slot compare like with like. The expected "
    "answer is *no clear bias*."
)


# --- Conclusions ------------------------------------------------------------------------------------------------------


def conclusions(results: Mapping[str, Any]) -> list[Part]:
    """Return what the results say, with their numbers, and what no log of these can say."""
    searches = {name: each for name, each in results.items() if "examination" in each}
    lines = [line for name, each in searches.items() for line in of_search_log(name, each)]
    for ranker in searches.get("clara2", {}).get("rankers", [])[2:]:
        verdict = (
            "better" if ranker["low"] > 0 else "worse" if ranker["high"] < 0 else "neither clearly better nor worse"
        )
        clicks = " and ".join(f"{each['gain']:+.1%} with θ of `{name}`" for name, each in ranker["clicks"].items())
        lines.append(
            f"clara2: {ranker['ranker']} is {verdict} than the logged order by the grades ({ranker['gain']:+.4f}). Its "
            f"clicks by inverse weighting change by {clicks}."
        )
    if "Open Bandit" in results:
        found = results["Open Bandit"]["random"]
        low = min(each for each in found["low"] if each is not None)
        lines.append(
            "Open Bandit: no slot is clearly examined less, in random order and under Thompson sampling. The sample "
            f"is small: an examination of {low:.2f} times that of the most clicked slot is within the intervals of the"
            " random half."
        )
    return [Text("\n".join(f"- {line}" for line in (*lines, *NOT_SUPPORTED)))]


def of_search_log(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    figures = results["examination"]
    curves = {each: curve for each, curve in figures["estimates"].items() if not each.startswith("trust")}
    last, place = figures["positions"][-1], len(figures["positions"]) - 1
    ends = {each: curve["theta"][place] for each, curve in curves.items()}
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    yield (
        f"{name}: users examine lower positions less, by every estimate. How much less is not settled: examination at "
        f"position {last} is between {ends[low]:.3f} (`{low}`) and {ends[high]:.3f} (`{high}`), relative to position 1."
    )
    if GRADED[0] in curves:
        items, equal = (curves[each] for each in ("items", GRADED[0]))
        yield (
            f"{name}: `items` says {items['theta'][place]:.3f} there, and click rates of items with equal grades "
            f"{equal['theta'][place]:.3f}. Either items moved for their relevance, or items of one grade are still "
            "better at the top. The log cannot say which."
        )
    trust = figures["estimates"]["trust, θ"]["theta"]
    if trust[place] > NO_FALL * curves["items"]["theta"][place]:
        yield (
            f"{name}: EM of the trust model is no estimate here. Its θ at position {last} is {trust[place]:.2f}: "
            "pairs have too few impressions to separate θ from their relevance."
        )
    models = {each["model"]: each for each in results["click_models"] if each["model"] not in ("pbm", "cascade")}
    best = max(models.values(), key=lambda each: float(each["gain"]))
    clear = "clearly" if best["low"] > 0 else "not clearly"
    yield (
        f"{name}: {best['model']} predicts held-out clicks best, {clear} better than one curve (`pbm`). Whether users "
        "look at a position then also depends on their other clicks, and a curve is an average."
    )
    without = [each for each, model in models.items() if "features" in each and model["high"] < 0]
    if without:
        names = " and ".join(f"`{each}`" for each in without)
        yield f"{name}: {names} predict clicks worse than `pbm` with a parameter for each pair."


NO_FALL = 3.0  # times the estimate of items, from which on that of the trust model is called none
NOT_SUPPORTED = (
    "That `harvest` and `items` agree is no evidence: both use the same counts and the same assumption.",
    "Do not use EM of the position-based model with a flat prior where pairs are rarely shown. It takes the bias "
    "of its "
    "prior for examination.",
    "Not supported by these logs: that any estimate of examination is right; that users trust positions, or do not; "
    "that a ranker of `ultr train` is better for users than production; and anything about dwell time, other actions, "
    "grids or phones.",
    "To support these, a log needs requests in random order or drawn swaps (`ultr explore` plans them), or an A/B "
    "test.",
)


if __name__ == "__main__":
    main()
