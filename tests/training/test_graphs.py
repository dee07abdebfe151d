"""Training on a GPU: steps that are captured as graphs do what steps without graphs do. Skipped without a GPU."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_shown_log
from lists_folder import write_lists
from runs import Killed, killed_at, quick, weights
from training.test_stack import BIAS_MODELS, VARIANTS
from ultr.datasets.users import User, make_user, simulate_log
from ultr.evaluation.off_policy import OffPolicy, off_policy_value
from ultr.lists import ListBatches, Lists
from ultr.log import Log, write_log
from ultr.log.labels import Label
from ultr.log.shards import Shards
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import Learner
from ultr.training.config import Config, TrainingOptions
from ultr.training.feed import Feed
from ultr.training.loop import TrainingState, graphed_steps, start, take_step
from ultr.training.run import run_training
from ultr.training.stream import Stream
from ultr.utils.noise import Noise, hash_places, uniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
CUDA = torch.device("cuda")
STEPS = 50
OPTIONS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "pairwise-em loss=ipw": {"loss": "ipw"},
    "regression-em sampled": {"targets": "sampled"},
    "pairwise-em sampled": {"targets": "sampled", "loss": "opt", "weights": "exact"},
}


class InDouble:
    """A feed in double precision."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self.choose = feed, feed.choose

    def lists(self, batch: Any) -> Lists:
        lists = self._feed.lists(batch)
        actions = {name: values.double() for name, values in lists.actions.items()}
        relevance = None if lists.relevance is None else lists.relevance.double()
        changes = {"features": lists.features.double(), "weights": lists.weights.double(), "actions": actions}
        return replace(lists, **changes, relevance=relevance)

    def __call__(self, step: int) -> Lists:
        return self.lists(self.choose(step))


def shown_log() -> Log:
    log = make_shown_log(requests=300, features=6)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, len(log)).astype(np.float32)
    return replace(log, weights=weights)


def make_learner(log: Log, name: str, *, bias: bool = False, double: bool = False) -> Learner:
    torch.manual_seed(0)
    inputs = MethodInputs(
        Label(),
        features=6,
        positions=tuple(np.unique(log.positions).tolist()),
        ranker_options={"hidden": (32, 16), "dropout": 0.3},
        feature_names=log.feature_names,
        binary=("click",),
    )
    made = make_method(name.split(maxsplit=1)[0], inputs, **OPTIONS.get(name, {}))
    learner = made.bias_learner() if bias else made
    assert learner is not None
    return learner.double() if double else learner


def eager(state: TrainingState, feed: Any, options: TrainingOptions) -> list[float]:
    return [float(take_step(state, feed(step), options)) for step in range(STEPS)]


def graphed(state: TrainingState, feed: Any, options: TrainingOptions) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that cannot be captured warns
        step = graphed_steps(state, feed, options)
        return [float(step()) for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "bias"),
    [(name, False) for name in (*METHODS, *OPTIONS)] + [(name, True) for name in (*BIAS_MODELS, "pairwise-em sampled")],
)
def test_graphs_give_the_losses_and_weights_of_steps_without_graphs(name, bias):
    for double in (False, True):
        assert_graphs_are_steps(name, bias=bias, double=double)


def assert_graphs_are_steps(name: str, *, bias: bool, double: bool) -> None:
    log = shown_log()
    training = TrainingOptions(
        steps=STEPS, batch=64, lr=0.02, schedule="cosine", warmup=5, device="cuda", precision="float32"
    )
    lists = ListBatches(log, device=CUDA)
    results = []
    for take in (eager, graphed):
        feed: Any = Feed(lists, batch=64, seed=3, user=User())
        feed = InDouble(feed) if double else feed
        learner = make_learner(log, name, bias=bias, double=double)
        losses = take(start(learner, log, training), feed, training)
        results.append((losses, {n: t.detach().clone() for n, t in learner.state_dict().items()}))
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if double else {"rtol": 1e-5, "atol": 1e-5}
    (losses, weights), (graph_losses, graph_weights) = results
    assert losses[-1] != losses[0]
    torch.testing.assert_close(torch.tensor(graph_losses), torch.tensor(losses), **tolerance)
    torch.testing.assert_close(graph_weights, weights, **tolerance)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw"])
