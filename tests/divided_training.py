"""Started by torchrun: trains each case in one process, then in all of them together, and keeps what comes out.

Before they meet, each process is one of its own: so what one process would do is done here too, and costs no start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import ultr.methods.position_model
import ultr.training
from conftest import make_shown_log
from lists_folder import write_lists
from ultr.errors import DataError
from ultr.examination import Examination
from ultr.feeding import Feed
from ultr.labels import Label
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.methods import METHODS, Method, MethodInputs, make_method
from ultr.preparing import RunConfig
from ultr.processes import check_alike, joined, joined_shares, own_share, rank, size
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions, fit_first, start, take_step

FEATURES = 5
FAST = {"steps": 15, "bias_steps": 15, "batch": 32, "device": "cpu"}


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
        dropout = 0.2 * (number % 2)
        yield f"{name} double", case._replace(dropout=dropout)
        yield f"{name} adam", case._replace(dropout=dropout, double=False, training=adam)
    yield "pairwise-em default", Case("pairwise-em", double=False)


CASES = dict(_cases())


def logged() -> Log:
    """Clicks and dwell times on 400 requests, which do not weigh alike."""
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
    ultr.training.Feed = feeding(case.double)  # that of what comes before the ranker
    options = TrainingOptions(**{**FAST, **case.training})
    state = start(method, log, options)
    fit_first(method, log, options)
    feed = feeding(case.double)(ListBatches(log), batch=options.batch, seed=options.seed)
    while state.step < options.steps:
        take_step(state, feed(state.step), options)
    return method


def keep(path: Path, method: Method, log: Log) -> None:
    features = torch.from_numpy(log.features).to(next(method.parameters()).dtype)
    with torch.no_grad():
        scores = method.eval().score(features)
    save_file({**{f"state.{n}": t.clone() for n, t in method.state_dict().items()}, "scores": scores}, path)


def meet(out: Path) -> None:
    """What the functions of several processes give, where there are some."""
    shares = [joined_shares(torch.arange(n).float()[own_share(n)].numpy(), n, torch.device("cpu")) for n in range(9)]
    said = ""
    try:
        check_alike(7, "what they have in common")
        check_alike(rank() + 3, "their number")
    except DataError as error:
        said = str(error)
    (out / f"met-{rank()}.txt").write_text(f"{size()}\n{[share.tolist() for share in shares]}\n{said}")


def guessed(log: Log, *_: Any, **__: Any) -> Examination:
    """In place of the examination that is estimated from a log, which takes long."""
    if rank():
        raise AssertionError("only the first process estimates")
    count = int(log.positions.max())
    theta = 1 / torch.arange(1, count + 1)
    impressions = torch.bincount(torch.from_numpy(log.positions), minlength=count + 1)[1:].float()
    zeta = torch.linspace(0.05, 0, count) * theta
    return Examination(tuple(range(1, count + 1)), theta, zeta, impressions, 0.1 * impressions, moved=1e-4, strata=1)


def in_memory(out: Path) -> RunConfig:
    """A run that reads lists into memory."""
    training = TrainingOptions(**FAST, evaluate_every=8)
    known = {str(position): 1 / position for position in range(1, 13)}
    options = {"hidden": (16,), "dropout": 0.2}
    return RunConfig(str(out / "lists"), ranker_options=options, propensities=known, stream="no", training=training)


def main() -> None:
    out, mine = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    ultr.methods.position_model.estimate_examination = guessed
    log = logged()
    for number, (name, case) in enumerate(CASES.items()):
        if number % 2 == mine:
            keep(out / f"{name} alone.safetensors", trained(case, log), log)
    if mine == 0:
        write_lists(log, out / "lists")
        os.environ["WORLD_SIZE"] = "1"  # as if nothing had been started beside it
        run_training(in_memory(out), out / "run alone")
        os.environ["WORLD_SIZE"] = "2"
    with joined("cpu"):
        meet(out)
        run_training(in_memory(out), out / "run together")
        for name, case in CASES.items():
            keep(out / f"{name} {rank()}.safetensors", trained(case, log), log)


if __name__ == "__main__":
    main()
