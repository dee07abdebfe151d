"""The method pairwise-em: losses against explicit sums, EM against the likelihood, and warnings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from conftest import make_shown_log
from ultr.bias.equations import exact_weights, examined_though_zero, pair_examined, pair_trust
from ultr.bias.examination import Examination
from ultr.datasets.users import EYE_TRACKING, User, simulate_log
from ultr.errors import DataError, OptionError
from ultr.evaluation.metrics import discounts_at, ranks_of
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method
from ultr.methods.bias_model import BiasModel
from ultr.training.bias_stage import fit_bias
from ultr.training.config import TrainingOptions

FEATURES = 5
LOSSES = [("posterior", "posterior"), ("opt", "posterior")]
LOSSES += [(loss, weights) for loss in ("ipw", "bayes-ipw", "opt") for weights in ("exact", "paper")]


def inputs(**changes) -> MethodInputs:
    given = {
        "label": Label(),
        "features": FEATURES,
        "positions": tuple(range(1, 13)),
        "ranker_options": {"hidden": (8,)},
    }
    return MethodInputs(**{**given, **changes})


@pytest.fixture
def lists() -> Lists:
    return Lists.from_log(simulate_log(make_shown_log(requests=40, features=FEATURES), User(eta=0.3), seed=0)[0])


def ready(**options):
    """Make a method whose bias model has arbitrary values, as if it was trained."""
    torch.manual_seed(0)
    method = make_method("pairwise-em", inputs(), **options)
    model, generator = method.bias_model, torch.Generator().manual_seed(1)
    model.theta.copy_(torch.linspace(0.9, 0.2, 12))
    model.theta_minus.copy_(torch.linspace(0.8, 0.1, 12))
    model.minus.copy_(0.05 + 0.3 * torch.rand(12, 12, generator=generator))
    model.plus.copy_(0.6 + 0.3 * torch.rand(12, 12, generator=generator))
    return method


@torch.no_grad()
def written_out(method, lists) -> float:
    """Compute the loss in a loop over pairs."""
    model, labels = method.bias_model, method.labels(lists)
    scores = method.score(lists.features).detach()
    logit, log_value, g = model.predictions(lists.features)
    beta, mu = logit.sigmoid(), log_value.exp()
    ranks = ranks_of(scores, where=lists.where)
    total = 0.0
    for u in range(len(lists)):
        places = model.index(lists.positions[u])
        theta = model.theta[places]
        t = examined_though_zero(theta, beta[u])
        worth = torch.where(labels[u] > 0, labels[u], (1 - t) * beta[u] * mu[u])
        for i in torch.nonzero(lists.where[u]).flatten():
            for j in torch.nonzero(lists.where[u]).flatten():
                pain = softplus(scores[u, j] - scores[u, i])
                a, b = discounts_at(ranks[u, [i, j]], torch.float32)
                if method.weights == "posterior":
                    moved = (a - b).abs() if method.kind == "opt" else 1.0
                    total += (worth[i] - worth[j]).clamp(min=0) * moved * pain
                    continue
                if not labels[u, i] > labels[u, j]:
                    continue
                plus, minus = model.plus[places[i], places[j]], model.minus[places[i], places[j]]
                gamma, positive = (g[u, i] - g[u, j]).sigmoid(), labels[u, j] > 0
                if method.trust != "pairs":
                    plus, minus = torch.tensor(1.0), torch.tensor(0.0)
                if method.weights == "exact":
                    weight = exact_weights(positive, theta[i], theta[j], beta[u, j])
                    weight = weight * (pair_trust(plus, minus, gamma) / plus if positive else 1.0)
                else:
                    examined = pair_examined(model.theta_minus[places[j]], plus, minus, gamma, beta[u, i])
                    weight = (1.0 if positive else examined) / (theta[i] * theta[j]) * pair_trust(plus, minus, gamma)
                weight = min(float(weight), method.max_weight)
                if method.kind == "opt":
                    weight *= float((labels[u, i] - labels[u, j]).abs() * (a - b).abs())
                total += weight * pain
    return float(total) / len(lists)


@pytest.mark.parametrize(("loss", "weights"), LOSSES)
def test_losses_equal_explicit_sums(loss, weights, lists):
    method = ready(loss=loss, weights=weights)
    assert method.loss(lists).item() == pytest.approx(written_out(method, lists), rel=1e-4)


@pytest.mark.parametrize("weights", ["exact", "paper"])
def test_bayes_ipw_is_ipw_without_trust_bias(weights, lists):
    bayes, ipw = ready(loss="bayes-ipw", weights=weights), ready(loss="ipw", weights=weights)
    bayes.bias_model.plus.fill_(1.0)
    bayes.bias_model.minus.fill_(0.0)
    assert torch.equal(bayes.loss(lists), ipw.loss(lists))


def test_the_regressions_follow_the_gradient_of_the_likelihood(lists):
    torch.manual_seed(0)
    model = BiasModel(inputs(), pairs=True).eval()
    model.theta.copy_(torch.linspace(0.9, 0.2, 12))
    model.loss(lists).backward()
    regressed = model.network.layers[-1].weight.grad.clone()
    found = BiasModel.log_likelihood.__wrapped__(model, lists)
    clicks, values, pairs = (found[name].mean() for name in ("clicks", "values", "pairs"))
    # Rows of the last layer: β, μ, g. β enters the likelihood of pairs too, but is learned from items alone.
    last = model.network.layers[-1].weight
    items = torch.autograd.grad(-(clicks + values), last, retain_graph=True)[0]
    torch.testing.assert_close(regressed[:2], items[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(regressed[2], torch.autograd.grad(-pairs, last)[0][2], rtol=1e-4, atol=1e-5)


def test_sampled_targets_have_the_mean_of_soft_ones(lists):
    torch.manual_seed(0)
    soft, sampled = BiasModel(inputs()).eval(), BiasModel(inputs(), sampled=True).eval()
    soft.theta.copy_(torch.linspace(0.9, 0.2, 12))
    sampled.load_state_dict(soft.state_dict())
    losses = torch.stack([sampled.loss(lists).detach() for _ in range(400)])
    assert losses.std() > 0
    assert abs((losses.mean() - soft.loss(lists)).item()) < 3.5 * losses.std() / 20


def test_positions_can_be_any_ids_and_unseen_ones_keep_their_prior(lists):
    model = BiasModel(inputs(positions=(3, 70, 500)), pairs=True, theta_from="regression", scale=0.8)
    places = torch.tensor([3, 70])[torch.arange(lists.where.shape[1]) % 2]
    shown = replace(lists, positions=places.expand(lists.where.shape).clone())
    with torch.no_grad():
        for _ in range(40):
            model.update(shown)
    assert model.theta[2] == pytest.approx(0.8)
    assert (model.plus[2] == 0.95).all()
    assert (model.minus[:, 2] == 0.05).all()
    assert not (model.plus[:2, :2] == 0.95).all()
    assert model.theta.max() == pytest.approx(0.8)


def test_an_empty_cell_of_a_batch_keeps_its_parameter(lists):
    model = BiasModel(inputs(), pairs=True)
    first_two = replace(lists, where=lists.where & (lists.positions <= 2))
    with torch.no_grad():
        model.update(lists)
        before = model.plus.clone()
        model.update(first_two)
    torch.testing.assert_close(model.plus[5, 6], before[5, 6])
    assert abs(model.plus[0, 1] - before[0, 1]) > 1e-4


def world(requests: int = 1500, seed: int = 0):
    """Make a log with relevance by the first feature; the order of lists of ten partly follows it."""
    rng = np.random.default_rng(seed)
    log = make_shown_log(requests=requests, seed=seed, features=FEATURES)
    grades = np.clip(np.round(1.5 + 1.5 * log.features[:, 0]), 0, 4).astype(np.float32)
    logged = log.features[:, 0] + rng.normal(size=log.rows)
    request = np.repeat(np.arange(len(log)), log.lengths)
    order = np.lexsort((-logged, request))
    positions = np.empty(log.rows, np.int64)
    positions[order] = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths) + 1
    return replace(log, relevance=grades, positions=positions)


@pytest.mark.parametrize("theta", [pytest.param("strata", marks=pytest.mark.long), "regression"])
def test_theta_is_learned_first(theta):
    log = world()
    method = make_method("pairwise-em", inputs(), theta=theta, scale=0.68)
    options = TrainingOptions(bias_steps=600, batch=128, device="cpu")
    fit_bias(method, log, options, user=User())
    found = method.bias_model.theta[:10].numpy()
    assert found.max() == pytest.approx(0.68)
    assert np.abs(found / np.array(EYE_TRACKING) - 1).max() < (0.15 if theta == "strata" else 0.4)
    report = method.bias([Lists.from_log(simulate_log(log, User(), seed=5)[0])])
    assert report["theta_scale"].startswith("0.68")
    assert not [w for w in report["warnings"] if w["name"] in ("collapse", "divergence")]
    assert report["held_out_log_likelihood"]["beta of x"] > report["held_out_log_likelihood"]["one beta"]


def test_known_propensities_are_fixed_and_named():
    known = {k: 1 / k for k in range(1, 13)}
    method = make_method("pairwise-em", inputs(propensities=known))
    log = world(requests=200)
    fit_bias(method, log, TrainingOptions(bias_steps=20, batch=32, device="cpu"), user=User())
    np.testing.assert_allclose(method.bias_model.theta, [1 / k for k in range(1, 13)], rtol=1e-6)
    report = method.bias([Lists.from_log(simulate_log(log, User(), seed=5)[0])])
    assert report["theta_from"] == "known propensities"
    assert report["theta_scale"] == "as in the known propensities"
    with pytest.raises(DataError, match="no propensity"):
        make_method("pairwise-em", inputs(propensities={1: 0.5}))


def warned(method, lists) -> set[str]:
    return {warning["name"] for warning in method.bias([lists])["warnings"]}


def test_problems_have_named_warnings(lists):
    assert not warned(ready(), lists)
    method = ready()
    method.bias_model.network.layers[-1].bias.data[0] = 30.0
    assert "collapse" in warned(method, lists)
    method = ready()
    method.bias_model.held_out.copy_(torch.tensor([-2.0, -1.0]))
    assert "divergence" in warned(method, lists)
    method = ready()
    method.bias_model.moved.fill_(0.2)
    assert "theta not settled" in warned(method, lists)
    method = ready()
    method.bias_model.impressions.fill_(1000)
    assert "few clicks" in warned(method, lists)
    method = ready(loss="ipw", max_weight=1.01)
    assert "weights clipped" in warned(method, lists)
    method = ready(loss="bayes-ipw")
    method.bias_model.pair_sums.copy_(torch.tensor([1.0, 10.0, 5.0, 10.0])[:, None])
    assert "trust reversed" in warned(method, lists)
    method = ready(loss="ipw", max_weight=1e6)
    method.bias_model.theta[:] = torch.tensor([1.0] * 11 + [0.01])
    many, _ = simulate_log(make_shown_log(requests=400, features=FEATURES), User(eta=0.1), seed=0)
    assert "weights uneven" in warned(method, Lists.from_log(many))


def test_eps_minus_never_exceeds_eps_plus(lists):
    model = BiasModel(inputs(), pairs=True)
    for _ in range(30):
        with torch.no_grad():
            model.update(lists)
        assert (model.minus <= model.plus).all()


def test_the_report_has_trust_by_pairs_of_positions(lists):
    report = ready(loss="bayes-ipw").bias([lists])
    assert np.shape(report["m"]) == np.shape(report["eps_plus"]) == (12, 12)
    assert 0 < np.max(report["m"]) <= 1
    assert set(report["pairs"]) == {"both above zero", "one above zero"}


def test_options_are_checked():
    for options, match in (
        ({"loss": "best"}, "'loss' must be one of"),
        ({"scale": 2}, "'scale' must be above 0"),
        ({"scale": "estimated"}, "theta=regression"),
        ({"max_weight": 0.5}, "'max_weight' must be at least 1"),
        ({"speed": 3}, "no option 'speed'"),
        ({"loss": "ipw", "weights": "posterior"}, "loss=ipw cannot be used with weights=posterior"),
        ({"loss": "posterior", "weights": "paper"}, "loss=posterior cannot be used with weights=paper"),
        ({"loss": "opt", "trust": "pairs"}, "set loss=bayes-ipw without weights, or loss=opt with weights=exact"),
        ({"loss": "opt", "max_weight": 5}, "max_weight cannot be used with weights=posterior"),
    ):
        with pytest.raises(OptionError, match=match):
            make_method("pairwise-em", inputs(), **options)
    released = make_method("pairwise-em", inputs(), variant="released")
    assert (released.kind, released.weights) == ("opt", "paper")
    assert make_method("pairwise-em", inputs(), scale="estimated", theta="regression").bias_model.scale is None


def test_the_scale_of_theta_does_not_change_click_probabilities():
    """P(c>0) = θβ + ζ(1-β) stays the same if θ - ζ is scaled and β is divided by the scale."""
    exam = Examination(
        positions=(1, 2),
        theta=np.array([1.0, 0.5]),
        zeta=np.array([0.3, 0.0]),
        impressions=np.array([100.0, 100.0]),
        clicks=np.array([51.0, 15.0]),
        moved=0.0,
        strata=1,
    )
    for scale in (1.0, 0.7):
        model = BiasModel(inputs(positions=(1, 2)), scale=scale, trust_in_clicks=True).eval()
        model.take(exam)
        beta = model.predictions(torch.zeros(FEATURES))[0].sigmoid()
        clicks = model.theta * beta + model.zeta * (1 - beta)
        torch.testing.assert_close(clicks.detach(), torch.tensor([0.51, 0.15]))


@pytest.mark.parametrize("options", [{}, {"loss": "ipw"}, {"loss": "opt"}, {"variant": "released"}])
def test_true_labels_are_used_without_correction(options, lists):
    method = make_method("pairwise-em", inputs(truth=True), **options)
    assert method.bias_learner() is None
    assert method.bias([lists]) is None
    labels, scores = lists.relevance, method.score(lists.features).detach()
    where = lists.where[:, :, None] & lists.where[:, None, :] & (labels[:, :, None] > labels[:, None, :])
    weights = where.float()
    if method.kind == "posterior":
        weights = weights * (labels[:, :, None] - labels[:, None, :])
    if method.kind == "opt":
        discount = discounts_at(ranks_of(scores, where=lists.where), torch.float32)
        gain = (labels[:, :, None] - labels[:, None, :]).abs()
        weights = weights * gain * (discount[:, :, None] - discount[:, None, :]).abs()
    pain = softplus(scores[:, None, :] - scores[:, :, None])
    torch.testing.assert_close(method.loss(lists).detach(), (weights * pain).sum((1, 2)).mean(), rtol=1e-4, atol=1e-5)
