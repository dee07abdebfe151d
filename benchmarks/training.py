"""What a training step costs, as a ratio to the forward and backward pass of its network on the same rows.

    python benchmarks/training.py [--device cuda] [--steps 40]

136 features, 256 lists of 10 a step, a 512-256-128 network, feedback simulated for each step. The bare pass and the
methods take turns, so that all meet the same weather; figures are medians. Memory should not grow with steps. A step of
`pairwise-em` should cost at most 3.5 of `lambdarank`; the steps of its bias model, which come first, are timed apart.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from ultr.datasets import ranking_svm, show
from ultr.datasets.synthetic import make_synthetic
from ultr.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import Learner
from ultr.simulate import User
from ultr.training import Feed, TrainingOptions, start, take_step

LISTS, ITEMS, BOUND = 256, 10, {"lambdarank": 1.2}
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
    feed = Feed(log, batch=LISTS, seed=0, device=device, user=User())
    inputs = MethodInputs(Label(), features=136, positions=tuple(range(1, ITEMS + 1)))
    network = inputs.make_ranker().to(device)
    rows = feed(0).features

    def bare(_: int) -> None:
        network.zero_grad(set_to_none=True)
        network(rows).sum().backward()

    work: dict[str, Callable[[int], object]] = {"forward and backward": bare}
    learners: dict[str, Learner] = {name: make_method(name, inputs) for name in METHODS}
    for loss in ("opt", "ipw"):
        learners[f"pairwise-em, {loss}"] = make_method("pairwise-em", inputs, loss=loss)
    for name, loss in (("its bias model", "posterior"), ("... with pairs", "opt")):
        if (model := make_method("pairwise-em", inputs, loss=loss).first()) is not None:
            learners[name] = model
    for name, learner in learners.items():
        state = start(learner, log, training)
        work[name] = lambda step, state=state: take_step(state, feed(step), training)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in work}
    memory = 0
    for step in range(options.steps + 5):
        for name, call in work.items():
            begun = time.perf_counter()
            call(step)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 5:
                times[name].append(time.perf_counter() - begun)
        if step == 5:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    floor = float(np.median(times["forward and backward"]))
    for name, taken in times.items():
        median = float(np.median(taken))
        bound = f"  (bound {BOUND[name]})" if name in BOUND else ""
        if name.startswith(("pairwise-em", "its bias", "...")):
            lambdaranks = median / float(np.median(times["lambdarank"]))
            bound = f"  {lambdaranks:.2f} of lambdarank (bound {METHOD_BOUND})"
        print(f"{name:<22}{1e3 * median:8.2f} ms  ratio {median / floor:5.2f}  {LISTS / median:12,.0f} lists/s{bound}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"memory grew by {grown:.1f} MB over {options.steps} steps of each")


if __name__ == "__main__":
    main()
