"""Measure the time of a training step, as a ratio to the necessary passes of its networks on the same rows.

    python benchmarks/training.py [--device cuda] [--steps 40] [--lists 256] [--precision float32] [--only NAME ...]

A step has 256 lists of 10 items with 136 features, a 512-256-128 network, and newly simulated feedback. The necessary
passes are the forward and backward pass of the trained network, and a forward pass of a network that it only reads:
a bias model, or in an E-step the ranker itself, without dropout. On a GPU the passes are captured as one CUDA graph, as
the steps are, and the time of a step without a graph is shown too. All methods take turns, so that other load on the
machine affects them equally. Times are medians. The bounds are:

- a step takes at most 1.3 times its passes, on a GPU 1.5 times;
- a step of `pairwise-em` takes at most 3.5 times a step of `lambdarank`, not counting its bias model, which is trained
  before and is measured separately;
- memory does not grow with the number of steps.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ultr.datasets import ranking_svm, show
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import User
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import Learner
from ultr.methods.bias_model import BiasModel
from ultr.methods.counterfactual import IPW
from ultr.methods.pairwise_em import PairwiseEM
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed, FeedStack
from ultr.training.loop import TrainingState, graphed_steps, precision, start, take_step
from ultr.training.together import Stack

ITEMS = 10
BOUND, GPU_BOUND = 1.3, 1.5  # the longest step, in times of its passes
METHOD_BOUND = 3.5  # the longest step, in steps of lambdarank
BLOCK = 20  # steps between two readings of the clock on a GPU, which works while the next steps are prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=40, help="measured steps per method; on a GPU, blocks of 20")
    parser.add_argument("--lists", type=int, default=256, help="lists per step")
    parser.add_argument("--precision", default="float32", help="float32, tf32 or bf16")
    parser.add_argument("--only", nargs="*", default=(), help="names of methods")
    options = parser.parse_args()
    device, on_gpu = torch.device(options.device), options.device.startswith("cuda")
    data = make_synthetic()
    log = show(data.train, ranking_svm(data.train)(data.train.features), items=ITEMS)
    training = TrainingOptions(batch=options.lists, device=options.device, precision=options.precision)
    feed = Feed(ListBatches(log, device=device), batch=options.lists, seed=0, user=User())
    inputs = MethodInputs(Label(), features=136, positions=tuple(range(1, ITEMS + 1)), binary=("click",))
    rows = feed(0).features
    work: dict[str, list[Callable[[int], object]]] = {}
    for name, learner in _learners(inputs, options.only).items():
        state = start(learner, log, training)
        passes = partial(_passes, *_networks(name, learner), rows, training)
        work[name] = [partial(_step, state, feed, training), passes]
        if on_gpu:
            graphed = graphed_steps(start(copy.deepcopy(learner), log, training), feed, training)
            work[name] = [
                partial(_call, graphed),
                _captured(passes),
                partial(_step, state, feed, training),
                partial(_call, _ten_seeds(learner, log, feed.source, training)),
            ]
    times: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name, calls in work.items()}
    memory = 0
    repeat = BLOCK if on_gpu else 1
    for turn in range(options.steps + 5):
        for name, calls in work.items():
            for call, durations in zip(calls, times[name], strict=True):
                begun = time.perf_counter()
                for step in range(turn * repeat, (turn + 1) * repeat):
                    call(step)
                if on_gpu:
                    torch.cuda.synchronize()
                if turn >= 5:
                    durations.append((time.perf_counter() - begun) / repeat)
        if turn == 5:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    medians = {name: [float(np.median(durations)) for durations in of_method] for name, of_method in times.items()}
    bound = GPU_BOUND if on_gpu else BOUND
    print(f"{'':<22}{'step':>10}{'passes':>12}  ratio (bound {bound})   steps of lambdarank (bound {METHOD_BOUND})")
    for name, (whole, passes_time, *usual) in medians.items():
        ratio, lambdaranks = whole / passes_time, whole / medians["lambdarank"][0]
        without = f"  without a graph {1e3 * usual[0]:5.2f} ms; ten seeds {usual[1] / whole:.2f} times" if usual else ""
        print(
            f"{name:<22}{1e3 * whole:8.3f} ms{1e3 * passes_time:9.3f} ms{ratio:7.2f}{lambdaranks:10.2f}"
            f"{options.lists / whole:14,.0f} lists/s{without}{'' if ratio <= bound else '  above the bound'}"
        )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"memory grew by {grown:.1f} MB over {options.steps * repeat} steps of each method")


def _learners(inputs: MethodInputs, only: Sequence[str]) -> dict[str, Learner]:
    """Return the measured learners by name: all, or lambdarank and those named."""
    learners: dict[str, Learner] = {name: make_method(name, inputs) for name in METHODS}
    for loss in ("opt", "ipw"):
        learners[f"pairwise-em, {loss}"] = make_method("pairwise-em", inputs, loss=loss)
    learners["direct, ordinal"] = make_method("direct", inputs, values="ordinal")
    learners["pal-click, reversal"] = make_method("pal-click", inputs, reversal=1.0)
    for name, loss in (("bias model", "posterior"), ("bias model of pairs", "opt")):
        if (model := make_method("pairwise-em", inputs, loss=loss).bias_learner()) is not None:
            learners[name] = model
    return {name: learner for name, learner in learners.items() if not only or name in (*only, "lambdarank")}


def _call(step: Callable[[], object], _: int) -> None:
    step()


def _ten_seeds(learner: Learner, log: Log, source: ListBatches, training: TrainingOptions) -> Callable[[], object]:
    """Return a function that takes a step of ten copies of a learner, each with its own seed, together."""
    several = [replace(training, seed=seed) for seed in range(10)]
    learners = [copy.deepcopy(learner) for _ in several]
    for each in learners:
        start(each, log, training)
    feeds = [Feed(source, batch=training.batch, seed=each.seed, user=User()) for each in several]
    return Stack(learners, several).steps(FeedStack(feeds))


def _captured(passes: Callable[[int], object]) -> Callable[[int], object]:
    """Return the passes as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            passes(step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        passes(0)
    return lambda _: graph.replay()


def _networks(name: str, learner: Learner) -> tuple[nn.Module, nn.Module | None]:
    """Return the network that a learner trains, and the one that it reads without gradients."""
    if isinstance(learner, BiasModel):
        return learner.network, learner.network if learner.pairs else None
    trained = learner.get_submodule("ranker")
    if isinstance(learner, PairwiseEM):
        return trained, learner.bias_model.network
    if isinstance(learner, IPW) and isinstance(learner.positions, BiasModel):
        return trained, learner.positions.network
    return trained, trained if name in ("regression-em", "pairwise-debias") else None


def _passes(trained: nn.Module, only_read: nn.Module | None, rows: Tensor, training: TrainingOptions, _: int) -> None:
    trained.zero_grad(set_to_none=True)
    extra = getattr(getattr(trained, "encoder", None), "features", rows.shape[-1]) - rows.shape[-1]
    if extra:  # learned inputs, which need a gradient
        rows = torch.cat([rows, torch.zeros(*rows.shape[:-1], extra, device=rows.device, requires_grad=True)], dim=-1)
    with precision(rows.device, training):
        trained(rows).sum().backward()
        trained.zero_grad(set_to_none=True)
        if only_read is not None:
            with torch.no_grad():
                only_read(rows)


def _step(state: TrainingState, feed: Feed, training: TrainingOptions, step: int) -> None:
    take_step(state, feed(step), training)


if __name__ == "__main__":
    main()
