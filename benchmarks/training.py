"""Measure the time of a training step, as a ratio to the necessary passes of its networks on the same rows.

    python benchmarks/training.py [--device cuda] [--steps 40]

A step has 256 lists of 10 items with 136 features, a 512-256-128 network, and newly simulated feedback. The necessary
passes are the forward and backward pass of the trained network, and a forward pass of a network that it only reads:
a bias model, or in an E-step the ranker itself, without dropout. All methods take turns, so that other load on the
machine affects them equally. Times are medians. The bounds are:

- a step takes at most 1.3 times its passes;
- a step of `pairwise-em` takes at most 3.5 times a step of `lambdarank`, not counting its bias model, which is trained
  before and is measured separately;
- memory does not grow with the number of steps.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ultr.datasets import ranking_svm, show
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import User
from ultr.lists import ListBatches
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import Learner
from ultr.methods.bias_model import BiasModel
from ultr.methods.pairwise_em import PairwiseEM
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed
from ultr.training.loop import TrainingState, start, take_step

LISTS, ITEMS = 256, 10
BOUND = 1.3  # the longest step, in times of its passes
METHOD_BOUND = 3.5  # the longest step, in steps of lambdarank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=40, help="measured steps per method")
    options = parser.parse_args()
    device = torch.device(options.device)
    data = make_synthetic()
    log = show(data.train, ranking_svm(data.train)(data.train.features), items=ITEMS)
    training = TrainingOptions(batch=LISTS, device=options.device)
    feed = Feed(ListBatches(log, device=device), batch=LISTS, seed=0, user=User())
    inputs = MethodInputs(Label(), features=136, positions=tuple(range(1, ITEMS + 1)), binary=("click",))
    learners: dict[str, Learner] = {name: make_method(name, inputs) for name in METHODS}
    for loss in ("opt", "ipw"):
        learners[f"pairwise-em, {loss}"] = make_method("pairwise-em", inputs, loss=loss)
    for name, loss in (("bias model", "posterior"), ("bias model of pairs", "opt")):
        if (model := make_method("pairwise-em", inputs, loss=loss).bias_learner()) is not None:
            learners[name] = model
    rows = feed(0).features
    work: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {}
    for name, learner in learners.items():
        state = start(learner, log, training)
        step_of = partial(_step, state, feed, training)
        work[name] = step_of, partial(_passes, *_networks(name, learner), rows)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in work}
    memory = 0
    for step in range(options.steps + 5):
        for name, calls in work.items():
            for call, durations in zip(calls, times[name], strict=True):
                begun = time.perf_counter()
                call(step)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if step >= 5:
                    durations.append(time.perf_counter() - begun)
        if step == 5:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    medians = {name: (float(np.median(whole)), float(np.median(passes))) for name, (whole, passes) in times.items()}
    print(f"{'':<22}{'step':>10}{'passes':>12}  ratio (bound {BOUND})   steps of lambdarank (bound {METHOD_BOUND})")
    for name, (whole, passes) in medians.items():
        ratio, lambdaranks = whole / passes, whole / medians["lambdarank"][0]
        print(
            f"{name:<22}{1e3 * whole:8.2f} ms{1e3 * passes:9.2f} ms{ratio:7.2f}{lambdaranks:10.2f}"
            f"{LISTS / whole:14,.0f} lists/s{'' if ratio <= BOUND else '  above the bound'}"
        )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"memory grew by {grown:.1f} MB over {options.steps} steps of each method")


def _networks(name: str, learner: Learner) -> tuple[nn.Module, nn.Module | None]:
    """Return the network that a learner trains, and the one that it reads without gradients."""
    if isinstance(learner, BiasModel):
        return learner.network, learner.network if learner.pairs else None
    trained = learner.get_submodule("ranker")
    if isinstance(learner, PairwiseEM):
        return trained, learner.bias_model.network
    return trained, trained if name in ("regression-em", "pairwise-debias") else None


def _passes(trained: nn.Module, only_read: nn.Module | None, rows: Tensor, _: int) -> None:
    trained.zero_grad(set_to_none=True)
    extra = getattr(getattr(trained, "encoder", None), "features", rows.shape[-1]) - rows.shape[-1]
    if extra:  # learned inputs, which need a gradient
        rows = torch.cat([rows, torch.zeros(*rows.shape[:-1], extra, device=rows.device, requires_grad=True)], dim=-1)
    trained(rows).sum().backward()
    trained.zero_grad(set_to_none=True)
    if only_read is not None:
        with torch.no_grad():
            only_read(rows)


def _step(state: TrainingState, feed: Feed, training: TrainingOptions, step: int) -> None:
    take_step(state, feed(step), training)


if __name__ == "__main__":
    main()
