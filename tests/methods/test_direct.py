"""The direct method: its likelihoods against explicit sums, its defaults, and trees against the libraries."""

from __future__ import annotations

import math
from dataclasses import replace

import lightgbm
import numpy as np
import pytest
import torch
import xgboost

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import write_log
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method, make_tree_method
from ultr.methods.anchor import anchor_of_log
from ultr.rankers import Hurdle, MLPRanker, fit_encoders, score_rows
from ultr.rankers.boosters import BOOSTERS, Boosting, TreeRanker, lightgbm_parameters
from ultr.rankers.combined import Blend, Part
from ultr.rankers.model import load_model
from ultr.training.config import make_config
from ultr.training.run import run_training

FEATURES = 4
POSITIONS = tuple(range(1, 13))
THETA = {k: 1 / k for k in POSITIONS}
BOTH = "click + dwell / exp(3)"


def inputs(**changes) -> MethodInputs:
    given = {
        "label": Label(BOTH),
        "features": FEATURES,
        "positions": POSITIONS,
        "ranker_options": {"hidden": (6,)},
        "propensities": THETA,
        "binary": ("click",),
    }
    return MethodInputs(**{**given, **changes})


def log_of(requests: int = 30, seed: int = 0):
    log, _ = simulate_log(make_shown_log(requests=requests, features=FEATURES, seed=seed), User(eta=0.3), seed=seed)
    return replace(log, weights=np.random.default_rng(seed).uniform(0.5, 2, len(log)).astype(np.float32))


def term(likelihood: str, c: float, theta: float, outputs: list[float]) -> float:
    """Return minus the log-likelihood of one label, up to what does not depend on the outputs."""
    s = outputs[0]
    if likelihood in ("binary", "hurdle"):
        p = theta / (1 + math.exp(-s))
        missing = -math.log(p) if c > 0 else -math.log(1 - p)
        return missing + (c * math.exp(-outputs[1]) + outputs[1] if likelihood == "hurdle" and c > 0 else 0.0)
    mean = theta * math.exp(s)
    if likelihood == "poisson":
        return mean - c * math.log(mean)
    return 2 * mean**0.5 + 2 * c * mean**-0.5


