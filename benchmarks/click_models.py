"""Held-out click log-likelihood, an impression, of position-based models of one log, on one split of its requests.

    python benchmarks/click_models.py [LOG] [--seed 0] [--iterations 200]

- `ultr`: θ as `audit` estimates it from the training requests, β by item with a prior: what `HeldOut.score` gives;
- `plain EM`: the model as in Chuklin et al. (2015), examination and relevance hidden, smoothed as PyClick does;
- `clax`: the position-based model of the package clax-models, if it can be imported; it is no dependency of ultr.

Of the requests, 70% are trained on, 10% more choose ultr's prior and stop clax (and then train all but clax), and the
rest judge. The log is by default `yandex-clicks/impressions.csv.gz` under ULTR_DATA.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ultr.labels import Label
from ultr.propensity.counts import Impressions, counted_items, impressions
from ultr.propensity.estimators import harvest, position_based
from ultr.propensity.likelihood import ROWS, TRAINED, TUNED, HeldOut
from ultr.propensity.reading import read_for_audit

RATE, EPOCHS, JUDGED = 0.003, 50, 8192  # of clax: as its guide has them, and lists that it judges at once
ALLOWED = 1e-3  # that ultr may be below the better of the others, relative to it
CLAX = "pip install clax-models==0.1.1 jax==0.7.2 (the flax that it needs cannot be imported with jax 0.10)"


def ultr_models(seen: Impressions, held: np.ndarray, seed: int) -> Iterator[dict[str, Any]]:
    """The two estimates of θ that a log without features allows, each judged as `audit` does."""
    groups = int(seen.group.max()) + 1
    early = (np.arange(groups) < TUNED * groups).astype(float)[:, None]
    for name in ("harvest", "items"):
        started = time.monotonic()
        counts, judge = counted_items(seen, seed=seed), HeldOut(seen, np.asarray(seen.items), seed=seed)
        if counts is None:
            raise SystemExit("no item was clicked and shown at several positions")
        theta = (harvest(counts, early, seed=seed) if name == "harvest" else position_based(counts, early))[0]
        if not np.isfinite(theta).all() or judge.shown[2].sum() != held.sum():
            raise SystemExit("items do not tell θ of all positions, or not all rows judge it: no like comparison")
        yield result(f"ultr, {name}", judge.score(theta), started, theta)


def plain_em(seen: Impressions, held: np.ndarray, iterations: int) -> dict[str, Any]:
    started = time.monotonic()
    items = np.asarray(seen.items)
    shape = int(items.max()) + 1, len(seen.positions)
    cell = items.astype(np.int64) * shape[1] + seen.place
    shown = np.bincount(cell[~held], minlength=shape[0] * shape[1]).reshape(shape)
    clicked = np.bincount(cell[~held & seen.clicked], minlength=shape[0] * shape[1]).reshape(shape)
    missed, by_item, by_place = shown - clicked, shown.sum(1), shown.sum(0)
    theta, beta = np.full(shape[1], 0.5), np.full(shape[0], 0.5)
    for _ in range(iterations):
        no_click = missed / (1 - theta * beta[:, None])
        examined = clicked.sum(0) + (no_click * (1 - beta[:, None])).sum(0) * theta
        relevant = clicked.sum(1) + (no_click * (1 - theta)).sum(1) * beta
        theta, beta = (1 + examined) / (2 + by_place), (1 + relevant) / (2 + by_item)
    beta[by_item == 0] = by_item @ beta / by_item.sum()
    chance = theta[seen.place[held]] * beta[items[held]]
    return result("plain EM", log_likelihood(chance, seen.clicked[held]), started, theta)


class Batches:
    """Lists in batches, as clax takes them: in a new order each time if there is a seed."""

    def __init__(self, columns: Mapping[str, np.ndarray], lists: np.ndarray, size: int, seed: int | None) -> None:
        self.columns, self.lists, self.size = columns, lists, size
        self.rng = None if seed is None else np.random.default_rng(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.lists) / self.size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        order = self.lists if self.rng is None else self.rng.permutation(self.lists)
        for start in range(0, len(order), self.size):
            chosen = order[start : start + self.size]
            yield {name: values[chosen] for name, values in self.columns.items()}


def clax_model(seen: Impressions, part: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    try:
        clax, nnx, optax = (importlib.import_module(name) for name in ("clax", "flax.nnx", "optax"))
    except ImportError as error:
        return {"model": "clax", "absent": str(error), "mend": CLAX}
    started = time.monotonic()
    items, mask = np.asarray(seen.items), np.arange(seen.lengths.max()) < seen.lengths[:, None]
    columns: dict[str, np.ndarray] = {"mask": mask}
    for name, values in (("positions", seen.place + 1), ("query_doc_ids", items + 1), ("clicks", seen.clicked)):
        columns[name] = np.zeros(mask.shape, np.int32)  # 0 is padding
        columns[name][mask] = values
    train = Batches(columns, np.flatnonzero(part == 0), options.batch, options.seed)
    tune, judge = (Batches(columns, np.flatnonzero(part == i), JUDGED, None) for i in (1, 2))
    width, pairs = len(seen.positions), int(items.max()) + 1
    model = clax.PositionBasedModel(positions=width, query_doc_pairs=pairs, rngs=nnx.Rngs(options.seed))
    trainer = clax.Trainer(optax.adamw(RATE), epochs=EPOCHS)
    with contextlib.redirect_stdout(sys.stderr):
        epochs = len(trainer.train(model, train, tune))
    chance = np.concatenate([np.exp(np.asarray(model.predict_clicks(lists), float))[lists["mask"]] for lists in judge])
    theta = np.asarray(model.examination.prob({"positions": np.arange(1, width + 1)}), float)
    value = log_likelihood(chance, seen.clicked[seen.of_rows(part == 2)])
    return result("clax", value, started, theta) | {"epochs": epochs}


def log_likelihood(chance: np.ndarray, clicked: np.ndarray) -> float:
    return float(np.log(np.clip(np.where(clicked, chance, 1 - chance), 1e-12, 1)).mean())


def result(model: str, value: float, started: float, theta: np.ndarray) -> dict[str, Any]:
    seconds, relative = round(time.monotonic() - started, 2), (theta / theta[0]).round(4).tolist()
    return {"model": model, "log-likelihood": round(value, 7), "seconds": seconds, "theta": relative}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("ULTR_DATA", ".")) / "yandex-clicks" / "impressions.csv.gz"
    parser.add_argument("log", nargs="?", type=Path, default=default, help="request, query, item, position and click")
    parser.add_argument("--seed", type=int, default=0, help="of the split, of ultr's samples and of clax")
    parser.add_argument("--iterations", type=int, default=200, help="of plain EM")
    parser.add_argument("--batch", type=int, default=128, help="lists in a batch of clax")
    options = parser.parse_args()
    log, _ = read_for_audit(options.log)
    if log.weights is not None or log.item_ids is None or log.rows > ROWS:
        raise SystemExit(f"the models are compared on unweighted logs with items, of at most {ROWS} rows")
    seen = impressions(log, np.asarray(Label("click")(log.actions)) > 0, seed=options.seed)
    groups = int(seen.group.max()) + 1
    part = np.digitize(seen.group, [TRAINED * groups, TUNED * groups])  # as in HeldOut
    held = seen.of_rows(part == 2)
    print(json.dumps({"requests": len(log), "rows": log.rows, "judging": int(held.sum()), "seed": options.seed}))
    own = list(ultr_models(seen, held, options.seed))
    others = [plain_em(seen, held, options.iterations), clax_model(seen, part, options)]
    print(*map(json.dumps, own + others), sep="\n")
    best = max(figures["log-likelihood"] for figures in others if "log-likelihood" in figures)
    above = {figures["model"]: round((figures["log-likelihood"] - best) / abs(best), 6) for figures in own}
    print(json.dumps({"above the better other": above, "reached": all(a >= -ALLOWED for a in above.values())}))


if __name__ == "__main__":
    main()
