"""A script for torchrun: trains each case in one process, then in all of them together, and saves the results.

The processes connect only after the cases for one process are done, so that those need no start of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

import ultr.methods.position_model
import ultr.training.biases
import ultr.training.examining
from bias_fitting import fit_bias
from conftest import make_shown_log
from lists_folder import write_lists
from runs import KNOWN, quick
from ultr.bias.examination import Examination
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import METHODS, Method, MethodInputs, make_method
from ultr.training.config import Config, TrainingOptions
from ultr.training.feed import Feed
from ultr.training.loop import start, take_step
from ultr.training.run import run_training
from ultr.utils.distributed import check_equal, gather_shares, own_share, process_group, rank, size

FEATURES = 5
FAST = {"steps": 8, "bias_steps": 12, "batch": 32, "device": "cpu"}


class Case(NamedTuple):
    """A method, how it is trained, and in what precision."""

    method: str
    options: dict[str, Any] = {}  # noqa: RUF012
    training: dict[str, Any] = {}  # noqa: RUF012
    double: bool = True
    dropout: float = 0.0


VARIANTS = {
    **{name: Case(name) for name in METHODS},
    "bayes-ipw": Case("pairwise-em", {"loss": "bayes-ipw"}),
    "opt-exact": Case("pairwise-em", {"loss": "opt", "weights": "exact"}),
    "regression-pairs": Case("pairwise-em", {"loss": "bayes-ipw", "theta": "regression", "trust": "pairs"}),
}


def _cases() -> Iterator[tuple[str, Case]]:
    adam = {"optimizer": "adam", "lr": 1e-3, "steps": 6, "bias_steps": 6}
    for number, (name, case) in enumerate(VARIANTS.items()):
        yield f"{name} double", case._replace(dropout=0.2 * (number % 2))
    for name in ("pairwise-em", "lambdarank", "dla"):
        yield f"{name} adam", Case(name, double=False, training=adam, dropout=0.2)
    yield "pairwise-em default", Case("pairwise-em", double=False)


CASES = dict(_cases())


def logged() -> Log:
    """Return clicks and dwell times on 400 requests with different weights."""
    log, _ = simulate_log(make_shown_log(requests=400, features=FEATURES), User(), seed=0)
    weights = torch.rand(len(log), generator=torch.Generator().manual_seed(0)) + 0.5
    return replace(log, weights=weights.numpy())


def in_double(lists: Lists) -> Lists:
    actions = {name: values.double() for name, values in lists.actions.items()}
    return replace(lists, features=lists.features.double(), weights=lists.weights.double(), actions=actions)


def feeding(double: bool) -> Callable[..., Callable[[int], Lists]]:
    def make(*args: Any, **options: Any) -> Callable[[int], Lists]:
        feed = Feed(*args, **options)
        return (lambda step: in_double(feed(step))) if double else feed

    return make


def trained(case: Case, log: Log) -> Method:
    torch.manual_seed(0)
    inputs = MethodInputs(
        label=Label(),
        features=FEATURES,
        positions=tuple(range(1, 13)),
        ranker_options={"hidden": (32, 16), "dropout": case.dropout},
        feature_names=log.feature_names,
        binary=("click",),
    )
    method = make_method(case.method, inputs, **case.options)
    if case.double:
        method.double()
    ultr.training.biases.Feed = feeding(case.double)  # fit_bias reads its batches from this one
    options = TrainingOptions(**{**FAST, **case.training})
    state = start(method, log, options)
    fit_bias(method, log, options)
    feed = feeding(case.double)(ListBatches(log), batch=options.batch, seed=options.seed)
    while state.step < options.steps:
        take_step(state, feed(state.step), options)
    return method


def keep(path: Path, method: Method, log: Log) -> None:
    features = torch.from_numpy(log.features).to(next(method.parameters()).dtype)
    with torch.no_grad():
        scores = method.eval().score(features)
    save_file({**{f"state.{n}": t.clone() for n, t in method.state_dict().items()}, "scores": scores}, path)


def communicate(out: Path) -> None:
    """Write the results of `gather_shares` and `check_equal` with several processes."""
    shares = [gather_shares(torch.arange(n).float()[own_share(n)], n) for n in range(9)]
    said = ""
    try:
        check_equal(7, "a constant")
        check_equal(rank() + 3, "their number")
    except DataError as error:
        said = str(error)
    (out / f"met-{rank()}.txt").write_text(f"{size()}\n{[share.tolist() for share in shares]}\n{said}")


def guessed(log: Log, *_: Any, **__: Any) -> Examination:
    """Replace the estimate of examination from a log, which takes long."""
    if rank():
        raise AssertionError("only the first process estimates")
    count = int(log.positions.max())
    theta = 1 / np.arange(1, count + 1)
    impressions = np.bincount(log.positions, minlength=count + 1)[1:].astype(float)
    zeta = np.linspace(0.05, 0, count) * theta
    return Examination(tuple(range(1, count + 1)), theta, zeta, impressions, 0.1 * impressions, moved=1e-4, strata=1)


def in_memory(out: Path) -> Config:
    """Return the configuration of a run that reads lists into memory."""
    return quick(out / "lists", dropout=0.2, propensities=KNOWN, stream="no", ranker="auto")


def main() -> None:
    out, mine = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    ultr.methods.position_model.estimate_examination = guessed
    ultr.training.examining.estimate_examination = guessed
    log = logged()
    for number, (name, case) in enumerate(CASES.items()):
        if number % 2 == mine:
            keep(out / f"{name} alone.safetensors", trained(case, log), log)
    if mine == 0:
        write_lists(log, out / "lists")
        os.environ["WORLD_SIZE"] = "1"  # train as if there were no other process
        run_training(in_memory(out).with_options(ranker="mlp"), out / "run alone")
        os.environ["WORLD_SIZE"] = "2"
    with process_group("cpu"):
        communicate(out)
        run_training(in_memory(out), out / "run together")
        for name, case in CASES.items():
            keep(out / f"{name} {rank()}.safetensors", trained(case, log), log)


if __name__ == "__main__":
    main()
