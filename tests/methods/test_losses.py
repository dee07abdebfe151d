from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy, cross_entropy

from ultr.evaluation.metrics import dcg_metric, ndcg_metric
from ultr.methods.losses import (
    gaps,
    lambdaloss_weights,
    lambdarank_weights,
    logistic_loss,
    pairwise_loss,
    pointwise_loss,
    preferred_pairs,
    product_logistic_loss,
    softmax_loss,
)


@st.composite
def batches(draw, max_length: int = 6):
    """Draw scores without ties, labels with ties, and padding, in float64."""
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
def test_lambdarank_weights_a_pair_by_the_change_of_the_metric(gain, normalise, case):
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
def test_lambdaloss_weights_a_pair_by_its_labels_and_how_far_apart_it_is(case):
    scores, labels, where = case
    weights = lambdaloss_weights(scores, torch.where(where, labels, torch.nan), where=where)
    for b in range(len(scores)):
        items = torch.where(where[b])[0].tolist()
        rank = {i: r for r, i in enumerate(sorted(items, key=lambda i: -scores[b, i]), 1)}
        best = sorted((float(labels[b, i]) for i in items), reverse=True)
        ideal = sum(label / np.log2(1 + r) for r, label in enumerate(best, 1))
        for i, j in itertools.product(range(scores.shape[1]), repeat=2):
            expected = 0.0
            if i in rank and j in rank and labels[b, i] > labels[b, j]:
                apart = abs(rank[i] - rank[j])
                gap = float(labels[b, i] - labels[b, j])
                expected = len(items) * gap / ideal * (1 / np.log2(1 + apart) - 1 / np.log2(2 + apart))
            assert weights[b, i, j].item() == pytest.approx(expected)


@given(batches())
def test_weights_of_items_multiply_the_terms_of_a_loss(case):
    scores, labels, where = case
    rng = np.random.default_rng(3)
    targets, item_weights = labels / 4, torch.from_numpy(rng.uniform(0.5, 3, scores.shape)).requires_grad_()
    one = torch.eye(scores.shape[1], dtype=torch.bool)
    for loss in (
        pointwise_loss,
        logistic_loss,
        lambda s, *rest, **more: product_logistic_loss(s, 0.5 * s, *rest, **more),
    ):
        alone = torch.stack([loss(scores, targets, where=where & item) for item in one])  # the loss of each column
        same = item_weights.detach()[0].expand_as(scores)  # a column has one weight
        weighted = loss(scores, targets, where=where, item_weights=same)
        torch.testing.assert_close(weighted, (same[0] * alone).sum())
        spoilt = torch.where(where, item_weights, torch.nan)
        found = loss(scores.clone().requires_grad_(), targets, where=where, item_weights=spoilt)
        assert torch.isfinite(found)
        assert torch.autograd.grad(found, item_weights, allow_unused=True) == (None,)


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


def assert_means(loss, by_hand: list[float]) -> None:
    """Assert that a loss is the (weighted) mean of the losses of requests."""
    weights = torch.arange(1.0, len(by_hand) + 1, dtype=torch.float64)
    assert loss().item() == pytest.approx(np.mean(by_hand))
    assert loss(weights=weights).item() == pytest.approx(np.average(by_hand, weights=weights))


@given(batches())
def test_the_softmax_loss_is_the_cross_entropy_of_items(case):
    scores, labels, where = case
    labels = labels * where
    by_hand = [float(cross_entropy(s[w], c[w])) if w.any() else 0.0 for s, c, w in zip(*case, strict=True)]
    assert_means(partial(softmax_loss, scores, labels, where=where), by_hand)


@given(batches())
def test_the_logistic_loss_is_the_binary_cross_entropy_of_items(case):
    logits, labels, where = case
    targets = labels / 4
    by_hand = [
        float(binary_cross_entropy(s[w].sigmoid(), t[w], reduction="sum"))
        for s, t, w in zip(logits, targets, where, strict=True)
    ]
    assert_means(partial(logistic_loss, logits, targets, where=where), by_hand)


@given(batches())
def test_a_product_with_probability_one_is_the_logistic_loss(case):
    logits, labels, where = case
    targets, certain = labels / 4, torch.full_like(logits, 60.0)
    expected = logistic_loss(logits, targets, where=where)
    torch.testing.assert_close(product_logistic_loss(logits, certain, targets, where=where), expected)
    torch.testing.assert_close(product_logistic_loss(certain, logits, targets, where=where), expected)


@given(batches())
def test_the_product_loss_is_the_cross_entropy_of_the_product_of_probabilities(case):
    logits, labels, where = case
    others, targets = logits.flip(0).mul(0.7), labels / 4
    by_hand = [
        float(binary_cross_entropy(a[w].sigmoid() * b[w].sigmoid(), t[w], reduction="sum"))
        for a, b, t, w in zip(logits, others, targets, where, strict=True)
    ]
    assert_means(partial(product_logistic_loss, logits, others, targets, where=where), by_hand)


@settings(max_examples=25)
@given(batches(max_length=4))
def test_gradients_of_cross_entropies_equal_finite_differences(case):
    scores, labels, where = case
    targets, others = labels / 4, scores.flip(-1).mul(1.5).requires_grad_()
    scores.requires_grad_()
    weights = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    common = {"where": where, "weights": weights}
    assert torch.autograd.gradcheck(lambda s: softmax_loss(s, labels * where, **common), scores)
    assert torch.autograd.gradcheck(lambda s: logistic_loss(s, targets, **common), scores)
    assert torch.autograd.gradcheck(lambda a, b: product_logistic_loss(a, b, targets, **common), (scores, others))