def test_every_optimizer_can_be_captured_and_follows_the_cpu(optimizer):
    log, _ = simulate_log(shown_log(), User(), seed=1)
    weights = []
    for device in ("cpu", "cuda"):
        training = TrainingOptions(
            steps=STEPS,
            batch=64,
            lr=0.01,
            optimizer=optimizer,
            weight_decay=0.01,
            schedule="linear",
            device=device,
            precision="float32",
        )
        learner = make_learner(log, "pointwise")
        for module in learner.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        feed = Feed(ListBatches(log, device=device), batch=64, seed=3)
        (eager if device == "cpu" else graphed)(start(learner, log, training), feed, training)
        weights.append({n: t.detach().cpu() for n, t in learner.state_dict().items()})
    torch.testing.assert_close(weights[1], weights[0], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["pbm", "trust", "cascade", "clickbait"])
def test_all_users_can_be_simulated_in_a_graph_with_their_rates_of_clicks(name):
    log, user = shown_log(), make_user(name)
    feed = Feed(ListBatches(log, device=CUDA), batch=300, seed=0, user=user)
    expected = total = clicked = 0.0
    for step in range(60):
        lists = feed(step)
        probability = user.click_probability(lists.true_relevance, lists.shown_positions, where=lists.where)
        expected += float(probability.sum())
        total += float((probability * (1 - probability)).sum())
        clicked += float(lists.actions["click"].sum())
    assert abs(clicked - expected) < 5 * (3 * total) ** 0.5  # clicks of a cascade are correlated
    assert torch.equal(feed(7).actions["click"], feed(7).actions["click"])
    assert not torch.equal(feed(7).actions["click"], feed(8).actions["click"])


def test_the_random_numbers_of_a_gpu_are_those_of_the_reference():
    key, places = torch.tensor(-(2**62) + 12345), torch.arange(1000) * 7919
    noise = [Noise(key.to(d), (torch.arange(50) + (3 << 24)).to(d), 20) for d in ("cpu", "cuda")]
    assert torch.equal(noise[0].uniform(), noise[1].uniform().cpu())
    for mask in range(3):
        assert torch.equal(noise[0].kept(0.7, 64, mask=mask), noise[1].kept(0.7, 64, mask=mask).cpu())
    assert torch.equal(noise[0].kept(0.3, mask=0), noise[1].kept(0.3, mask=0).cpu())
    torch.testing.assert_close(noise[0].normal(), noise[1].normal().cpu(), rtol=1e-5, atol=1e-5)
    on_gpu = hash_places(key.cuda(), places.cuda())
    assert torch.equal(on_gpu.cpu(), hash_places(key, places))
    assert torch.equal(uniform(on_gpu, places.cuda()).cpu(), uniform(on_gpu.cpu(), places))


def assert_resumes_with_the_same_bits(config: Config, folder: Path) -> None:
    whole = weights(run_training(config, folder / "whole"))
    with pytest.raises(Killed):
        run_training(config, folder / "resumed", listeners=killed_at(20))
    resumed = weights(run_training(config, folder / "resumed", resume=True))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def on_gpu(source: Path, **options: Any) -> Config:
    few = {"steps": 30, "batch": 32, "bias_steps": 20, "evaluate_every": 10, "device": "cuda"}
    return quick(source, hidden=(16, 8), dropout=0.2, **few, **options)


@pytest.mark.parametrize("method", ["pairwise-em", "lambdarank", "dla", "pal-click", "sum-click"])
def test_a_run_on_a_gpu_resumes_with_the_same_bits(method, tmp_path):
    log, _ = simulate_log(shown_log(), User(), seed=1)
    write_log(log, tmp_path / "log.parquet")
    assert_resumes_with_the_same_bits(on_gpu(tmp_path / "log.parquet", method=method), tmp_path)


