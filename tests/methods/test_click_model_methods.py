"""Click models as rankers: their losses against explicit products, their scores, reports and saved models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import make_shown_log
from ultr.bias.click_models import MODELS
from ultr.bias.propensities import read_bias_theta
from ultr.datasets.users import CascadeUser, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import write_log
from ultr.log.labels import Label
from ultr.methods import METHODS, Method, MethodInputs, make_method
from ultr.methods.base import POSITION_SPEED
from ultr.methods.click_models import ClickModelMethod
from ultr.rankers.model import load_model
from ultr.training.config import make_config
from ultr.training.run import run_training

FEATURES = 4
NAMES = [name for name in MODELS if name != "pbm"]
POSITIONS = (1, 2, 3, 5, 8, 9, 10, 11, 12, 20, 30, 40)  # with gaps


def inputs(**changes) -> MethodInputs:
    given = {"label": Label("click"), "features": FEATURES, "positions": POSITIONS, "ranker_options": {"hidden": (6,)}}
    return MethodInputs(**{**given, **changes})


def made(name: str, seed: int = 0) -> Method:
    torch.manual_seed(seed)
    method = make_method(name, inputs())
    if method.own is not None:
        torch.nn.init.normal_(method.own.weight, std=1 / POSITION_SPEED)
    return method


def log_of(requests: int = 40, seed: int = 0):
    log, _ = simulate_log(make_shown_log(requests=requests, features=FEATURES, seed=seed), CascadeUser(), seed=seed)
    weights = np.random.default_rng(seed).uniform(0.5, 2, len(log)).astype(np.float32)
    return replace(log, weights=weights, positions=np.array(POSITIONS)[log.positions - 1])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def list_likelihood(name: str, clicks, a, s, place, own) -> float:
    """Return log P(clicks) by the textbook recursion on probabilities, item after item in the order shown."""
    total, examined, last = 0.0, 1.0, 0
    for c, a_k, s_k, k in zip(clicks, a, s, place, strict=True):
        if name == "ubm":
            examined = own[k * (len(POSITIONS) + 1) + last]
        total += math.log(examined * a_k if c else 1 - examined * a_k)
        last = k + 1 if c else last
        if c and name == "cascade":
            return total
        after = 1.0 if c else examined * (1 - a_k) / (1 - examined * a_k)
        examined = after * {
            "cascade": lambda c, a_k, s_k: 1.0,
            "ubm": lambda c, a_k, s_k: 1.0,
            "dcm": lambda c, a_k, s_k, k=k: own[k] if c else 1.0,
            "sdbn": lambda c, a_k, s_k: 1 - s_k if c else 1.0,
            "dbn": lambda c, a_k, s_k: own[0] * (1 - s_k if c else 1.0),
            "ccm": lambda c, a_k, s_k: own[1] * (1 - a_k) + own[2] * a_k if c else own[0],
        }[name](c, a_k, s_k)
    return total


def brute_force(method: Method, name: str, lists: Lists) -> float:
    own = [] if method.own is None else [sigmoid(x) for x in method.own.values.tolist()]
    with torch.no_grad():
        outputs = method.ranker.ranker(lists.features) if name in ("dbn", "sdbn") else method.score(lists.features)
    outputs = outputs if outputs.ndim == 3 else torch.stack([outputs, outputs], -1)
    clicks, total = lists.actions["click"], 0.0
    for u in range(len(lists)):
        items = sorted(torch.arange(lists.where.shape[1])[lists.where[u]].tolist(), key=lambda i: lists.positions[u, i])
        a, s = ([sigmoid(float(outputs[u, i, j])) for i in items] for j in (0, 1))
        place = [POSITIONS.index(int(lists.positions[u, i])) for i in items]
        found = list_likelihood(name, [int(clicks[u, i]) for i in items], a, s, place, own)
        total -= float(lists.weights[u]) * found
    return total / float(lists.weights.sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clicks", ["simulated", "none", "all"])
def test_the_loss_is_the_product_of_conditional_probabilities(name, clicks):
    method, lists = made(name), Lists.from_log(log_of())
    if clicks != "simulated":
        lists = lists.with_actions({"click": torch.full_like(lists.actions["click"], float(clicks == "all"))})
    assert float(method.loss(lists).detach()) == pytest.approx(brute_force(method, name, lists), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name):
    """Rows of a list are in the order of positions in a log, but not in every `Lists`."""
    method, lists = made(name), Lists.from_log(log_of())
    order = torch.randperm(lists.where.shape[1], generator=torch.Generator().manual_seed(1))
    permuted = replace(
        lists,
        features=lists.features[:, order],
        where=lists.where[:, order],
        positions=lists.positions[:, order],
        actions={n: values[:, order] for n, values in lists.actions.items()},
        relevance=lists.relevance[:, order],
    )
    torch.testing.assert_close(method.loss(permuted), method.loss(lists))
    assert method.bias([permuted])["theta"] == pytest.approx(method.bias([lists])["theta"], abs=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_all_parameters(name):
    method, lists = made(name), Lists.from_log(log_of())
    method.loss(lists).backward()
    for parameter in method.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.abs().sum() > 0


def test_items_after_the_first_click_do_not_count_in_a_cascade():
    method, lists = made("cascade"), Lists.from_log(log_of())
    first = lists.actions["click"].cumsum(-1) * lists.actions["click"] == 1
    assert not torch.equal(first.float(), lists.actions["click"])
    torch.testing.assert_close(method.loss(lists.with_actions({"click": first.float()})), method.loss(lists))


@pytest.mark.parametrize("name", ["dbn", "sdbn"])
def test_the_score_is_attraction_times_satisfaction(name):
    method, lists = made(name), Lists.from_log(log_of())
    with torch.no_grad():
        a, s = method.ranker.ranker(lists.features).sigmoid().unbind(-1)
        torch.testing.assert_close(method.score(lists.features).exp(), a * s)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_a_report_and_a_model_that_can_be_loaded(name, tmp_path):
    write_log(log_of(requests=80), tmp_path / "log.parquet")
    options = {"ranker": "mlp", "hidden": (6,), "steps": 10, "evaluate_every": 5, "batch": 16, "device": "cpu"}
    config = make_config(str(tmp_path / "log.parquet"), method=name, label="click", **options)
    run = run_training(config, tmp_path / "run")
    theta = read_bias_theta(run)
    assert [int(k) for k in theta] == list(POSITIONS)[: len(theta)]
    if name != "ubm":
        assert theta["1"] == 1.0  # the first item is examined
        assert list(theta.values())[:3] == sorted(list(theta.values())[:3], reverse=True)
    model = load_model(run)
    assert np.isfinite(model.score(log_of())).all()


def test_the_report_has_the_parameters_of_the_model():
    reports = {name: made(name).bias([Lists.from_log(log_of())]) for name in NAMES}
    assert 0 < reports["dbn"]["gamma"] < 1
    assert {"alpha1", "alpha2", "alpha3"} < set(reports["ccm"])
    assert [len(row) for row in reports["ubm"]["gamma"]] == list(range(1, len(POSITIONS) + 1))  # k' < k, or none
    assert "gamma" not in reports["sdbn"]
    assert len(reports["dcm"]["lambda"]) == len(POSITIONS)


def test_positions_without_rows_have_no_theta():
    lists = Lists.from_log(log_of())
    short = replace(lists, where=lists.where & (lists.positions < 20))
    theta = made("dbn").bias([short])["theta"]
    assert None in theta
    assert None not in theta[:3]


def test_a_table_of_all_pairs_of_positions_has_a_limit():
    with pytest.raises(OptionError, match="up to 1,000 positions"):
        make_method("ubm", inputs(positions=tuple(range(1, 1200))))


def test_every_click_model_but_the_position_based_one_is_a_method():
    methods = {name for name, method in METHODS.items() if issubclass(method, ClickModelMethod)}
    assert methods == set(NAMES)
