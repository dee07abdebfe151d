"""A bias model of trees: recovery of the parameters of simulated users, and its files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch

from ultr.datasets.users import EYE_TRACKING, make_user, simulate_log
from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import MethodInputs
from ultr.methods.bias_model import BiasModel, diagnosis
from ultr.methods.boosted_bias import BoostedOutputs, _ensembles, fit_boosted
from ultr.methods.pair_weights import PairWeights
from ultr.rankers.boosters import TreeRows, binned, lightgbm_parameters

REQUESTS, ITEMS, HELD = 3000, 8, 600
THETA = np.array(EYE_TRACKING[:ITEMS])
CODES = 4


def world(user: str = "pbm", seed: int = 0) -> Log:
    """Make a log with relevance by the first feature and a category; the order of lists partly follows it."""
    rng = np.random.default_rng(seed)
    rows = REQUESTS * ITEMS
    features = rng.normal(size=(rows, 3)).astype(np.float32)
    features[:, 2] = rng.integers(1, CODES, rows)
    worth = features[:, 0] + (features[:, 2] == 2)
    logged = (worth + rng.normal(size=rows)).reshape(REQUESTS, ITEMS)
    order = (np.argsort(-logged, axis=1) + ITEMS * np.arange(REQUESTS)[:, None]).ravel()
    log = Log(
        features=features[order],
        offsets=np.arange(0, rows + 1, ITEMS),
        request_ids=pa.array(range(REQUESTS)),
        feature_names=("x", "noise", "kind"),
        positions=np.tile(np.arange(1, ITEMS + 1), REQUESTS),
        relevance=np.clip(np.round(1.5 + 1.5 * worth[order]), 0, 4).astype(np.float32),
    )
    return simulate_log(log, make_user(user), seed=seed)[0]


def fitted(log: Log, *, positions=tuple(range(1, ITEMS + 1)), rounds: int = 20, seed: int = 0, **options) -> BiasModel:
    inputs = MethodInputs(Label(), 3, positions, {2: CODES}, ranker="linear", bias_ranker="mlp", **known(options))
    model = BiasModel(inputs, **options).eval()
    model.estimate(log, user=None, sessions=0, seed=seed)
    learned, held = log.select(np.arange(HELD, REQUESTS)), log.select(np.arange(HELD))
    labels = np.asarray(Label()(learned.actions), np.float32)
    held_out = [Lists.from_log(held)]
    fit_boosted(model, learned, labels, held_out=held_out, categorical=(2,), rounds=rounds, seed=seed)
    return model


def known(options: dict) -> dict:
    """Fit a bias model with the true examination, unless that is to be estimated."""
    if options.get("theta_from") == "regression":
        return {}
    return {"propensities": dict(zip(range(1, ITEMS + 1), THETA.tolist(), strict=True))}


@torch.no_grad()
def beta_of(model: BiasModel, log: Log) -> np.ndarray:
    return model.predictions(torch.from_numpy(log.features))[0].sigmoid().numpy()


@pytest.fixture(scope="module")
def log() -> Log:
    return world()


@pytest.fixture(scope="module")
def found(log) -> BiasModel:
    return fitted(log, rounds=250)


def test_beta_is_recovered(log, found):
    with_features, constant = found.held_out.tolist()
    assert with_features > constant + 0.1
    truth = make_user("pbm").attracted(torch.from_numpy(log.relevance)).numpy()
    held = slice(0, HELD * ITEMS)
    beta = beta_of(found, log)[held]
    assert np.corrcoef(beta, truth[held])[0, 1] > 0.85
    assert beta.mean() == pytest.approx(truth[held].mean(), rel=0.1)


def test_values_are_recovered(log, found):
    """Compare E[c | c > 0] with the mean label of clicks, in deciles of the prediction."""
    label = np.asarray(Label()(log.actions))[: HELD * ITEMS]
    with torch.no_grad():
        value = found.predictions(torch.from_numpy(log.features[: HELD * ITEMS]))[1].exp().numpy()
    clicked = label > 0
    order = np.argsort(value[clicked])
    low, high = np.array_split(label[clicked][order], 3)[::2]
    assert high.mean() > 1.3 * low.mean()
    assert value[clicked].mean() == pytest.approx(label[clicked].mean(), rel=0.15)


def test_theta_is_recovered_if_the_order_is_partly_random(log):
    model = fitted(log, theta_from="regression", scale=EYE_TRACKING[0], rounds=100)
    theta = model.theta.numpy()
    assert theta.max() == pytest.approx(EYE_TRACKING[0])
    assert np.abs(theta / THETA - 1)[:6].max() < 0.25
    assert np.abs(theta / THETA - 1).max() < 0.45  # where clicks are rare, the shape of beta matters
    assert (model.theta_minus.numpy() <= theta + 1e-6).all()


def test_positions_never_shown_keep_their_values(log):
    model = fitted(log, positions=(*range(1, ITEMS + 1), 99), theta_from="regression", scale=0.6, rounds=10)
    assert model.theta[-1] == pytest.approx(0.6)
    assert model.theta[:-1].max() == pytest.approx(0.6)


def test_trust_in_pairs_is_learned(log):
    model = fitted(world("trust"), pairs=True, rounds=15)
    assert (model.plus >= model.minus).all()
    assert model.plus.max() <= 0.99
    assert model.minus.min() >= 0.01
    apart = ~torch.eye(ITEMS, dtype=torch.bool)
    assert (model.plus[apart] != 0.95).any()
    outputs = model.predictions(torch.from_numpy(log.features))
    assert len(np.unique(outputs[2].numpy())) > 10
    assert all(torch.isfinite(values).all() for values in outputs)


def test_values_may_be_scaled_by_position(log):
    model = fitted(log, scaled_values=True, rounds=10)
    assert model.rho[model.theta.argmax()] == 1
    np.testing.assert_allclose(model.rho[:4], 1, atol=0.35)  # the dwell time of this user does not depend on position


@pytest.mark.parametrize("pairs", [False, True])
def test_outputs_are_saved_and_read_again(pairs, log, tmp_path):
    model = fitted(log, pairs=pairs, rounds=5)
    assert not BoostedOutputs.is_at(tmp_path)
    model.network.save(tmp_path)
    assert BoostedOutputs.is_at(tmp_path)
    features = torch.from_numpy(log.features[:80].copy())
    features[0, 2] = 0
    again = BoostedOutputs.load(tmp_path, (2,))
    assert again(features.view(10, ITEMS, 3)).shape == (10, ITEMS, 3)
    torch.testing.assert_close(again(features), model.network(features), rtol=0, atol=0)
    assert (again.boosters[2] is not None) == pairs


def test_extended_trees_go_on_from_their_own_scores(log, found):
    """Each ensemble of trees has a subset of one data set, and the scores of its own trees on it."""
    beta, value = (trees.shortened(trees.rounds) for trees in found.network.boosters[:2])
    starts, parameters = found.network.constants, {**lightgbm_parameters(0.1, 0, 0), "objective": "none"}
    rows = binned(TreeRows(log.features, log.lengths, log.feature_names, (2,)), {"seed": 0, "min_data_in_leaf": 200})
    places = np.arange(log.offsets[10], log.rows)
    for extended in ([beta, value, None], [beta, value, beta]):
        data = partial(rows.binned.subset, places)
        ensembles = _ensembles(data, (2,), {**parameters, "min_data_in_leaf": 20}, starts, extended)
        for ensemble, trees, start in zip(ensembles, extended, starts, strict=True):
            ensemble.grow(lambda scores: (torch.zeros_like(scores), torch.ones_like(scores)))
            before = start + (0 if trees is None else trees.predict(log.features[places]))
            np.testing.assert_allclose(ensemble.scores.numpy(), np.broadcast_to(before, len(places)), atol=1e-6)


def test_one_seed_gives_the_same_bits(log):
    features = torch.from_numpy(log.features)
    first, same = (fitted(log, pairs=True, rounds=5) for _ in range(2))
    assert torch.equal(first.network(features), same.network(features))
    assert torch.equal(first.plus, same.plus)


def test_requests_count_by_weight(log):
    """A request of weight two counts like two requests; equal weights change nothing."""
    few = log.select(np.arange(REQUESTS) % 2 == 0)
    ones = fitted_on(few)
    assert torch.allclose(ones, fitted_on(replace(few, weights=np.ones(len(few), np.float32))))
    doubled = np.where(np.arange(len(few)) % 3, 1, 2)
    weighted = fitted_on(replace(few, weights=doubled.astype(np.float32)))
    np.testing.assert_allclose(weighted, fitted_on(few.select(np.repeat(np.arange(len(few)), doubled))), atol=1e-5)
    assert not torch.allclose(ones, weighted, atol=1e-3)


def fitted_on(log: Log) -> torch.Tensor:
    """Return θ by regression after a few rounds of trees with one split each, so that only sums matter."""
    model = BiasModel(MethodInputs(Label(), 3, tuple(range(1, ITEMS + 1))), theta_from="regression").eval()
    labels = np.asarray(Label()(log.actions), np.float32)
    signs = replace(log, features=np.where([True, False, False], log.features > 0, 0).astype(np.float32))
    fit_boosted(model, signs, labels, held_out=[Lists.from_log(signs)], categorical=(), rounds=3, seed=0)
    return model.theta


def test_positions_are_needed(log):
    model = BiasModel(MethodInputs(Label(), 3, (1,)))
    with pytest.raises(DataError, match="--position"):
        fit_boosted(
            model, replace(log, positions=None), np.zeros(log.rows), held_out=[], categorical=(), rounds=1, seed=0
        )


# --- Without trust in pairs -----------------------------------------------------------------------------------------


def two_items() -> tuple[Log, float, tuple[float, float]]:
    """Make a log of two items with the shares that a model with ε⁺ = 1 and ε⁻ = 0 expects; return its γ and β too."""
    theta, beta, gamma = (0.8, 0.5), (0.8, 0.6), 0.7
    first = theta[0] * theta[1] * gamma + theta[0] * (1 - theta[1]) * beta[0]  # P(c_1 > c_2), Eq. 13
    second = theta[0] * theta[1] * (1 - gamma) + theta[1] * (1 - theta[0]) * beta[1]
    less_first, less_second = theta[1] * beta[1] - second, theta[0] * beta[0] - first  # both positive, one of them less
    shares = {
        (2, 1): less_first,
        (2, 0): first - less_first,
        (1, 2): less_second,
        (0, 2): second - less_second,
        (0, 0): 1 - first - second,
    }
    assert min(shares.values()) > 0
    counts = {labels: round(1000 * share) for labels, share in shares.items()}
    labels = np.array([labels for labels, count in counts.items() for _ in range(count)], np.float32)
    log = Log(
        features=np.tile(np.array([[1.0], [-1.0]], np.float32), (len(labels), 1)),
        offsets=np.arange(0, 2 * len(labels) + 1, 2),
        request_ids=pa.array(range(len(labels))),
        feature_names=("x",),
        positions=np.tile([1, 2], len(labels)),
        actions={"click": (labels > 0).ravel().astype(np.float32), "dwell": labels.ravel()},
    )
    return log, gamma, beta


@pytest.mark.parametrize("kind", ["network", "trees"])
def test_without_trust_in_pairs_the_tables_are_constant_and_gamma_has_its_closed_form(kind):
    """γ = (P(c_1>c_2) - θ_1 (1-θ_2) β_1) / (θ_1 θ_2) solves Eq. 13 with ε⁺ = 1 and ε⁻ = 0."""
    log, gamma, beta = two_items()
    label = Label("dwell")
    inputs = MethodInputs(label, 1, (1, 2), ranker="linear", propensities={1: 0.8, 2: 0.5})
    torch.manual_seed(0)
    model = PairWeights(inputs, loss="ipw", row_power=0.0).bias_model
    lists = Lists.from_log(log)
    if kind == "trees":
        values = np.asarray(label(log.actions), np.float32)
        fit_boosted(model.eval(), log, values, held_out=[lists], categorical=(), rounds=200, seed=0)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(600):
            optimizer.zero_grad()
            with torch.no_grad():
                model.update(lists)
            model.loss(lists).backward()
            optimizer.step()
    assert (model.plus == 1).all()
    assert (model.minus == 0).all()
    with torch.no_grad():
        logit, _, preference = model.predictions(torch.tensor([[1.0], [-1.0]]))
    assert logit.sigmoid().tolist() == pytest.approx(beta, abs=0.01)
    assert float((preference[0] - preference[1]).sigmoid()) == pytest.approx(gamma, abs=0.01)
    assert not {"plus", "minus"} & model.state_dict().keys()  # constants, so tables of another model do not load
    report = diagnosis(model, [lists], weights=lambda lists, labels: torch.ones(len(lists), 2, 2), clip=10)
    assert "eps_plus" not in report
