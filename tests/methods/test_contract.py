"""The contract of all methods: every row of the table is tested."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bias_fitting import fit_bias
from conftest import make_shown_log, some_always
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError
from ultr.evaluation.scores import evaluate_scores
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import METHODS, Method, MethodInputs, make_method
from ultr.methods.base import FeedbackMethod
from ultr.rankers import score_rows
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feed
from ultr.training.loop import masked, start, take_step, train

FEATURES = 5


def inputs(**changes: object) -> MethodInputs:
    given = {
        "label": Label(),
        "features": FEATURES,
        "positions": tuple(range(1, 13)),
        "ranker_options": {"hidden": (16,)},
        "feature_names": tuple(f"f{i}" for i in range(FEATURES)),
        "binary": ("click",),
        **changes,
    }
    return MethodInputs(**given)


@pytest.fixture(params=METHODS)
def name(request) -> str:
    return request.param


@pytest.fixture
def method(name) -> Method:
    torch.manual_seed(0)
    return make_method(name, inputs()).eval()  # without dropout


def feedback_log(seed: int = 0, requests: int = 60) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed, features=FEATURES), User(), seed=seed)
    return log


@pytest.fixture
def lists() -> Lists:
    return Lists.from_log(feedback_log())


def state_of(method: Method) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_the_loss_changes_no_state(method, lists):
    before = state_of(method)
    first = method.loss(lists)
    assert torch.equal(first, method.loss(lists))
    assert first.ndim == 0
    assert_equal_states(before, state_of(method))


def test_gradients_reach_the_ranker_and_not_the_data(method, lists):
    features = lists.features.clone().requires_grad_()
    method.update(lists)
    method.loss(replace(lists, features=features)).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in method.ranker.parameters())
    assert not features.grad[~lists.where].any()  # padding has no gradient


def test_padding_changes_nothing(method, lists):
    def padded(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([values, torch.full_like(values[:, :3], fill)], dim=1)

    wider = replace(
        lists,
        features=padded(lists.features, 99.0),
        where=padded(lists.where, 0).bool(),
        positions=padded(lists.positions, 7),
        actions={name: padded(values, 3.0) for name, values in lists.actions.items()},
        relevance=padded(lists.relevance, 2.0),
    )
    torch.testing.assert_close(method.loss(wider), method.loss(lists))
    other = make_method_like(method)
    method.update(lists)
    other.update(wider)
    for a, b in zip(method.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def make_method_like(method: Method) -> Method:
    other = type(method)(method.inputs).eval()
    other.load_state_dict(method.state_dict())
    return other


def test_permuting_a_list_permutes_its_scores(method, lists):
    order = torch.randperm(lists.where.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method.score(lists.features[:, order]), method.score(lists.features)[:, order])
    permuted = replace(
        lists,
        features=lists.features[:, order],
        where=lists.where[:, order],
        positions=lists.positions[:, order],
        actions={name: values[:, order] for name, values in lists.actions.items()},
        relevance=lists.relevance[:, order],
    )
    torch.testing.assert_close(method.loss(permuted), method.loss(lists))


def test_scores_depend_on_features_alone_and_equal_those_of_the_served_module(method, lists):
    torch.testing.assert_close(method.serving()(lists.features), method.score(lists.features))


def test_request_weights_count_like_repeated_requests(method, lists):
    chosen = torch.tensor([0, 1, 1, 2, 2, 2])
    repeated = pick(lists, chosen)
    weighted = replace(pick(lists, torch.tensor([0, 1, 2])), weights=torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(method.loss(weighted), method.loss(repeated))


def pick(lists: Lists, requests: torch.Tensor) -> Lists:
    return replace(
        lists,
        features=lists.features[requests],
        where=lists.where[requests],
        weights=lists.weights[requests],
        positions=lists.positions[requests],
        actions={name: values[requests] for name, values in lists.actions.items()},
        relevance=lists.relevance[requests],
    )


def trained(name: str, log: Log, **options) -> Method:
    torch.manual_seed(1)
    method = make_method(name, inputs())
    settings = TrainingOptions(**{"steps": 10, "bias_steps": 10, "batch": 16, "device": "cpu", **options})
    state = start(method, log, settings)
    fit_bias(method, log, settings)
    feed = Feed(ListBatches(log), batch=settings.batch, seed=settings.seed)
    for step in range(settings.steps):
        take_step(state, feed(step), settings)
    return method


def test_a_seed_repeats_a_run_and_another_gives_another(name):
    log = feedback_log(requests=30)
    once, again, other = (state_of(trained(name, log, steps=3, bias_steps=3, seed=seed)) for seed in (0, 0, 5))
    assert_equal_states(once, again)
    assert any(not torch.equal(a, b) for a, b in zip(once.values(), other.values(), strict=True))


def test_save_and_load_give_equal_scores(name, lists, tmp_path):
    from ultr.utils.jsonfiles import load_tensors, save_tensors

    method = trained(name, feedback_log(), steps=3, bias_steps=3)
    save_tensors(tmp_path / "weights.safetensors", method.state_dict())
    other = make_method(name, inputs())
    other.load_state_dict(load_tensors(tmp_path / "weights.safetensors"))
    assert torch.equal(other.score(lists.features), method.score(lists.features))


def test_degenerate_logs_give_no_nan(name):
    log = feedback_log(requests=20)
    worlds = {
        "no feedback": replace(log, actions={n: np.zeros_like(v) for n, v in log.actions.items()}),
        "lists of one": log.regroup(log.offsets[:-1], np.arange(len(log) + 1)),
        "everything clicked": replace(log, actions={n: np.ones_like(v) for n, v in log.actions.items()}),
        "constant features": replace(log, features=np.ones_like(log.features)),
    }
    for world, degenerate in worlds.items():
        method = trained(name, degenerate, lr=0.05, steps=5, bias_steps=5)
        assert all(torch.isfinite(p).all() for p in method.parameters()), world
        assert torch.isfinite(method.score(Lists.from_log(degenerate).features)).all(), world


@pytest.mark.parametrize("name", some_always(METHODS, {"pairwise-em", "lambdarank", "pal-click", "dla"}))
def test_a_tiny_unbiased_set_is_learned(name):
    """Grades follow the first feature, users examine everything and click by grade: NDCG above 0.95."""
    log = make_shown_log(requests=200, seed=3, features=FEATURES)
    grades = np.clip(np.round(2 + 1.5 * log.features[:, 0]), 0, 4).astype(np.float32)
    log = replace(log, relevance=grades)
    torch.manual_seed(2)
    method = make_method(name, inputs())
    options = TrainingOptions(steps=200, bias_steps=100, batch=32, lr=0.05, evaluate_every=50, device="cpu")
    state = start(method, log, options)
    user = User(epsilon=0.0).unbiased()
    fit_bias(method, log, options, user=user)
    feed = Feed(ListBatches(log), batch=options.batch, seed=0, user=user)

    def evaluate(trained: Method) -> dict[str, float]:
        scores = score_rows(trained.score, log.features, device="cpu")
        figures = evaluate_scores(log, scores, ["ndcg@10"])["ndcg@10"]
        return {"ndcg@10": float(figures[np.maximum.reduceat(grades, log.offsets[:-1]) > 0].mean())}

    *_, last = train(state, feed, evaluate, options, select="ndcg@10")
    assert state.stopping.best > 0.95
    assert math.isfinite(last.loss)


def test_unknown_methods_and_options_are_rejected():
    with pytest.raises(OptionError, match="did you mean 'lambdarank'"):
        make_method("lamdarank", inputs())
    with pytest.raises(OptionError, match="no option 'sharpness'"):
        make_method("lambdarank", inputs(), sharpness=3)


def test_true_labels_are_used_only_on_request(name, lists):
    log = feedback_log()
    without = Lists.from_log(replace(log, relevance=None))
    torch.manual_seed(0)
    blind = make_method(name, inputs()).eval()
    torch.testing.assert_close(blind.loss(without), blind.loss(Lists.from_log(log)))
    if issubclass(METHODS[name], FeedbackMethod):
        with pytest.raises(OptionError, match="true labels have none"):
            make_method(name, inputs(truth=True))
        return
    torch.manual_seed(0)
    seeing = make_method(name, inputs(truth=True))
    blank = replace(lists, actions={n: torch.zeros_like(v) for n, v in lists.actions.items()})
    torch.testing.assert_close(seeing.loss(blank), seeing.loss(lists))


class Waiting(TorchDispatchMode):
    """Collect the operations of a step that would make a program wait for a GPU, so that no graph can repeat them."""

    WAITS: ClassVar[set[str]] = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique2", "equal"}

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0].strip("_")
        if name in {word.strip("_") for word in self.WAITS}:
            self.found.add(name)
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.found.add("index by a mask")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*METHODS, "bias model", "bias model of pairs"])
def test_a_step_never_waits_for_a_gpu(name):
    log, given = make_shown_log(requests=64, features=FEATURES), inputs(ranker_options={"hidden": (8,), "dropout": 0.2})
    learner = make_method(name, given) if name in METHODS else None
    if learner is None:
        learner = make_method("pairwise-em", given, loss="bayes-ipw" if "pairs" in name else "ipw").bias_learner()
    start(learner, log, TrainingOptions(device="cpu"))
    feed = Feed(ListBatches(log), batch=16, seed=0, user=User(), keyed=True)
    batch = feed.choose(0)
    feed.lists(batch)  # fills tables that are made once
    with Waiting() as waiting:
        lists = feed.lists(batch)
        with torch.no_grad():
            learner.update(lists)
        with masked(learner, lists, 0, 0):
            learner.loss(lists).backward()
    assert waiting.found == set()


def test_a_method_learns_from_requests_with_one_item_if_it_says_so(method, name):
    log = feedback_log()
    first = log.regroup(log.offsets[:-1], np.arange(len(log) + 1))
    first = replace(first, positions=1 + np.arange(len(first)) % 12)
    lists = Lists.from_log(first)
    if name == "pairwise-em":  # its likelihood could learn from them, its pairs cannot
        method = make_method(name, method.inputs, final="pairs")
    method.update(lists)
    method.loss(lists).backward()
    moved = any(p.grad is not None and p.grad.abs().sum() > 1e-6 for p in method.ranker.parameters())
    assert moved == METHODS[name].LEARNS_ALONE
