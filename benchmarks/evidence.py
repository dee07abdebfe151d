"""Measure how well each source of evidence estimates examination, and the one that training chooses.

    python benchmarks/evidence.py [--seeds 5] [--first-seed 0] [--requests 20000] [--strata]

The log is that of `tests/bias/shop.py`: a shop with several production rankers, whose order the features hardly
explain. For each kind of shop it prints the mean relative error of θ by source, and how often each source is chosen.
`--strata` also recovers the logging ranker, which takes most of the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bias"))
from shop import SHOWN, error_of, shop  # type: ignore[import-not-found]

from ultr.bias.counts import impressions, log_counts
from ultr.bias.estimators import best_source, fill_gaps, fit_conditional
from ultr.bias.examination import estimate_examination
from ultr.log.labels import Label

NO_QUERY = ("item", "randomised")
SHOPS: dict[str, dict[str, Any]] = {
    "three rankers, 2% random": {},
    "one ranker, 2% random": {"rankers": 1},
    "no query column, 2% random": {"columns": NO_QUERY},
    "no query column, 10% random": {"columns": NO_QUERY, "random_share": 0.1},
    "no query column, relevance hardly depends on it": {"columns": NO_QUERY, "match": 0.3},
    "no random requests": {"random_share": 0.0},
    "only random requests marked, 2%": {"columns": ("randomised",)},
    "only items": {"columns": ("item",)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="logs of each kind")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first log of each kind")
    parser.add_argument("--requests", type=int, default=20_000, help="requests of a log")
    parser.add_argument("--strata", action="store_true", help="also estimate by strata of the logging score")
    options = parser.parse_args()
    for kind, settings in SHOPS.items():
        errors: dict[str, list[float]] = {}
        chosen: Counter[str] = Counter()
        seconds = 0.0
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            log = shop(options.requests, seed=seed, **settings)
            started = time.monotonic()
            seen = impressions(log, log.actions["click"] > 0, seed=seed)
            counts = log_counts(seen, seed=seed)
            sources, best = counts.sources, best_source(counts)
            seconds += time.monotonic() - started
            theta = {name: fit_conditional(c.total()).theta for name, c in sources.items()}
            theta["click rates"] = log.actions["click"].reshape(-1, SHOWN).mean(0)
            if options.strata or best is None:
                theta["strata"] = estimate_examination(log, Label("click"), seed=seed, theta_from="strata").theta
            theta["auto"] = estimate_examination(log, Label("click"), seed=seed).theta
            chosen["strata" if best is None else best.name] += 1
            for name, values in theta.items():
                errors.setdefault(name, []).append(error_of(fill_gaps(values)))
        by_source = ", ".join(f"{name} {np.mean(values):.1%}" for name, values in errors.items())
        print(f"{kind}: {by_source}; chosen: {dict(chosen)}; {seconds / options.seeds:.2f} s per log", flush=True)


if __name__ == "__main__":
    main()
