"""Methods for logs of a good ranker: sample weights, gradient reversal and start of towers, and upe."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call, vmap

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method
from ultr.methods.base import POSITION_SPEED
from ultr.methods.position_model import LoggingStrata, LoggingWeights
from ultr.methods.towers import Adversary
from ultr.training.config import TrainingOptions
from ultr.training.loop import start

FEATURES = 4
POSITIONS = tuple(range(1, 13))
THETA = {k: 0.9 / k for k in POSITIONS}
CORRECTED = {"sample_weights": "logging", "reversal": 0.5, "start": "theta"}


def inputs(**changes) -> MethodInputs:
    given = {
        "label": Label("click"),
        "features": FEATURES,
        "positions": POSITIONS,
        "ranker": "linear",
        "feature_names": tuple(f"f{i}" for i in range(FEATURES)),
        "binary": ("click",),
    }
    return MethodInputs(**{**given, **changes})


def feedback_log(requests: int = 80, seed: int = 0) -> Log:
    log = make_shown_log(requests=requests, features=FEATURES, seed=seed)
    weights = np.random.default_rng(seed).uniform(0.5, 2, len(log)).astype(np.float32)
    return replace(simulate_log(log, User(), seed=seed)[0], weights=weights)


def tiny_log() -> Log:
    """Make a log of eight lists of three items; the item with the larger feature is higher, except in two lists."""
    features = np.tile(np.array([[1.0], [0.0], [-1.0]], np.float32), (8, 1))
    positions = np.array([[1, 2, 3]] * 6 + [[3, 2, 1], [2, 1, 3]]).ravel()
    return Log(
        features=features,
        offsets=np.arange(0, 25, 3),
        request_ids=pa.array(np.arange(8)),
        feature_names=("f0",),
        positions=positions,
        actions={"click": np.tile([1.0, 0.0, 0.0], 8).astype(np.float32)},
    )


def ready(name: str, log: Log, **options):
    torch.manual_seed(0)
    method = make_method(name, inputs(), **options)
    start(method, log, TrainingOptions(device="cpu"))
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    return method.eval()


# --- Sample weights -------------------------------------------------------------------------------------------------


def test_sample_weights_are_the_ratio_of_shares_and_average_to_one(monkeypatch):
    monkeypatch.setattr("ultr.methods.position_model.ROWS_IN_CELL", 2.5)  # 24 rows and 3 positions give 3 strata
    log = tiny_log()
    weights = LoggingWeights(inputs(features=1, positions=(1, 2, 3)), max_weight=math.inf)
    weights.fit(log, seed=0)
    lists = Lists.from_log(log)
    strata, found = weights.strata(lists), weights(lists)
    assert strata.unique().tolist() == [0, 1, 2]
    assert (strata == torch.tensor([2, 1, 0])).all()  # by the only feature
    share = {(1, 1): 6 / 8, (1, 3): 1 / 8, (1, 2): 1 / 8, (0, 2): 7 / 8, (0, 1): 1 / 8, (-1, 3): 7 / 8, (-1, 1): 1 / 8}
    ratios = torch.tensor(
        [(1 / 3) / share[int(x), int(k)] for x, k in zip(log.features[:, 0], log.positions, strict=True)]
    )
    # Two of the nine cells are empty, (0, 3) and (-1, 2), so that the ratios average to 7/9 and are divided by it.
    assert float(ratios.mean()) == pytest.approx(7 / 9)
    torch.testing.assert_close(found.flatten(), ratios / (7 / 9))
    assert float(found.mean()) == pytest.approx(1)
    clipped = LoggingWeights(inputs(features=1, positions=(1, 2, 3)), max_weight=1.0)
    clipped.fit(log, seed=0)
    expected = ratios.clamp(max=1)
    torch.testing.assert_close(clipped(lists).flatten(), expected / expected.mean())


@pytest.mark.parametrize("max_weight", [2.0, math.inf])
def test_weighted_rows_have_the_same_positions_in_all_strata(max_weight):
    log = feedback_log(requests=400)
    weights = LoggingWeights(inputs(), max_weight=max_weight)
    weights.fit(log, seed=0)
    lists = Lists.from_log(log)
    strata, found = weights.strata(lists)[lists.where], weights(lists)[lists.where].double()
    rows = torch.from_numpy(np.repeat(log.weights, log.lengths)).double()
    assert float((rows * found).sum() / rows.sum()) == pytest.approx(1, rel=1e-5)
    if max_weight == math.inf:
        place = torch.from_numpy(log.positions) - 1
        cells = torch.zeros(20, 12, dtype=torch.float64).index_put((strata, place), rows * found, accumulate=True)
        expected = torch.zeros(12, dtype=torch.float64).index_put((place,), rows, accumulate=True) / rows.sum()
        shown = cells > 0
        by_stratum = torch.zeros(20, dtype=torch.float64).index_put((strata,), rows, accumulate=True)
        ratio = cells / (by_stratum[:, None] * expected)
        assert ratio[shown].std() < 1e-4  # one factor, because some cells are empty


@given(seed=st.integers(0, 1000))
def test_strata_do_not_depend_on_padding_or_on_the_order_of_items(seed):
    torch.manual_seed(seed)
    strata = LoggingStrata(inputs())
    strata.edges.copy_(torch.linspace(-1.9, 2.1, 19))
    features = torch.randn(3, 5, FEATURES)
    where = torch.arange(5) < torch.tensor([[5], [2], [1]])
    lists = Lists(features, where, torch.ones(3), torch.arange(1, 6).expand(3, 5))
    found, order = strata(lists), torch.randperm(5)
    turned = Lists(features[:, order], where[:, order], lists.weights, lists.positions)
    assert torch.equal(strata(turned)[where[:, order]], found[:, order][where[:, order]])
    garbage = torch.where(where[..., None], features, torch.nan)
    assert torch.equal(strata(replace(lists, features=garbage))[where], found[where])


def test_the_model_of_the_logging_ranker_is_fixed_and_has_no_dropout():
    method = ready("sum-click", feedback_log(), sample_weights="logging").train()
    policy = method.sample_weights
    assert not list(policy.parameters())
    assert not any(part.training for part in policy.strata.modules())
    assert "sample_weights.strata.linear.output.weight" in method.state_dict()


def test_all_kinds_of_features_and_a_network_as_logging_ranker(monkeypatch):
    monkeypatch.setattr("ultr.bias.logging_policy.NETWORK_STEPS", 60)
    rng = np.random.default_rng(0)
    log = make_shown_log(requests=800, features=FEATURES)
    features = log.features.copy()
    features[:, 3] = rng.integers(0, 3, log.rows)
    score = 2 * features[:, 0] * features[:, 1] + np.array([0.0, 1.0, -1.0])[features[:, 3].astype(int)]
    order = np.lexsort((-score, log.request_of_row))
    positions = np.empty(log.rows, np.int64)
    positions[order] = np.concatenate([np.arange(1, n + 1) for n in log.lengths])
    log = replace(
        log, features=features, positions=positions, vocabularies={log.feature_names[3]: pa.array(["a", "b"])}
    )
    strata = LoggingStrata(inputs(categories={3: 3}))
    expected, _ = strata.fit(log, seed=0)
    assert strata.by_network == 1
    lists = Lists.from_log(log)
    found = strata(lists)[lists.where].numpy()
    assert (found == expected).mean() > 0.999
    assert np.corrcoef(found, positions)[0, 1] < -0.5


@pytest.mark.parametrize("name", ["sum-click", "pal-click"])
def test_the_weighted_loss_is_the_explicit_sum(name):
    log = feedback_log()
    method, lists = ready(name, log, sample_weights="logging"), Lists.from_log(log)
    with torch.no_grad():
        method.towers["on click"].table.weight.copy_(torch.linspace(0.1, -0.1, 13))
    scores, weights = method.ranker.outputs(lists.features).detach().double(), method.sample_weights(lists)
    total, tower = np.zeros(len(log)), method.towers["on click"].table.values.detach()
    for i, j in lists.where.nonzero().tolist():
        s, b = float(scores[i, j, 0]), float(tower[int(lists.positions[i, j]) - 1])
        p = 1 / (1 + math.exp(-s - b)) if name == "sum-click" else 1 / (1 + math.exp(-s)) / (1 + math.exp(-b))
        total[i] -= float(weights[i, j]) * math.log(p if lists.actions["click"][i, j] else 1 - p)
    assert method.loss(lists).item() == pytest.approx(np.average(total, weights=log.weights), rel=1e-5)
    assert len(set(weights[lists.where].tolist())) > 5


# --- Gradient reversal ----------------------------------------------------------------------------------------------


def test_gradients_of_a_reversed_tower_are_as_computed_by_hand():
    """The score s is linear, P(click) = sigmoid(s + b), and the adversary predicts sigmoid(s) by sigmoid(v b + w)."""
    log, strength = feedback_log(), 0.7
    method, lists = ready("sum-click", log, reversal=strength), Lists.from_log(log)
    tower, line = method.towers["on click"].table, method.adversaries["on click"].line
    with torch.no_grad():
        tower.weight.copy_(torch.linspace(0.1, -0.2, 13))
        line.weight.copy_(torch.tensor([0.13, -0.04]))
    method.loss(lists).backward()
    score = method.ranker.outputs(lists.features).detach().squeeze((-2, -1)).double()
    b, (v, w) = tower.values.detach().double()[lists.positions - 1], line.values.detach().double().tolist()
    click, share = (
        lists.actions["click"].double(),
        (lists.where * lists.weights[:, None] / lists.weights.sum()).double(),
    )
    missed = share * (torch.sigmoid(score + b) - click)  # slope of the click loss by its logit
    predicted = share * (torch.sigmoid(v * b + w) - torch.sigmoid(score))  # slope of the adversary's loss by its logit
    by_position = torch.zeros(13, dtype=torch.float64)
    by_position.index_put_((lists.positions - 1,), missed - strength * v * predicted, accumulate=True)
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(tower.weight.grad.double(), POSITION_SPEED * by_position, **close)
    expected = POSITION_SPEED * torch.stack([(predicted * b).sum(), predicted.sum()])
    torch.testing.assert_close(line.weight.grad.double(), expected, **close)
    encoded = method.ranker.ranker.encoder(lists.features).double()
    by_feature = (missed[..., None] * encoded).sum((0, 1))  # the ranker has no gradient from the adversary
    torch.testing.assert_close(method.ranker.ranker.output.weight.grad[0].double(), by_feature, **close)


def test_an_adversary_changes_no_value_and_none_is_made_without_reversal():
    torch.manual_seed(0)
    tower, scores = torch.randn(2, 3), torch.randn(2, 3)
    where = torch.ones(2, 3, dtype=torch.bool)
    losses = [Adversary(strength)(tower, scores, where=where, weights=torch.ones(2)) for strength in (0.1, 5.0)]
    assert torch.equal(*losses)
    assert not make_method("pal-click", inputs()).adversaries
    both = inputs(label=Label("click + dwell"))
    assert list(make_method("pal-click", both, towers="all", reversal=1).adversaries) == ["on click"]


# --- Start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum-click", "pal-click", "pal-click-dwell"])
def test_towers_start_at_known_examination(name):
    log = feedback_log()
    method = make_method(name, inputs(propensities=THETA, label=Label("click + dwell")), start="theta", towers="all")
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    for action, tower in zip(("click", "dwell"), method.towers.values(), strict=True):
        values = tower.table.values
        theta = torch.tensor(list(THETA.values()))
        expected = theta.logit() if name != "sum-click" else (theta / theta[0]).log()
        if name == "sum-click" and action == "dwell":
            expected = torch.zeros(12)
        torch.testing.assert_close(values[:-1], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values[-1], expected.mean(), rtol=1e-5, atol=1e-6)


def test_towers_start_at_examination_that_is_estimated_from_simulated_users():
    log = make_shown_log(requests=300, features=FEATURES)
    method = make_method("pal-click", inputs(), start="theta")
    method.estimate_bias(log, user=User(), sessions=3000, seed=0)
    torch.testing.assert_close(method.towers["on click"].table.values[:-1].sigmoid(), method.start.theta)
    assert method.start.theta.max() == pytest.approx(0.7)
    assert method.start.theta[8] < 0.5 * method.start.theta[0]


# --- upe ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relevance", ["strata", "dual"])
def test_the_loss_of_upe_is_the_explicit_sum(relevance):
    log = feedback_log()
    method, lists = ready("upe", log, relevance=relevance, max_weight=5), Lists.from_log(log)
    with torch.no_grad():
        method.propensity.weight.copy_(torch.linspace(0.1, -0.2, 12))
        method.effect.weight.copy_(torch.linspace(-0.1, 0.15, 20))
    scores, strata = method.score(lists.features).detach().double(), method.strata(lists)
    assert len(set(strata[lists.where].tolist())) > 1
    total, effect, positions = [], method.effect.values.tolist(), method.propensity.values.tolist()
    for i in range(len(lists)):
        items = lists.where[i].nonzero().flatten().tolist()
        g = {j: positions[int(lists.positions[i, j]) - 1] for j in items}
        h = {j: g[j] + effect[int(strata[i, j])] for j in items}
        s = {j: float(scores[i, j]) for j in items}
        first = min(items, key=lambda j: int(lists.positions[i, j]))
        loss = 0.0
        for j in items:
            if lists.actions["click"][i, j]:
                seen = min(5, math.exp(positions[0] - g[j]))
                relevant = min(5, math.exp(s[first] - s[j])) if relevance == "dual" else 1
                loss += seen * (math.log(sum(math.exp(x) for x in s.values())) - s[j])
                loss += relevant * (math.log(sum(math.exp(x) for x in h.values())) - h[j])
        total.append(loss)
    assert method.loss(lists).item() == pytest.approx(np.average(total, weights=log.weights), rel=1e-5)


def test_the_expected_gradient_of_the_propensities_is_zero_at_the_truth():
    """If relevance is a function of the stratum, g = log θ and u = log relevance fit the expected clicks exactly."""
    torch.manual_seed(0)
    log = feedback_log()
    method, lists = ready("upe", log), Lists.from_log(log)
    theta, relevance = torch.linspace(1, 0.1, 12), torch.linspace(0.1, 0.9, 20)
    with torch.no_grad():
        method.propensity.weight.copy_(theta.log() / POSITION_SPEED)
        method.effect.weight.copy_(relevance.log() / POSITION_SPEED)
    expected = theta[lists.positions - 1] * relevance[method.strata(lists)] * lists.where
    logits = method.propensity(method.index(lists.positions))
    loss = method.propensity_loss(lists, logits, expected, torch.zeros_like(logits))
    slopes = torch.autograd.grad(loss, [method.propensity.weight, method.effect.weight])
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-5
    with torch.no_grad():
        method.effect.weight.zero_()  # without the confounder, other propensities fit better
    logits = method.propensity(method.index(lists.positions))
    (slope,) = torch.autograd.grad(
        method.propensity_loss(lists, logits, expected, torch.zeros_like(logits)), method.propensity.weight
    )
    assert float(slope.abs().max()) > 1e-3


def test_the_report_of_upe_has_ratios_of_propensities_and_the_confounding_effect():
    method = ready("upe", feedback_log())
    with torch.no_grad():
        method.propensity.weight.copy_(torch.linspace(0.3, 0, 12))
    report = method.bias([])
    assert report["theta"][0] == 1
    assert report["theta"][-1] == pytest.approx(math.exp(-3), abs=1e-5)
    assert report["confounding"] == [0.0] * 20


# --- All of them ----------------------------------------------------------------------------------------------------

VARIANTS = [("sum-click", CORRECTED), ("pal-click", CORRECTED), ("upe", {}), ("upe", {"relevance": "dual"})]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("clicks", ["none", "all", "some"])
def test_gradients_are_finite_and_padding_has_none(name, options, clicks):
    log = feedback_log()
    if clicks != "some":
        log = replace(log, actions={n: np.full_like(v, clicks == "all") for n, v in log.actions.items()})
    method, lists = ready(name, log, **options).train(), Lists.from_log(log)
    features = torch.where(lists.where[..., None], lists.features, 99.0).requires_grad_()
    method.loss(replace(lists, features=features)).backward()
    assert not features.grad[~lists.where].any()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_losses_of_several_learners_at_once_equal_those_of_each(name, options):
    logs = [feedback_log(seed=seed) for seed in (0, 0)]
    several = [ready(name, log, **options) for log in logs]
    with torch.no_grad():
        for p in several[1].parameters():
            p.add_(0.05 * torch.randn_like(p))
    lists = Lists.from_log(logs[0])
    stacked = {
        key: torch.stack([method.state_dict()[key] for method in several])
        for key, value in several[0].state_dict().items()
        if value.is_floating_point()
    }

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner = several[0]

        def forward(self) -> torch.Tensor:
            return self.learner.loss(lists)

    call = Call()
    found = vmap(lambda own: functional_call(call, {f"learner.{key}": value for key, value in own.items()}))(stacked)
    torch.testing.assert_close(found, torch.stack([method.loss(lists) for method in several]))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_saved_weights_give_the_same_loss_in_another_method(name, options):
    log = feedback_log()
    method, lists = ready(name, log, **options), Lists.from_log(log)
    other = make_method(name, inputs(), **options).eval()
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.loss(lists), method.loss(lists))


def test_weights_are_limited_only_where_there_are_weights():
    assert not METHODS["sum-click"].limits_weights({})
    assert METHODS["sum-click"].limits_weights({"sample_weights": "logging"})
    assert not METHODS["sum-click"].limits_weights({"sample_weights": "logging", "max_weight": 3})
    assert METHODS["upe"].limits_weights({})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sum-click", {"reversal": -1}, "'reversal' must be at least 0"),
        ("pal-click", {"sample_weights": "log"}, "'sample_weights' must be one of none, logging"),
        ("pal-click", {"start": "one"}, "'start' must be one of zero, theta"),
        ("upe", {"relevance": "all"}, "'relevance' must be one of strata, dual"),
    ],
)
def test_wrong_options_are_rejected(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_method(name, inputs(), **options)
