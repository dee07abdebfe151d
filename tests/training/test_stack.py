"""Learners that are trained together learn what each learns alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.lists import ListBatches
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed, FeedStack
from ultr.training.loop import start, take_step
from ultr.training.together import Stack

STEPS = 5  # more than the warm-up
USUAL = ("pairwise-em", "pairwise-em loss=opt", "pairwise-em em=joint", "pairwise-em trust=values", "dla", "lambdarank")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS: dict[str, dict[str, Any]] = {
    "pairwise-em loss=opt": {"loss": "opt"},
    "pairwise-em loss=ipw": {"loss": "ipw"},
    "pairwise-em loss=bayes-ipw": {"loss": "bayes-ipw"},
    "pairwise-em loss=opt exact": {"loss": "opt", "weights": "exact"},
    "pairwise-em loss=opt-posterior": {"loss": "opt-posterior"},
    "pairwise-em em=joint": {"loss": "opt", "em": "joint"},
    "pairwise-em em=printed": {"loss": "opt", "em": "printed", "targets": "soft"},
    "pairwise-em released": {"variant": "released", "targets": "soft"},
    "pairwise-em released staged": {"variant": "released", "targets": "soft", "em": "staged"},
    "pairwise-em trust=clicks": {"trust": "clicks"},
    "pairwise-em trust=values": {"trust": "values"},
    "pairwise-em theta=regression": {"theta": "regression"},
}
OWN_BIAS = ("loss=ipw", "released staged", "trust=clicks", "trust=values", "theta=regression")
BIAS_MODELS = ("pairwise-em", *(f"pairwise-em {name}" for name in OWN_BIAS))


def shown_log(seed):
    log = make_shown_log(requests=90, features=5, seed=seed)
    return replace(log, weights=np.random.default_rng(seed).uniform(0.5, 1.5, len(log)).astype(np.float32))


def make_learner(name: str, seed: int, *, bias: bool):
    torch.manual_seed(seed)
    options = VARIANTS.get(name, {})
    inputs = MethodInputs(
        Label(),
        features=5,
        positions=tuple(range(1, 13)),
        ranker_options={"hidden": (16, 8), "dropout": 0.3},
        feature_names=tuple(f"f{i}" for i in range(5)),
        binary=("click",),
    )
    method = make_method(name.split(maxsplit=1)[0], inputs, **options)
    return method.bias_learner() if bias else method


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        pytest.param(name, bias, marks=() if name in USUAL or DEVICE == "cuda" else pytest.mark.long)
        for names, bias in (((*METHODS, *VARIANTS), False), (BIAS_MODELS, True))
        for name in names
    ],
)
def test_learners_together_learn_what_each_learns_alone(name, bias):
    device = DEVICE
    seeds, rates = (3, 4, 4), (0.02, 0.02, 0.1)
    options = [
        TrainingOptions(batch=24, lr=lr, seed=seed, clip=1.0, warmup=3, device=device, precision="float32")
        for seed, lr in zip(seeds, rates, strict=True)
    ]
    logs = {seed: shown_log(seed) for seed in set(seeds)}
    sources = {seed: ListBatches(log, device=device) for seed, log in logs.items()}
    feeds = [Feed(sources[seed], batch=24, seed=seed, user=User(), keyed=True) for seed in seeds]
    learners = [make_learner(name, seed, bias=bias) for seed in seeds]
    alone = [copy.deepcopy(learner) for learner in learners]
    expected = []
    for learner, feed, each, seed in zip(alone, feeds, options, seeds, strict=True):
        state = start(learner, logs[seed], each)
        expected.append([float(take_step(state, feed(step), each)) for step in range(STEPS)])
    for learner, each, seed in zip(learners, options, seeds, strict=True):
        start(learner, logs[seed], each)
    assert Stack.can_hold(learners, options)
    step = Stack(learners, options).steps(FeedStack(feeds))
    losses = torch.stack([step().clone() for _ in range(STEPS)]).T.cpu()
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(losses[1], losses[2])  # the learning rate has an effect
    for learner, other in zip(learners, alone, strict=True):
        found, wanted = (shift_invariant(each.state_dict()) for each in (learner, other))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_learners_of_a_smaller_stack_go_on_as_before():
    options = [TrainingOptions(batch=24, lr=0.05, seed=seed, device="cpu") for seed in range(4)]
    logs = [shown_log(seed) for seed in range(4)]
    feeds = [Feed(ListBatches(log), batch=24, seed=s, user=User(), keyed=True) for s, log in enumerate(logs)]
    kept, states = [0, 2, 3], []
    for _ in range(2):
        learners = [make_learner("pairwise-em", seed, bias=False) for seed in range(4)]
        for learner, each, log in zip(learners, options, logs, strict=True):
            start(learner, log, each)
        states.append(learners)
    whole, parted = (Stack(learners, options) for learners in states)
    step = whole.steps(FeedStack(feeds))
    losses = torch.stack([step().clone() for _ in range(6)])
    step = parted.steps(FeedStack(feeds))
    before = torch.stack([step().clone() for _ in range(3)])
    left_out = {name: tensor.clone() for name, tensor in states[1][1].state_dict().items()}
    step = parted.only(kept).steps(FeedStack([feeds[i] for i in kept]), first=3)
    after = torch.stack([step().clone() for _ in range(3)])
    torch.testing.assert_close(before, losses[:3])
    torch.testing.assert_close(after, losses[3:, kept], rtol=1e-5, atol=1e-6)
    for i in kept:
        torch.testing.assert_close(states[1][i].state_dict(), states[0][i].state_dict(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, left_out[name]) for name, tensor in states[1][1].state_dict().items())


def shift_invariant(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without those of last biases: a pairwise loss does not change with them, so they are noise."""
    last = []
    for network in ("ranker", "ranker.ranker.layers.0.", "network", "bias_model.network"):
        last += [name for name in state if name.startswith(network) and name.endswith("bias")][-1:]
    return {name: tensor.cpu() for name, tensor in state.items() if name not in last}