def test_lists_of_many_lengths_share_few_graphs():
    log, _ = simulate_log(make_shown_log(requests=400, features=6, longest=37), User(), seed=1)
    training = TrainingOptions(steps=STEPS, batch=4, device="cuda", precision="float32")
    lists = ListBatches(log, device=CUDA)
    lengths = {Feed(lists, batch=4, seed=3)(step).where.shape[1] for step in range(STEPS)}
    assert 1 < len(lengths) <= 5
    assert all(length % 8 == 0 or length == 37 for length in lengths)
    losses = []
    for take in (eager, graphed):
        learner = copy.deepcopy(make_learner(log, "lambdarank"))
        losses.append(take(start(learner, log, training), Feed(lists, batch=4, seed=3), training))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)


class WaitingFeed:
    """A feed whose lists need the CPU to read a number from the GPU, which a graph cannot do."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self.choose = feed, feed.choose

    def lists(self, batch: Any) -> Lists:
        lists = self._feed.lists(batch)
        return replace(lists, weights=lists.weights * float(lists.weights.isfinite().all()))

    def __call__(self, step: int) -> Lists:
        return self.lists(self.choose(step))


def test_steps_that_cannot_be_captured_are_taken_as_usual_with_one_warning():
    log = shown_log()
    training = TrainingOptions(steps=STEPS, batch=64, device="cuda", precision="float32")
    lists = ListBatches(log, device=CUDA)
    losses = []
    learner = make_learner(log, "lambdarank")
    losses.append(
        eager(start(copy.deepcopy(learner), log, training), Feed(lists, batch=64, seed=3, user=User()), training)
    )
    step = graphed_steps(
        start(learner, log, training), WaitingFeed(Feed(lists, batch=64, seed=3, user=User())), training
    )
    with pytest.warns(UserWarning, match="not captured as CUDA graphs") as caught:
        losses.append([float(step()) for _ in range(STEPS)])
    assert len(caught) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("requests", [400, 20], ids=["one window", "many windows"])
def test_streamed_lists_are_those_of_a_stream_on_the_cpu_and_are_captured(requests, tmp_path):
    log, _ = simulate_log(make_shown_log(requests=400, features=6, longest=20), User(), seed=1)
    shards = Shards(write_lists(log, tmp_path / "lists"))
    size = {"buffer_bytes": int(requests * shards.row_bytes * shards.rows / len(shards)), "batch": 32, "seed": 3}
    on_cpu = Stream(shards, keyed=True, **size)
    training = TrainingOptions(steps=STEPS, batch=32, device="cuda", precision="float32")
    losses = []
    for take in (eager, graphed):
        stream = Stream(shards, device=CUDA, **size)
        learner = make_learner(log, "lambdarank")
        losses.append(take(start(learner, log, training), stream, training))
        for step in (STEPS, STEPS + 1, 3):
            for found, expected in zip(stream(step).tensors, on_cpu(step).tensors, strict=True):
                assert torch.equal(found.cpu(), expected)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)


def test_a_streamed_run_resumes_with_the_same_bits(tmp_path):
    log, _ = simulate_log(shown_log(), User(), seed=1)
    lists = write_lists(log, tmp_path / "lists")
    assert_resumes_with_the_same_bits(on_gpu(lists, stream="yes"), tmp_path)


@pytest.mark.parametrize("estimator", ["dr", "snips", "clipped"])
def test_off_policy_values_on_a_gpu_are_those_on_the_cpu(estimator):
    log, _ = simulate_log(shown_log(), User(), seed=1)
    rng = np.random.default_rng(0)
    theta = {int(position): 1 / int(position) for position in np.unique(log.positions)}
    scores, direct = rng.integers(0, 4, log.rows).astype(np.float64), rng.random(log.rows)  # with ties
    options: dict[str, Any] = {"theta": theta, "label": "click", "estimator": estimator, "direct": direct}
    expected = off_policy_value(log, scores, **options)
    found = OffPolicy(log, device=CUDA, **options)(scores)
    np.testing.assert_allclose(found.per_request, expected.per_request, rtol=1e-10, atol=1e-12)
    for name in ("value", "low", "high", "unclipped", "effective_clicks", "clipped", "coverage"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)
