from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.losses import lambdarank_weights, pairwise_loss, pointwise_loss, preferred_pairs
from ultr.metrics import dcg_metric, ndcg_metric


@st.composite
def batches(draw, max_length: int = 6):
    """Scores without ties, labels with them, and padding; float64."""
    n, length = draw(st.integers(1, 3)), draw(st.integers(1, max_length))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scores = torch.from_numpy(rng.normal(size=(n, length)))
    labels = torch.from_numpy(rng.integers(0, 3, (n, length)) * rng.uniform(0.5, 2))
    where = torch.from_numpy(rng.random((n, length)) < 0.8)
    return scores, labels, where


@given(batches())
def test_the_pointwise_loss_is_the_squared_error_of_items(case):
    scores, labels, where = case
    by_hand = [sum(float((s - c) ** 2) for s, c, w in zip(*row, strict=True) if w) for row in zip(*case, strict=True)]
    assert pointwise_loss(scores, labels, where=where).item() == pytest.approx(np.mean(by_hand))
    weights = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    weighted = np.average(by_hand, weights=weights)
    assert pointwise_loss(scores, labels, where=where, weights=weights).item() == pytest.approx(weighted)


@given(batches())
def test_the_pairwise_loss_is_the_weighted_logistic_loss_of_pairs(case):
    scores, labels, where = case
    pairs = preferred_pairs(labels, where=where).double() * 0.7
    total = 0.0
    for b, i, j in itertools.product(range(len(scores)), *[range(scores.shape[1])] * 2):
        if where[b, i] and where[b, j] and labels[b, i] > labels[b, j]:
            total += 0.7 * np.log1p(np.exp(-float(scores[b, i] - scores[b, j])))
    assert pairwise_loss(scores, pairs).item() == pytest.approx(total / len(scores), abs=1e-9)


@pytest.mark.parametrize(("gain", "normalise"), [("linear", True), ("exponential", True), ("linear", False)])
@given(case=batches(max_length=5))
def test_lambdarank_weighs_a_pair_by_what_its_swap_changes_in_the_metric(gain, normalise, case):
    scores, labels, where = case
    weights = lambdarank_weights(scores, labels, where=where, gain=gain, normalise=normalise)
    metric = ndcg_metric if normalise else dcg_metric
    before = metric(scores, labels, where=where, gain=gain)
    for i, j in itertools.permutations(range(scores.shape[1]), 2):
        swapped = scores.clone()
        swapped[:, [i, j]] = scores[:, [j, i]]
        change = (metric(swapped, labels, where=where, gain=gain) - before).abs()
        counts = where[:, i] & where[:, j] & (labels[:, i] > labels[:, j])
        expected = torch.where(counts, change, 0.0)
        torch.testing.assert_close(weights[:, i, j], expected, atol=1e-12, rtol=1e-9)


@given(batches())
def test_gradients_equal_finite_differences_and_never_reach_padding(case):
    scores, labels, where = case
    scores.requires_grad_()
    weights = lambdarank_weights(scores, labels, where=where).detach()
    assert torch.autograd.gradcheck(lambda s: pairwise_loss(s, weights), scores)
    assert torch.autograd.gradcheck(lambda s: pointwise_loss(s, labels, where=where), scores)
    (gradient,) = torch.autograd.grad(
        pairwise_loss(scores, weights) + pointwise_loss(scores, labels, where=where), scores
    )
    assert not gradient[~where].any()