def test_lists_of_a_stack_are_those_of_its_feeds():
    logs = [simulate_log(shown_log(seed), User(), seed=seed)[0] for seed in (0, 1)]
    sources = [ListBatches(log) for log in logs]
    feeds = [Feed(sources[i], batch=16, seed=seed, keyed=True) for i, seed in ((0, 0), (1, 1), (1, 2))]
    stacked = FeedStack(feeds)
    for step in (0, 5, 70):
        lists = stacked(step)
        for number, feed in enumerate(feeds):
            alone, rows = feed(step), slice(16 * number, 16 * number + 16)
            own = lists.map(lambda values, rows=rows: values[rows] if values.ndim > 1 or len(values) > 3 else values)
            longest = alone.where.shape[1]
            for name in ("features", "where", "positions", "relevance"):
                assert torch.equal(getattr(own, name)[:, :longest], getattr(alone, name))
            assert torch.equal(own.weights, alone.weights)
            assert not own.where[:, longest:].any()
            assert all(torch.equal(own.actions[n][:, :longest], values) for n, values in alone.actions.items())
            assert int(lists.key[number]) == int(alone.key)


def test_learners_of_other_shapes_optimizers_or_draws_are_not_held():
    options = TrainingOptions(device="cpu")
    same = [make_learner("pointwise", seed, bias=False) for seed in (0, 1)]
    assert Stack.can_hold(same, [options, replace(options, lr=0.5, seed=7)])
    assert not Stack.can_hold(same, [options, replace(options, optimizer="adam")])
    wider = make_method("pointwise", MethodInputs(Label(), features=6, positions=(1, 2)))
    assert not Stack.can_hold([same[0], wider], [options, options])
    other_ids = [make_method("dla", MethodInputs(Label(), features=5, positions=ids)) for ids in ((1, 2), (1, 3))]
    assert not Stack.can_hold(other_ids, [options, options])
    sampled = make_method("regression-em", MethodInputs(Label(), features=5, positions=(1, 2)), targets="sampled")
    assert not Stack.can_hold([sampled, sampled], [options, options])
