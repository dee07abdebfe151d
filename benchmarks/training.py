"""What a training step costs, as a ratio to the passes of the networks that it must make on the same rows.

    python benchmarks/training.py [--device cuda] [--steps 40]

136 features, 256 lists of 10 a step, a 512-256-128 network, feedback simulated for each step. What a step must make is
the forward and backward pass of what it trains, and a forward pass of what it consults (a bias model; the ranker
itself, without dropout, in an E-step). All take turns, so that they meet the same weather; figures are medians. A step
should cost at most 1.3 of its passes, and one of `pairwise-em` at most 3.5 of `lambdarank`; the steps of its bias
model, which come first, are timed apart. Memory should not grow with steps.
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
from ultr.feeding import Feed
from ultr.labels import Label
from ultr.lists import ListBatches
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import Learner
from ultr.methods.bias_model import BiasModel
from ultr.methods.pairwise_em import PairwiseEM
from ultr.simulate import User
from ultr.training import TrainingOptions, TrainingState, start, take_step

LISTS, ITEMS = 256, 10
BOUND = 1.3  # of the passes of its networks
METHOD_BOUND = 3.5  # steps of lambdarank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
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
    for name, loss in (("its bias model", "posterior"), ("... with pairs", "opt")):
        if (model := make_method("pairwise-em", inputs, loss=loss).first()) is not None:
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
            for call, taken in zip(calls, times[name], strict=True):
                begun = time.perf_counter()
                call(step)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if step >= 5:
                    taken.append(time.perf_counter() - begun)
        if step == 5:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    medians = {name: (float(np.median(whole)), float(np.median(passes))) for name, (whole, passes) in times.items()}
    print(f"{'':<22}{'step':>10}{'passes':>12}  ratio (bound {BOUND})   of lambdarank (bound {METHOD_BOUND})")
    for name, (whole, passes) in medians.items():
        ratio, lambdaranks = whole / passes, whole / medians["lambdarank"][0]
        print(
            f"{name:<22}{1e3 * whole:8.2f} ms{1e3 * passes:9.2f} ms{ratio:7.2f}{lambdaranks:10.2f}"
            f"{LISTS / whole:14,.0f} lists/s{'' if ratio <= BOUND else '  above the bound'}"
        )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"memory grew by {grown:.1f} MB over {options.steps} steps of each")


def _networks(name: str, learner: Learner) -> tuple[nn.Module, nn.Module | None]:
    """What a learner trains, and what it consults without gradients."""
    if isinstance(learner, BiasModel):
        return learner.network, learner.network if learner.pairs else None
    trained = learner.get_submodule("ranker")
    if isinstance(learner, PairwiseEM):
        return trained, learner.bias_model.network
    return trained, trained if name in ("regression-em", "pairwise-debias") else None


def _passes(trained: nn.Module, consulted: nn.Module | None, rows: Tensor, _: int) -> None:
    trained.zero_grad(set_to_none=True)
    extra = getattr(getattr(trained, "encoder", None), "features", rows.shape[-1]) - rows.shape[-1]
    if extra:  # inputs that are learned too, and so need a gradient
        rows = torch.cat([rows, torch.zeros(*rows.shape[:-1], extra, device=rows.device, requires_grad=True)], dim=-1)
    trained(rows).sum().backward()
    trained.zero_grad(set_to_none=True)
    if consulted is not None:
        with torch.no_grad():
            consulted(rows)


def _step(state: TrainingState, feed: Feed, training: TrainingOptions, step: int) -> None:
    take_step(state, feed(step), training)


if __name__ == "__main__":
    main()
