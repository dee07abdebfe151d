"""Count the verdicts of `ultr bias` on simulated logs in which different things decide the order.

    python benchmarks/verdict.py --replications 100

Clicks depend on features that the log has and on a score that it does not have. For each world it prints JSON: the
verdicts, the mean share of the order that features explain, and the mean relative error of θ. Nothing in these worlds
identifies θ:

- `unseen`: the order is that of the score that the log does not have;
- `mixed`: the order is that of features and of this score;
- `noisy`: the order is that of features and of chance;
- `unmarked`: the order is random, and the log does not say so.

In these worlds something does, although production ranks by features and by the score that the log does not have:

- `traffic`: one request in twenty is in random order, and a column marks it;
- `recurring`: items have ids, and the weights of the production ranker change from request to request.

In these worlds 1% of the requests are those of bots, which click on everything:

- `bots`: as `traffic`, and the suspicious requests are left out, which is the default;
- `bots kept`: as `bots`, with `keep_suspicious`.

In the last worlds products recur, each with one id and its own features. The log has no query:

- `query`: products are moved by how well they match the query, which decides relevance too;
- `users`: products are moved by the taste of the user for their features, which decides relevance too;
- `chance`: products are moved by chance alone, so that the assumption of estimates from items holds;
- `query traffic`: as `query`, and one request in five is in random order, which a column marks.

The results also say how many logs failed each test of the assumption (`refuted`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

import numpy as np
import pyarrow as pa

from ultr.bias.audit import audit
from ultr.log import Log

SHOWN, FEATURES, QUERIES, CANDIDATES = 20, 4, 100, 30
THETA = np.arange(1, SHOWN + 1) ** -0.6
# The weights of seen features, of the unseen score and of chance in the order; the number of requests in a log.
WORLDS = {
    "unseen": ((0, 1, 0), 5_000),
    "mixed": ((1, 1, 0), 5_000),
    "noisy": ((1, 0, 1), 5_000),
    "unmarked": ((0, 0, 1), 5_000),
    "traffic": ((1, 1, 0), 60_000),
    "recurring": ((1, 1, 1), 20_000),
    "bots": ((1, 1, 0), 60_000),
    "bots kept": ((1, 1, 0), 60_000),
}
# The weights of the match with the query, of the user's taste and of chance in the order; the number of requests.
PRODUCTS = {
    "query": ((1, 0, 1), 10_000),
    "users": ((0, 1, 1), 10_000),
    "chance": ((0, 0, 1), 10_000),
    "query traffic": ((1, 0, 1), 20_000),
}


def world(kind: str, *, seed: int = 0, requests: int = 0) -> Log:
    """Simulate a log of position-based users, whose relevance depends on features and on an unseen score."""
    rng = np.random.default_rng(seed)
    (seen, unseen, chance), usual = WORLDS[kind]
    requests = requests or usual
    recurring, traffic = kind == "recurring", kind in ("traffic", "bots", "bots kept")
    queries = rng.integers(0, QUERIES, requests) if recurring else np.arange(requests)
    number = QUERIES if recurring else requests
    features = rng.normal(size=(number, CANDIDATES, FEATURES)).astype(np.float32)
    taste = rng.normal(size=FEATURES)
    score, hidden = features @ (taste / np.linalg.norm(taste)), rng.normal(size=(number, CANDIDATES))
    beta = 1 / (1 + np.exp(2 - score - hidden))
    order = seen * score[queries] + unseen * hidden[queries] + chance * rng.normal(size=(requests, CANDIDATES))
    marked = traffic & (rng.random(requests) < 0.05)
    order[marked] = rng.random((int(marked.sum()), CANDIDATES))
    chosen = np.argsort(-order, axis=1)[:, :SHOWN]
    clicked = rng.random((requests, SHOWN)) < THETA * beta[queries[:, None], chosen]
    if kind.startswith("bots"):
        clicked |= rng.random((requests, 1)) < 0.01
    return Log(
        features=features[queries[:, None], chosen].reshape(-1, FEATURES),
        offsets=np.arange(requests + 1) * SHOWN,
        request_ids=pa.array(np.arange(requests)),
        feature_names=tuple(f"x{i}" for i in range(FEATURES)),
        positions=np.tile(np.arange(1, SHOWN + 1), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array((queries[:, None] * CANDIDATES + chosen).reshape(-1)) if recurring else None,
        context={"query": pa.array(queries)} if recurring else {"randomised": pa.array(marked)} if traffic else {},
    )


def shop(kind: str, *, seed: int = 0, requests: int = 0) -> Log:
    """Simulate a log of products, whose relevance has a part of the product and a part that depends on the request."""
    rng = np.random.default_rng(seed)
    (match, taste, chance), usual = PRODUCTS[kind]
    requests, number = requests or usual, 10 * CANDIDATES
    features, quality = rng.normal(size=(number, FEATURES)).astype(np.float32), rng.normal(size=number)
    products = np.argsort(rng.random((QUERIES, number)), axis=1)[:, :CANDIDATES]
    query = rng.integers(0, QUERIES, requests)
    products, fit = products[query], rng.normal(size=products.shape)[query]
    users = rng.normal(size=(requests, FEATURES)) / np.sqrt(FEATURES)
    liked = np.einsum("rcf,rf->rc", features[products], users)
    wanted = quality[products] + match * fit + taste * liked
    order = wanted + chance * rng.normal(size=wanted.shape)
    marked = (kind == "query traffic") & (rng.random(requests) < 0.2)
    order[marked] = rng.random((int(marked.sum()), CANDIDATES))
    chosen = np.argsort(-order, axis=1)[:, :SHOWN]
    products, wanted = (np.take_along_axis(values, chosen, axis=1) for values in (products, wanted))
    clicked = rng.random((requests, SHOWN)) < THETA / (1 + np.exp(2 - wanted))
    return Log(
        features=features[products].reshape(-1, FEATURES),
        offsets=np.arange(requests + 1) * SHOWN,
        request_ids=pa.array(np.arange(requests)),
        feature_names=tuple(f"x{i}" for i in range(FEATURES)),
        positions=np.tile(np.arange(1, SHOWN + 1), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array(products.reshape(-1)),
        context={"randomised": pa.array(marked)} if marked.any() else {},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=100, help="logs per world")
    parser.add_argument("--requests", type=int, default=0, help="requests per log (0: the default of the world)")
    parser.add_argument("--bootstrap", type=int, default=30, help="bootstrap replicates per log")
    parser.add_argument("--sample", type=int, default=600, help="requests for estimators that need features")
    parser.add_argument("--worlds", default=",".join([*WORLDS, *PRODUCTS]), help="worlds, separated by commas")
    options = parser.parse_args()
    for kind in options.worlds.split(","):
        verdicts: Counter[str] = Counter()
        refuted: Counter[str] = Counter()
        explained, errors, inside = [], [], []
        for seed in range(options.replications):
            log = (shop if kind in PRODUCTS else world)(kind, seed=seed, requests=options.requests)
            part = log.select(np.arange(min(options.sample, len(log))))
            keep = kind == "bots kept"
            report = audit(log, sample=part, bootstrap=options.bootstrap, seed=seed, keep_suspicious=keep)
            verdicts[report.verdict.status] += 1
            refuted.update(test.name for test in report.refutations if not test.passed)
            explained.append(report.explained or 0.0)
            if report.anchor is not None:
                reference = report.positions.tolist().index(report.reference)
                true = THETA / THETA[reference]
                errors.append(np.abs(report.anchor.theta / true - 1).mean())
                inside.append(np.delete((report.anchor.low <= true) & (true <= report.anchor.high), reference))
        results = {
            "world": kind,
            "verdicts": dict(verdicts),
            "refuted": dict(refuted),
            "order explained": round(float(np.mean(explained)), 3),
            "mean relative error": round(float(np.mean(errors)), 3) if errors else None,
            "coverage": round(float(np.mean(inside)), 3) if inside else None,
        }
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
