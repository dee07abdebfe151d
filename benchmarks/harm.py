"""Does the default do harm on a real search log? NDCG@10 by relevance grades that nothing was trained on.

    ULTR_DATA=DATA python benchmarks/harm.py [--folds 5] [--seed 0]

The log is `clara2`: 10 results, few clicks. Features are what production knows without clicks: how high and how often
it shows an item for the query, and for how many queries. Rankers are trained on the clicks of four fifths of the
queries, and score the others. COEC (clicks over expected clicks by rank) and the position-based model with a flat prior
have no features: they order the items of a query by its own clicks. It is not known who made the grades, and grade 5 is
almost only at position 1, so the logged order may agree with them for that reason.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import lightgbm
import numpy as np
import pandas as pd

import ultr
from ultr.training.config import make_config
from ultr.training.run import run_training

FEATURES = ("mean_position", "best_position", "times_shown", "queries_of_item", "share_of_query")
GAIN, PRIOR = 10, 1.0  # cut-off; clicks and impressions of the flat prior


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data = pd.read_parquet(Path(os.environ["ULTR_DATA"]) / "clara2" / "dev.parquet")
    data = with_features(data)
    scores = {"the logged order": -data["position"].to_numpy(float), **by_counts(data)}
    fold = np.random.default_rng(given.seed).integers(0, given.folds, data["query"].nunique())
    fold = fold[data["query"].astype("category").cat.codes]
    for name in ("ultr train", "ultr train --ranker mlp", "ultr train --ranker lightgbm", "LambdaRank on clicks"):
        scores[name] = np.zeros(len(data))
        for number in range(given.folds):
            rows = fold == number
            scores[name][rows] = learned(name, data[~rows], data[rows], given.seed)
    first = by_query(data, scores["the logged order"])
    for name, values in scores.items():
        found = by_query(data, values)
        test = ultr.paired_test(found, first)
        against = (
            "" if name == "the logged order" else f" ({test.difference:+.4f}, {test.low:+.4f} to {test.high:+.4f})"
        )
        print(f"{found.mean():.4f}  {name}{against}")


def with_features(data: pd.DataFrame) -> pd.DataFrame:
    pair = data.groupby(["query", "item"])["position"]
    shown = data.groupby("query")["request"].transform("nunique")
    columns = {
        "mean_position": pair.transform("mean"),
        "best_position": pair.transform("min"),
        "times_shown": pair.transform("size"),
        "queries_of_item": data.groupby("item")["query"].transform("nunique"),
        "share_of_query": pair.transform("size") / shown,
    }
    return data.assign(**columns).sort_values(["request", "position"], kind="stable").reset_index(drop=True)


def by_counts(data: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the scores of COEC, and of the position-based model with a flat prior, from the clicks of each pair."""
    rate = data.groupby("position")["click"].transform("mean")
    sums = data.assign(rate=rate, theta=rate / rate.max()).groupby(["query", "item"])[["click", "rate", "theta"]]
    total = sums.transform("sum")
    flat = (total["click"] + PRIOR) / (total["theta"] + 2 * PRIOR)
    return {"COEC": (total["click"] / total["rate"]).to_numpy(), "position model, flat prior": flat.to_numpy()}


def learned(name: str, train: pd.DataFrame, test: pd.DataFrame, seed: int) -> np.ndarray:
    columns = ["request", "query", "item", "position", "click", *FEATURES]
    if name == "LambdaRank on clicks":
        lengths = train.groupby("request", sort=False).size()
        rows = lightgbm.Dataset(train[list(FEATURES)], train["click"], group=lengths)
        parameters = {"objective": "lambdarank", "num_leaves": 15, "learning_rate": 0.05, "verbosity": -1, "seed": seed}
        return np.asarray(lightgbm.train(parameters, rows, 100).predict(test[list(FEATURES)]))
    ranker = name.partition("--ranker ")[2] or "auto"
    config = make_config(label="click", ranker=ranker, columns={"features": list(FEATURES)}, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        run = run_training(config, Path(folder) / "run", source=train[columns])
        return np.asarray(ultr.load_model(run).score(ultr.read_log(test[columns], features=list(FEATURES))))


def by_query(data: pd.DataFrame, scores: np.ndarray) -> np.ndarray:
    """Return the mean NDCG@10 by grades of the requests of each query that has grades; ties keep the logged order."""
    graded = data["grade"].notna().to_numpy()
    data, scores = data[graded], scores[graded]
    request = data["request"].astype("category").cat.codes.to_numpy()
    gain = 2.0 ** data["grade"].to_numpy(float) - 1

    def dcg(by: np.ndarray) -> np.ndarray:
        order = np.lexsort((np.arange(len(by)), -by, request))
        starts = np.r_[0, np.flatnonzero(np.diff(request[order])) + 1]
        rank = np.arange(len(by)) - np.repeat(starts, np.diff(np.r_[starts, len(by)]))
        return np.bincount(request[order], np.where(rank < GAIN, gain[order] / np.log2(rank + 2), 0))

    best = dcg(gain)
    query = data.groupby("request", sort=True)["query"].first().to_numpy()
    found = (
        pd.Series(np.divide(dcg(scores), best, out=np.full(len(best), np.nan), where=best > 0)).groupby(query).mean()
    )
    values: np.ndarray = found.dropna().to_numpy()
    return values


if __name__ == "__main__":
    main()