@pytest.mark.parametrize("row_power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("likelihood", ["hurdle", "binary", "poisson", "tweedie"])
def test_the_loss_is_the_explicit_sum(likelihood, row_power):
    torch.manual_seed(0)
    log = log_of()
    method = make_method("direct", inputs(), likelihood=likelihood, row_power=row_power)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    lists = Lists.from_log(log)
    counts = np.bincount(log.positions, np.repeat(log.weights, log.lengths), 13)[1:]
    powers = np.maximum([THETA[k] for k in POSITIONS], 0.1) ** -row_power
    rows = powers * counts.sum() / (counts @ powers)
    with torch.no_grad():
        outputs = method.ranker.ranker(lists.features) if likelihood == "hurdle" else method.score(lists.features)
    outputs = outputs if likelihood == "hurdle" else outputs[..., None]
    labels, total = method.labels(lists), 0.0
    for u in range(len(lists)):
        for i in range(int(lists.where[u].sum())):
            theta = max(min(THETA[int(lists.positions[u, i])], 1 - 1e-6), 0.01)
            weight = float(lists.weights[u]) * rows[int(lists.positions[u, i]) - 1]
            total += weight * term(likelihood, float(labels[u, i]), theta, outputs[u, i].tolist())
    assert float(method.loss(lists).detach()) == pytest.approx(total / float(lists.weights.sum()), rel=1e-4)


def test_values_have_a_hurdle_and_clicks_a_probability():
    assert make_method("direct", inputs()).likelihood == "hurdle"
    assert make_method("direct", inputs(label=Label("click"))).likelihood == "binary"
    assert make_method("direct", inputs(label=Label("click"), binary=())).likelihood == "hurdle"
    for ranker in ("lightgbm", "xgboost"):
        assert make_tree_method("direct", inputs(ranker=ranker)).likelihood == "hurdle"
        assert make_tree_method("direct", inputs(ranker=ranker, label=Label("click"))).likelihood == "poisson"
    for make, ranker in ((make_method, "mlp"), (make_tree_method, "lightgbm")):
        with pytest.raises(OptionError, match="true labels have none"):
            make("direct", inputs(truth=True, ranker=ranker))


def test_the_score_of_a_hurdle_is_the_expected_label_and_is_loaded(tmp_path):
    log = log_of(requests=60)
    write_log(log, tmp_path / "log.parquet")
    options = {"ranker": "mlp", "hidden": (6,), "steps": 10, "evaluate_every": 5, "batch": 16, "device": "cpu"}
    known = {str(k): v for k, v in THETA.items()}
    config = make_config(str(tmp_path / "log.parquet"), method="direct", label=BOTH, propensities=known, **options)
    model = load_model(run_training(config, tmp_path / "run"))
    with torch.no_grad():
        (outputs,) = model.ranker.by_network(torch.from_numpy(log.features))
    expected = torch.sigmoid(outputs[..., 0]) * outputs[..., 1].exp()
    np.testing.assert_allclose(model.score(log), expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("label", [BOTH, "click"])
def test_networks_side_by_side_have_the_sum_of_their_losses_and_the_mean_of_their_outputs(label):
    log = log_of(requests=60)
    method = make_method("direct", inputs(label=Label(label)), networks=2)
    fit_encoders(method, log.features)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    lists, features = Lists.from_log(log), torch.from_numpy(log.features)
    with torch.no_grad():
        halves = method.ranker.ranker(features).chunk(2, -1)
        total, score = float(method.loss(lists)), method.score(features)
    assert (halves[0] - halves[1]).abs().min() > 0
    mean = (halves[0] + halves[1]) / 2
    torch.testing.assert_close(score, mean[:, 0].sigmoid() * (mean[:, 1].exp() if label == BOTH else 1.0))
    alone = make_method("direct", inputs(label=Label(label)))
    alone.estimate_bias(log, user=None, sessions=0, seed=0)
    losses = []
    for half in halves:
        padded = torch.zeros(*lists.where.shape, half.shape[1])
        padded[lists.where] = half
        of_rows = Given(padded if label == BOTH else padded[..., 0])
        alone.ranker = Hurdle(of_rows) if label == BOTH else of_rows
        losses.append(float(alone.loss(lists)))
    assert total == pytest.approx(sum(losses), rel=1e-5)


class Given(torch.nn.Module):
    """A ranker with these outputs."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self.values = outputs

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize("networks", [1, 2])
@pytest.mark.parametrize("label", [BOTH, "click"])
def test_an_anchor_starts_every_network_at_the_linear_model_of_the_log(label, networks):
    log = log_of(requests=60)
    method = make_method("direct", inputs(label=Label(label)), networks=networks, anchor="linear")
    fit_encoders(method, log.features)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    method.start_ranker(log, seed=0)
    network = method.ranker if isinstance(method.ranker, MLPRanker) else method.ranker.ranker
    anchor = anchor_of_log(network.encoder, log, Label(label), method.positions, seed=0)
    x = network.encoder(torch.from_numpy(log.features)).double().numpy()
    with torch.no_grad():
        outputs = network(torch.from_numpy(log.features)).reshape(len(x), networks, -1).numpy()
    for number in range(networks):
        click = x @ anchor.slopes + math.log(anchor.beta / (1 - anchor.beta))
        np.testing.assert_allclose(outputs[:, number, 0], click, rtol=1e-3, atol=1e-4)
        if label == BOTH:
            np.testing.assert_allclose(outputs[:, number, 1], math.log(anchor.value), rtol=1e-4)


@pytest.mark.parametrize("options", [{"likelihood": "poisson"}, {"values": "ordinal"}])
def test_networks_need_the_default_likelihood(options):
    with pytest.raises(OptionError, match="need hidden layers"):
        make_method("direct", inputs(), networks=2, **options)


@pytest.mark.parametrize("likelihood", ["poisson", "tweedie"])
def test_trees_are_those_of_the_library_with_the_logarithm_of_theta_as_offset(likelihood):
    log = replace(log_of(requests=200), weights=None)
    offset = np.log([max(THETA[k], 0.01) for k in log.positions])
    label = Label(BOTH)(log.actions)
    scores = {}
    for ranker in ("lightgbm", "xgboost"):
        (task,) = make_tree_method("direct", inputs(ranker=ranker), likelihood=likelihood).tasks(log)
        np.testing.assert_allclose(task.rows.offset, offset, rtol=1e-6)
        grown = []
        how = Boosting(7, 0.1, library_options=task.library_options)
        BOOSTERS[ranker].grow(task.rows, how, lambda trees, _, grown=grown: bool(grown.append(trees)))
        scores[ranker] = grown[-1].predict(log.features)
    power = {"tweedie_variance_power": 1.5} if likelihood == "tweedie" else {}
    data = lightgbm.Dataset(log.features, label, init_score=offset)
    own = lightgbm.train({**lightgbm_parameters(0.1, 0, 0), "objective": likelihood, **power}, data, 7)
    np.testing.assert_allclose(scores["lightgbm"], own.predict(log.features, raw_score=True), rtol=1e-5)
    matrix = xgboost.DMatrix(log.features, label, base_margin=offset)
    objective = "count:poisson" if likelihood == "poisson" else "reg:tweedie"
    own = xgboost.train({"objective": objective, "learning_rate": 0.1, "base_score": 1.0, **power}, matrix, 7)
    margins = own.predict(xgboost.DMatrix(log.features), output_margin=True)
    np.testing.assert_allclose(scores["xgboost"], margins, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ranker", "name"), [("lightgbm", "min_sum_hessian_in_leaf"), ("xgboost", "min_child_weight")])
@pytest.mark.parametrize(("requests", "weight"), [(20, 1.0), (400, 1.0), (400, 0.01)])
def test_a_leaf_of_trees_of_clicks_has_enough_expected_clicks(ranker, name, requests, weight):
    log = log_of(requests)
    log = replace(log, weights=np.full(requests, weight, np.float32))
    total = (Label(BOTH)(log.actions) > 0).sum()
    clicks, values = make_tree_method("direct", inputs(ranker=ranker)).tasks(log)
    assert name not in values.parameters
    trees = []
    how = Boosting(
        1,
        0.1,
        parameters={**clicks.parameters, "min_data_in_leaf": 1} if ranker == "lightgbm" else clicks.parameters,
        library_options=clicks.library_options,
    )
    BOOSTERS[ranker].grow(clicks.rows, how, lambda booster, _: bool(trees.append(booster)))
    predicted = trees[-1].predict(log.features)
    expected = np.exp(clicks.rows.offset)  # before the first tree
    in_leaves = [expected[predicted == leaf].sum() for leaf in np.unique(predicted)]
    assert len(in_leaves) > 1
    assert min(in_leaves) > 0.95 * min(20, 0.1 * total)


@pytest.mark.parametrize("ranker", ["lightgbm", "xgboost"])
def test_a_hurdle_has_trees_of_all_clicks_and_trees_of_the_values_of_clicked_rows(ranker):
    log = log_of(requests=50)
    label, weights = Label(BOTH)(log.actions), np.repeat(log.weights, log.lengths)
    clicked = label > 0
    method = make_tree_method("direct", inputs(ranker=ranker))
    clicks, values = method.tasks(log)
    np.testing.assert_array_equal(clicks.rows.label, clicked)
    np.testing.assert_allclose(clicks.rows.offset, np.log([max(THETA[k], 0.01) for k in log.positions]), rtol=1e-6)
    np.testing.assert_array_equal(values.rows.features, log.features[clicked])
    np.testing.assert_allclose(values.rows.label, label[clicked])
    np.testing.assert_allclose(values.rows.weights, weights[clicked])
    assert values.rows.offset is None
    objectives = {"lightgbm": ["poisson", "gamma"], "xgboost": ["count:poisson", "reg:gamma"]}[ranker]
    assert [task.library_options["objective"] for task in (clicks, values)] == objectives
    scores = np.random.default_rng(0).normal(size=log.rows)
    expected = np.mean([c / np.exp(s) + s for c, s in zip(label, scores, strict=True) if c > 0])
    assert values.loss(log, scores + 1, np.ones(log.rows)) == pytest.approx(expected)
    shares = np.exp(scores + clicks.rows.offset)
    sums = np.add.reduceat(shares, log.offsets[:-1])[log.request_of_row]
    assert clicks.loss(log, scores, scores) == pytest.approx(-np.log(shares / sums)[clicked].mean())
    assert len(method.tasks(replace(log, actions={name: 0 * each for name, each in log.actions.items()}))) == 1


@pytest.mark.parametrize(("likelihood", "of_clicks"), [("hurdle", True), ("tweedie", False)])
def test_the_anchor_has_the_mean_of_what_its_trees_predict(likelihood, of_clicks):
    log = log_of(requests=200)
    method = make_tree_method("direct", inputs(ranker="lightgbm"), likelihood=likelihood)
    anchor = method.anchor(log, seed=0)
    theta = np.array([max(THETA[k], 0.01) for k in log.positions])
    label = Label(BOTH)(log.actions)
    scores = anchor(torch.from_numpy(log.features)).detach().numpy()
    assert (theta * np.exp(scores)).sum() == pytest.approx((label > 0 if of_clicks else label).sum(), rel=1e-3)
    (task, *_) = method.tasks(log, anchor=scores)
    np.testing.assert_allclose(task.rows.offset, np.log(theta) + scores, rtol=1e-4, atol=1e-5)
    assert make_tree_method("direct", inputs(ranker="lightgbm"), anchor="none").anchor(log, seed=0) is None


def grown(task, rounds: int = 7) -> TreeRanker:
    trees = []
    how = Boosting(rounds, 0.1, library_options=task.library_options)
    BOOSTERS["lightgbm"].grow(task.rows, how, lambda booster, _: bool(trees.append(booster)))
    return TreeRanker(trees[-1], rounds)


def test_trees_tell_the_relevance_of_rows_with_the_feedback_of_the_log_as_its_sum():
    log = log_of(requests=300)
    method, label = make_tree_method("direct", inputs(ranker="lightgbm")), Label(BOTH)(log.actions)
    theta, clicked = np.array([max(THETA[k], 0.01) for k in log.positions]), label > 0
    anchor = method.anchor(log, seed=0)
    of_anchor = score_rows(anchor, log.features)
    of_clicks, of_values = (grown(task) for task in method.tasks(log, anchor=of_anchor))
    parts = [Part(of_clicks, "lightgbm"), Part(of_values, "lightgbm"), Part(anchor, "linear")]
    found = method.relevance(Blend(parts), log)
    assert (theta * found.beta).sum() == pytest.approx(clicked.sum(), rel=0.02)  # β is clipped at 1
    assert found.value[clicked].sum() == pytest.approx(label[clicked].sum())
    of_values = np.log(found.value) - score_rows(of_values, log.features)
    np.testing.assert_allclose(of_values, of_values[0], atol=1e-4)
    inside = found.beta < 1 - 1e-4
    assert inside.mean() > 0.8
    of_clicks = (np.log(found.beta) - of_anchor - score_rows(of_clicks, log.features))[inside]
    np.testing.assert_allclose(of_clicks, np.median(of_clicks), atol=1e-4)
    # Trees without a round that was better than none are not used.
    only_anchor = method.relevance(Blend([replace(parts[0], weight=0.0), parts[2]]), log)
    assert np.ptp(only_anchor.value) == 0
    assert np.corrcoef(np.log(only_anchor.beta), of_anchor)[0, 1] > 0.99
    assert make_tree_method("direct", inputs(ranker="lightgbm"), likelihood="tweedie").relevance(anchor, log) is None


def test_trees_with_an_offset_rank_better_than_without():
    user = User(epsilon=0.02)
    shown = make_shown_log(requests=1500, features=FEATURES, seed=1)
    log, _ = simulate_log(shown, user, seed=1)
    theta = {k: float(user.theta(torch.tensor([k]))) for k in POSITIONS}
    correlations = []
    for known in (theta, dict.fromkeys(POSITIONS, 1.0)):
        method = make_tree_method("direct", inputs(ranker="lightgbm", label=Label("click"), propensities=known))
        (task,) = method.tasks(log)
        data = lightgbm.Dataset(task.rows.features, task.rows.label, init_score=task.rows.offset)
        trees = lightgbm.train({**lightgbm_parameters(0.1, 0, 0), **task.library_options}, data, 30)
        scores = trees.predict(log.features, raw_score=True)
        correlations.append(np.corrcoef(np.exp(scores), user.attracted(torch.from_numpy(log.relevance)).numpy())[0, 1])
    assert correlations[0] > correlations[1] + 0.01
