"""Fit a click model of clax-models to the lists of a file, for `benchmarks/click_models.py`. It does not import ultr.

    python benchmarks/clax_models.py LISTS.npz MODEL [--batch 128] [--epochs 50] [--seed 0]

LISTS.npz has the arrays mask, positions, query_doc_ids, clicks [lists, items] and part [lists]: 0 to fit the model, 1
to stop its training, 2 to evaluate it. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import clax
import numpy as np
import optax
from flax import nnx

LEARNING_RATE = 0.003  # from the guide of clax
EVALUATION_BATCH = 8192


class Batches:
    """Batches of lists, in a new order at each iteration if there is a seed; `starts` are the times of iterations."""

    def __init__(self, columns: dict[str, np.ndarray], lists: np.ndarray, size: int, seed: int | None) -> None:
        self.columns, self.lists, self.size = columns, lists, size
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.starts: list[float] = []

    def __len__(self) -> int:
        return math.ceil(len(self.lists) / self.size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        self.starts.append(time.perf_counter())
        order = self.lists if self.rng is None else self.rng.permutation(self.lists)
        for start in range(0, len(order), self.size):
            yield {name: values[order[start : start + self.size]] for name, values in self.columns.items()}


def make(name: str, positions: int, pairs: int, seed: int) -> Any:
    rngs = nnx.Rngs(seed)
    if name == "pbm":
        return clax.PositionBasedModel(positions=positions, query_doc_pairs=pairs, rngs=rngs)
    if name == "ubm":
        return clax.UserBrowsingModel(positions=positions, query_doc_pairs=pairs, rngs=rngs)
    if name == "cascade":
        return clax.CascadeModel(query_doc_pairs=pairs, rngs=rngs)
    if name == "ccm":
        return clax.ClickChainModel(query_doc_pairs=pairs, rngs=rngs)
    return clax.DynamicBayesianNetwork(query_doc_pairs=pairs, fix_continuation=name == "sdbn", rngs=rngs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists")
    parser.add_argument("model", choices=["pbm", "ubm", "dbn", "sdbn", "cascade", "ccm"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = np.load(options.lists)
    columns = {name: data[name] for name in ("mask", "positions", "query_doc_ids", "clicks")}
    model = make(options.model, int(data["positions"].max()), int(data["query_doc_ids"].max()), options.seed)
    lists = [np.flatnonzero(data["part"] == i) for i in range(3)]
    train = Batches(columns, lists[0], options.batch, options.seed)
    tune = Batches(columns, lists[1], EVALUATION_BATCH, None)
    trainer = clax.Trainer(optax.adamw(LEARNING_RATE), epochs=options.epochs)
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train(model, train, tune)
    total = rows = 0.0
    for batch in Batches(columns, lists[2], EVALUATION_BATCH, None):
        clicks, use = batch["clicks"], batch["mask"]
        if (
            options.model == "cascade"
        ):  # the exact likelihood of the attractions that clax has found, see click_models.py
            use = use & (np.cumsum(clicks, axis=1) - clicks == 0)
            log_probability = np.asarray(model.attraction.log_prob(batch), float)
        else:
            log_probability = np.asarray(model.predict_conditional_clicks(batch), float)
        no_click = np.log1p(-np.exp(np.minimum(log_probability, -1e-12)))
        total += np.where(clicks, log_probability, no_click)[use].sum()
        rows += use.sum()
    # An epoch ends where its validation starts. The first epoch also compiles, which the median leaves out.
    seconds = [end - start for start, end in zip(train.starts, tune.starts, strict=True)]
    print(
        json.dumps(
            {"log_likelihood": total / rows, "seconds_per_epoch": float(np.median(seconds)), "epochs": len(seconds)}
        )
    )


if __name__ == "__main__":
    main()
