from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ultr.rankers import FeatureEncoder, make_ranker
from ultr.rankers.combined import RIDGE, Combined, likely_weights, spread_within

REQUESTS, ITEMS, FEATURES = 300, 6, 4


def make(ranker: str = "mlp", **options) -> Combined:
    torch.manual_seed(0)
    if ranker == "mlp":
        options = {"hidden": (8,), "skip": True, **options}
    return Combined(make_ranker(ranker, FeatureEncoder(FEATURES), outputs=Combined.OUTPUTS, **options)).eval()


@pytest.fixture
def held_out():
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.normal(size=(REQUESTS * ITEMS, FEATURES)).astype(np.float32))
    return features, torch.arange(REQUESTS).repeat_interleave(ITEMS)


def anchor_at(ranker: Combined, slopes: list[float]) -> torch.Tensor:
    rows = torch.zeros(3, FEATURES)
    rows[0] = rows[1] = torch.tensor(slopes)
    ranker.ranker.start_at(rows, torch.tensor([0.0, -1.0, 0.0]))
    return rows[0]


def drawn(log_rate: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.poisson(log_rate.exp(), generator=torch.Generator().manual_seed(seed))


def test_the_score_is_the_weighted_sum_of_its_terms(held_out):
    features, _ = held_out
    ranker = make()
    anchor_at(ranker, [1, 0, 0, 0])
    ranker.weights.copy_(torch.tensor([2.0, 3.0, 4.0]))
    score, logit, log_value = ranker.outputs(features)
    expected = 2 * score + 3 * (logit.sigmoid().log() + log_value) + 4 * features[:, 0]
    torch.testing.assert_close(ranker(features), expected, rtol=1e-4, atol=1e-5)


def test_a_network_starts_at_its_anchor(held_out):
    features, _ = held_out
    for ranker in (make(), make("linear")):
        slopes = anchor_at(ranker, [0.5, -1, 0, 2])
        score, logit, log_value = ranker.outputs(features)
        torch.testing.assert_close(score, features @ slopes, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logit, features @ slopes - 1, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(log_value, torch.zeros_like(score))


def test_without_feedback_the_two_learned_terms_are_balanced(held_out):
    features, request = held_out
    ranker = make()
    ranker.balance(features, request, None, None)
    by_pairs, by_likelihood, _ = ranker.terms(features)
    weighted = [spread_within(ranker.weights[i] * term, request) for i, term in enumerate((by_pairs, by_likelihood))]
    torch.testing.assert_close(torch.stack(weighted), torch.full((2,), 0.5, dtype=torch.float64))
    assert ranker.weights[2] == 0


def test_feedback_decides_between_the_network_and_its_anchor(held_out):
    features, request = held_out
    log_theta = torch.zeros(len(features))
    ranker = make()
    slopes = anchor_at(ranker, [1.0, 0, 0, 0])
    with torch.no_grad():  # the network adds the same to f and to the logit
        added = torch.randn(8, generator=torch.Generator().manual_seed(1))
        ranker.ranker.layers[-1].weight.copy_(torch.stack([added, added, torch.zeros(8)]))
    learned = ranker.terms(features)[0].detach()
    ranker.balance(features, request, drawn(0.7 * features @ slopes - 1.5), log_theta)
    assert ranker.weights[2] > 3 * ranker.weights[0]  # what the network has learned does not last
    ranker.balance(features, request, drawn(learned / learned.std() - 1.5), log_theta)
    assert ranker.weights[0] > 0
    spreads = [spread_within(w * t, request) for w, t in zip(ranker.weights, ranker.terms(features), strict=True)]
    assert spreads[0] > spreads[2]
    ranker.balance(features, request, drawn(-0.7 * features @ slopes - 1.5), log_theta)
    assert (ranker.weights >= 0).all()  # no term is reversed
    assert ranker.weights.isfinite().all()


def test_theta_is_an_offset(held_out):
    features, request = held_out
    ranker = make()
    anchor_at(ranker, [1.0, 0, 0, 0])
    theta = torch.where(features[:, 0] > 0, 0.6, 1.0)  # what the anchor likes is seen less
    labels = drawn(theta.log() + 0.5 * features[:, 0] - 0.5)
    for known, low, high in ((theta.log(), 0.4, 0.6), (torch.zeros_like(theta), 0.05, 0.35)):
        ranker.balance(features, request, labels, known)
        scores = ranker(features).detach()
        slope = float(((scores - scores.mean()) * features[:, 0]).mean() / features[:, 0].var())
        assert low < slope < high


def test_equal_scores_and_no_feedback_are_harmless(held_out):
    features, request = held_out
    ranker = make()
    anchor_at(ranker, [0.0] * FEATURES)
    for labels in (torch.zeros(len(features)), torch.ones(len(features)), None):
        ranker.balance(features, request, labels, torch.zeros(len(features)))
        assert ranker.weights.isfinite().all()
        assert ranker(features).isfinite().all()


@pytest.mark.parametrize("separate", [False, True, "first"])
def test_all_outputs_start_at_the_line_whatever_layers_they_share(separate, held_out):
    features, _ = held_out
    ranker = make(separate=separate, hidden=(8, 4))
    slopes = anchor_at(ranker, [1.0, -2.0, *[0.5] * (FEATURES - 2)])
    score, logit, log_value = ranker.outputs(features)
    line = ranker.ranker.encoder(features)[:, :FEATURES] @ slopes
    torch.testing.assert_close(score, line)
    torch.testing.assert_close(logit, line - 1)
    torch.testing.assert_close(log_value, torch.zeros(len(features)))


def test_the_first_output_alone_has_layers_of_its_own(held_out):
    features, _ = held_out
    ranker = make(separate="first")
    score, logit, log_value = ranker.outputs(features)
    own, common = (list(part.parameters()) for part in ranker.ranker.layers)
    for output, is_first in ((score, True), (logit, False), (log_value, False)):
        slopes = torch.autograd.grad(output.sum(), own + common, retain_graph=True, allow_unused=True)
        found = [slope is not None and bool(slope.any()) for slope in slopes]
        assert (any(found[: len(own)]), any(found[len(own) :])) == (is_first, not is_first)


def test_only_a_network_with_a_skip_can_start_at_a_line():
    with pytest.raises(ValueError, match="skip"):
        make(skip=False).ranker.start_at(torch.zeros(3, FEATURES), torch.zeros(3))


# --- Weights by the conditional likelihood ----------------------------------------------------------------------------


def feedback_of(scores, theta, request, *, levels=0.0, seed=0, mean=-2.0):
    """Draw Poisson feedback with the mean θ exp(score + level of the request)."""
    rng = np.random.default_rng(seed)
    level = rng.normal(size=request.max() + 1) * levels
    return rng.poisson(theta * np.exp(scores + level[request] + mean)).astype(float)


def toy(*, requests=2000, items=8, columns=2, seed=0):
    rng = np.random.default_rng(seed)
    request = np.repeat(np.arange(requests), items)
    return rng.normal(size=(len(request), columns)), request, rng.uniform(0.2, 1, len(request))


def weights_of(columns, request, labels, theta):
    return likely_weights(*map(torch.from_numpy, (columns, request, labels, np.log(theta)))).numpy()


def test_weights_maximise_the_conditional_likelihood():
    columns, request, theta = toy(requests=150, items=5, columns=3)
    labels = feedback_of(columns @ [0.8, 0.3, -0.5], theta, request, levels=1.0)
    dispersion = (labels**2).sum() / labels.sum()

    def loss(weights):
        value = 0.0
        for number in range(request.max() + 1):
            rows = request == number
            scores = columns[rows] @ weights + np.log(theta[rows])
            value -= (labels[rows] * (scores - np.log(np.exp(scores).sum()))).sum() / dispersion
        return value + RIDGE / 2 * ((weights - weights.mean()) ** 2).sum()

    best = minimize(loss, np.full(3, 0.1), bounds=[(0, None)] * 3, method="L-BFGS-B").x
    np.testing.assert_allclose(weights_of(columns, request, labels, theta), best, atol=1e-3)
    assert best[2] == 0


@pytest.mark.parametrize(("truth", "low", "high"), [(1.0, 0.9, 1.0), (0.5, 0.4, 0.6), (0.0, 0.0, 0.1)])
@pytest.mark.parametrize("levels", [0.0, 1.5])
def test_shares_are_recovered_from_many_labels(truth, low, high, levels):
    columns, request, theta = toy(requests=4000)
    labels = feedback_of(columns @ [truth, 1 - truth], theta, request, levels=levels)
    weights = weights_of(columns, request, labels, theta)
    assert low <= weights[0] / weights.sum() <= high
    assert weights.sum() == pytest.approx(1, abs=0.1)


def test_few_labels_leave_weights_near_the_prior_and_many_do_not():
    shares = {}
    for requests in (60, 6000):  # the prior counts as 300 clicks: the variances of the columns are 1
        columns, request, theta = toy(requests=requests)
        labels = feedback_of(columns @ [1.0, 0.0], theta, request)
        given = map(torch.from_numpy, (columns, request, labels, np.log(theta)))
        weights = likely_weights(*given, ridge=300.0).numpy()
        shares[requests] = weights[0] / weights.sum()
    assert 0.5 < shares[60] < 0.75
    assert shares[6000] > 0.9


def test_the_level_of_a_request_does_not_matter():
    """Of two rankers, the worse one knows how much feedback a request has, which no ranking needs."""
    rng = np.random.default_rng(0)
    columns, request, theta = toy(requests=3000)
    truth, noise = columns.T
    levels = rng.normal(size=request.max() + 1)[request] * 1.5
    labels = rng.poisson(theta * np.exp(truth + levels - 3)).astype(float)
    good, knows_levels = truth + 0.3 * noise, 0.2 * truth + noise
    alone = weights_of(np.column_stack([good, knows_levels]), request, labels, theta)
    with_levels = weights_of(np.column_stack([good, knows_levels + 3 * levels]), request, labels, theta)
    np.testing.assert_allclose(with_levels, alone, atol=1e-6)
    assert with_levels[0] > 5 * with_levels[1]

    def wins(scores):  # the share of the feedback that is on the first item of each request
        first = np.array([rows[scores[rows].argmax()] for rows in np.split(np.arange(len(scores)), len(scores) // 8)])
        return np.exp(truth[first]).mean()

    best = max(wins(good), wins(knows_levels))
    assert wins(good * with_levels[0] + knows_levels * with_levels[1]) > 0.999 * best


def test_few_labels_leave_equal_weights_and_none_leave_no_weight():
    columns, request, theta = toy(requests=100)
    labels = np.zeros(len(request))
    assert not weights_of(columns, request, labels, theta).any()
    labels[np.argmax(columns.sum(1))] = 1
    weights = weights_of(columns, request, labels, theta)
    assert weights[0] == pytest.approx(weights[1], rel=0.2)


def test_a_ranker_in_the_wrong_direction_has_no_weight():
    columns, request, theta = toy()
    labels = feedback_of(columns[:, 0], theta, request)
    wrong, right = -columns[:, 0] + 0.1 * columns[:, 1], columns[:, 0] + 2 * columns[:, 1]
    weights = weights_of(np.column_stack([wrong, right]), request, labels, theta)
    assert weights[0] == 0 < weights[1]


@pytest.mark.parametrize("scale", [1e-6, 1e12])
def test_weights_do_not_depend_on_the_scale_of_labels(scale):
    columns, request, theta = toy()
    labels = feedback_of(columns @ [0.7, 0.2], theta, request)
    expected = weights_of(columns, request, labels, theta)
    np.testing.assert_allclose(weights_of(columns, request, labels * scale, theta), expected, rtol=1e-6)
