"""Compare the held-out click log-likelihood of position-based click models, per impression, on one log.

    python benchmarks/position_based.py [LOG] [--seed 0] [--iterations 200]

- `ultr`: θ as `audit` estimates it from the training requests, and β by item with a prior (`HeldOut.score`);
- `plain EM`: the model of Chuklin et al. (2015), examination and relevance hidden, smoothed as in PyClick;
- `clax`: the position-based model of clax-models, if that package is installed (`ultr` does not depend on it).

70% of the requests are for training. Another 10% select the prior of `ultr` and stop the training of clax; the models
other than clax are then trained on them too. The rest is held out for the comparison. The default log is
`yandex-clicks/impressions.csv.gz` under ULTR_DATA.
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

from ultr.bias.counts import Impressions, counted_items, impressions
from ultr.bias.estimators import harvest, position_based
from ultr.bias.identification import ROWS, TRAINED, TUNED, HeldOut
from ultr.log.labels import Label
from ultr.log.sampling import read_for_audit

# The learning rate and the epochs of clax, from its guide; the lists per batch when it is evaluated.
LEARNING_RATE, EPOCHS, EVALUATION_BATCH = 0.003, 50, 8192
TOLERANCE = 1e-3  # the largest relative amount by which ultr may be below the better of the other models
INSTALL_CLAX = "pip install clax-models==0.1.1 jax==0.7.2 (its version of flax does not work with jax 0.10)"


def ultr_models(seen: Impressions, held: np.ndarray, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the results of the two estimates of θ that need no features, each evaluated as in `audit`."""
    groups = int(seen.group.max()) + 1
    early = (np.arange(groups) < TUNED * groups).astype(float)[:, None]
    for name in ("harvest", "items"):
        started = time.monotonic()
        counts, held_out = counted_items(seen, seed=seed), HeldOut(seen, np.asarray(seen.items), seed=seed)
        if counts is None:
            raise SystemExit("no item was clicked and shown at several positions")
        theta = (harvest(counts, early, seed=seed) if name == "harvest" else position_based(counts, early))[0]
        if not np.isfinite(theta).all() or held_out.parts[3].shown.sum() != held.sum():
            raise SystemExit("cannot compare: θ of a position is not identified, or held-out rows are missing")
        yield result(f"ultr, {name}", held_out.score(theta), started, theta)


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
    """Batches of lists in the format of clax, in a new order at each iteration if there is a seed."""

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
        return {"model": "clax", "missing": str(error), "hint": INSTALL_CLAX}
    started = time.monotonic()
    items, mask = np.asarray(seen.items), np.arange(seen.lengths.max()) < seen.lengths[:, None]
    columns: dict[str, np.ndarray] = {"mask": mask}
    for name, values in (("positions", seen.place + 1), ("query_doc_ids", items + 1), ("clicks", seen.clicked)):
        columns[name] = np.zeros(mask.shape, np.int32)  # 0 is padding
        columns[name][mask] = values
    train = Batches(columns, np.flatnonzero(part == 0), options.batch, options.seed)
    tune, test = (Batches(columns, np.flatnonzero(part == i), EVALUATION_BATCH, None) for i in (1, 2))
    width, pairs = len(seen.positions), int(items.max()) + 1
    model = clax.PositionBasedModel(positions=width, query_doc_pairs=pairs, rngs=nnx.Rngs(options.seed))
    trainer = clax.Trainer(optax.adamw(LEARNING_RATE), epochs=EPOCHS)
    with contextlib.redirect_stdout(sys.stderr):
        epochs = len(trainer.train(model, train, tune))
    chance = np.concatenate([np.exp(np.asarray(model.predict_clicks(lists), float))[lists["mask"]] for lists in test])
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
    parser.add_argument("log", nargs="?", type=Path, default=default, help="with request, query, item, position, click")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the split, of the samples of ultr and of clax")
    parser.add_argument("--iterations", type=int, default=200, help="iterations of plain EM")
    parser.add_argument("--batch", type=int, default=128, help="lists per batch of clax")
    options = parser.parse_args()
    log, _ = read_for_audit(options.log)
    if log.weights is not None or log.item_ids is None or log.rows > ROWS:
        raise SystemExit(f"the log must have items, no weights, and at most {ROWS} rows")
    seen = impressions(log, np.asarray(Label("click")(log.actions)) > 0, seed=options.seed)
    groups = int(seen.group.max()) + 1
    part = np.digitize(seen.group, [TRAINED * groups, TUNED * groups])  # as in HeldOut
    held = seen.of_rows(part == 2)
    print(json.dumps({"requests": len(log), "rows": log.rows, "held-out rows": int(held.sum()), "seed": options.seed}))
    ours = list(ultr_models(seen, held, options.seed))
    others = [plain_em(seen, held, options.iterations), clax_model(seen, part, options)]
    print(*map(json.dumps, ours + others), sep="\n")
    best = max(model["log-likelihood"] for model in others if "log-likelihood" in model)
    above = {model["model"]: round((model["log-likelihood"] - best) / abs(best), 6) for model in ours}
    print(json.dumps({"relative to the best other": above, "passed": all(a >= -TOLERANCE for a in above.values())}))


if __name__ == "__main__":
    main()