def losses_of(scores: torch.Tensor, targets: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
    return [
        softmax_loss(scores, targets * where, where=where),
        logistic_loss(scores, targets, where=where),
        product_logistic_loss(scores, 0.5 * scores, targets, where=where),
    ]


@pytest.mark.parametrize("huge", [1e30, -1e30])
@given(case=batches())
def test_padding_is_ignored_even_if_its_scores_are_large(huge, case):
    scores, labels, where = case
    scores, targets = scores.float(), labels.float() / 4
    padded = scores.masked_fill(~where, huge).requires_grad_()
    for loss, expected in zip(losses_of(padded, targets, where), losses_of(scores, targets, where), strict=True):
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss, padded)
        assert torch.isfinite(gradient).all()
        assert not gradient[~where].any()


@given(batches())
def test_the_softmax_loss_of_lists_without_clicks_and_its_gradient_are_zero(case):
    scores, labels, where = case
    scores.requires_grad_()
    loss = softmax_loss(scores, torch.zeros_like(labels), where=where)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, scores)[0].any()


def test_a_list_without_items_or_clicks_does_not_change_the_others():
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 1e30]], requires_grad=True)
    clicks = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    where = torch.tensor([[True] * 3, [False] * 3, [True, True, False]])
    loss = softmax_loss(scores, clicks, where=where)
    torch.testing.assert_close(loss, softmax_loss(scores[:1], clicks[:1], where=where[:1]) / 3)
    for found in losses_of(scores, clicks, where):
        (gradient,) = torch.autograd.grad(found, scores)
        assert torch.isfinite(found)
        assert torch.isfinite(gradient).all()
        assert not gradient[~where].any()


def test_the_softmax_loss_has_no_gradient_for_its_weights():
    scores, item_weights = torch.randn(2, 4, requires_grad=True), torch.rand(2, 4, requires_grad=True)
    softmax_loss(scores, item_weights, where=torch.ones(2, 4, dtype=torch.bool)).backward()
    assert item_weights.grad is None
    assert scores.grad.abs().sum() > 0


def test_weights_of_pairs_have_no_gradient():
    scores, pair_weights = torch.randn(2, 4, requires_grad=True), torch.rand(2, 4, 4, requires_grad=True)
    pairwise_loss(scores, pair_weights).backward()
    assert pair_weights.grad is None
    labels, where = torch.arange(8.0).view(2, 4), torch.ones(2, 4, dtype=torch.bool)
    assert not lambdarank_weights(scores, labels, where=where).requires_grad
    assert not lambdaloss_weights(scores, labels, where=where).requires_grad


def test_lambdarank_has_linear_normalised_gains_by_default():
    scores, labels = torch.tensor([[0.3, 0.2, 0.1]]), torch.tensor([[0.0, 1.0, 3.0]])
    weights = lambdarank_weights(scores, labels, where=torch.ones_like(labels, dtype=torch.bool))
    ideal = 3 + 1 / np.log2(3)
    assert weights[0, 2, 0].item() == pytest.approx(3 * (1 - 1 / np.log2(4)) / ideal)
    assert weights[0, 0, 2].item() == 0


def test_pairs_are_contiguous_over_the_batch():
    scores, labels, where = torch.randn(7, 4), torch.arange(28.0).view(7, 4), torch.ones(7, 4, dtype=torch.bool)
    pairs = gaps(scores), preferred_pairs(labels, where=where), lambdarank_weights(scores, labels, where=where)
    assert [values.stride(0) for values in pairs] == [1, 1, 1]


def every_loss(scores, labels, where, weights=None) -> dict[str, torch.Tensor]:
    """Return every loss of these arguments; `labels` are in [0, 1]."""
    common = {"where": where, "weights": weights}
    pairs = lambdarank_weights(scores, labels, where=where)
    return {
        "pointwise": pointwise_loss(scores, labels, **common),
        "softmax": softmax_loss(scores, labels, **common),
        "logistic": logistic_loss(scores, labels, **common),
        "product": product_logistic_loss(scores, 0.5 * scores, labels, **common),
        "pairwise": pairwise_loss(scores, pairs, **common),
        "unweighted pairs": pairwise_loss(scores.masked_fill(~where, 0.0), pairs, weights=weights),
    }


def lists_of_lists() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(5)
    scores, labels = torch.from_numpy(rng.normal(size=(2, 3, 4))), torch.from_numpy(rng.random((2, 3, 4)))
    return scores, labels, torch.from_numpy(rng.random((2, 3, 4)) < 0.8)


def test_the_last_dimension_is_the_list_for_any_leading_dimensions():
    case, weights = lists_of_lists(), torch.arange(1.0, 7.0, dtype=torch.float64)
    nested = every_loss(*case, weights=weights.view(2, 3))
    flat = every_loss(*(values.flatten(0, 1) for values in case), weights=weights)
    single = [every_loss(*(values.flatten(0, 1)[i] for values in case)) for i in range(6)]
    for name, loss in nested.items():
        torch.testing.assert_close(loss, flat[name], msg=name)
        by_request = torch.stack([one[name] for one in single])
        torch.testing.assert_close(loss, (weights * by_request).sum() / weights.sum(), msg=name)


def test_padding_is_never_read_even_if_it_is_nan():
    scores, labels, where = lists_of_lists()
    nan = torch.full_like(scores, torch.nan)
    clean = scores.clone().requires_grad_()
    spoilt = torch.where(where, scores, nan).requires_grad_()
    for name, loss in every_loss(spoilt, torch.where(where, labels, nan), where).items():
        expected = every_loss(clean, labels, where)[name]
        torch.testing.assert_close(loss, expected, msg=name)
        (found,), (gradient,) = torch.autograd.grad(loss, spoilt), torch.autograd.grad(expected, clean)
        torch.testing.assert_close(found, gradient, msg=name)
