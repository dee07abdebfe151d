"""Compare every posterior, loss, metric and label in single precision with double precision, at extreme inputs.

The inputs are exact in single precision, so that all differences come from arithmetic. Tolerances are relative to the
value. Where a value is a difference of larger ones, they are relative to a given scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import ultr.bias.equations
import ultr.methods.losses
from conftest import make_shown_log
from hardening.extremes import (
    DENORMAL,
    EXAMINED,
    FEATURES,
    PROBABILITIES,
    VARIANTS,
    VAST_LABELS,
    VAST_SCORES,
    Ranked,
    arguments_of,
    assert_near,
    check_draws,
    effort,
    extreme_method,
    gradients,
    in_double,
    pools,
    public_functions,
    ranked,
    record,
    some_lists,
    tensors_in,
    with_garbage,
    write_counts,
)
from ultr.bias.equations import PairModel, pair_posterior
from ultr.datasets.users import MAX_GRADE, User, simulate_log
from ultr.evaluation.metrics import METRICS
from ultr.lists import Lists
from ultr.methods import METHODS, Method
from ultr.methods.losses import lambdarank_weights, pairwise_loss
from ultr.rankers import Synthesised
from ultr.rankers.tree_objective import Kind, PairTerms, PairwiseObjective
from ultr.training.config import TrainingOptions
from ultr.training.loop import precision

POSTERIOR = 3e-6  # fifty roundings of 6e-8: no posterior takes more than a few dozen steps, and none of them cancels
LOSS = 2e-5  # exp(-x) has a relative error of x roundings, and is above zero in single precision up to x = 104
GRADIENT = 2e-5  # relative to the weights of a list, because its sigmoids are subtracted
METRIC = 3e-6  # sums of seven terms
METHOD, METHOD_GRADIENT = 1e-4, 1e-3  # networks before the loss: rounding errors of scores go through its sigmoids
BF16_LOSS, BF16_GRADIENT = 0.01, 0.03  # a rounding to eight bits is 0.004, and there is about one per layer
METHOD_VARIANTS = [(name, options) for name in METHODS for options in VARIANTS.get(name, [{}])]
over_methods = pytest.mark.parametrize(("name", "options"), METHOD_VARIANTS, ids=lambda v: "-".join(v.values()) if isinstance(v, dict) else v)  # fmt: skip  # noqa: E501

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _counts() -> Iterator[None]:
    yield from write_counts("numerics")


# --- Posteriors ---------------------------------------------------------------------------------------------------

POSTERIORS = {name: each for name, each in public_functions(ultr.bias.equations).items() if name != "drawn_states"}


def model_values(seed: int, size: int = 200) -> dict[str, Any]:
    """Draw all arguments of functions of `ultr.bias.equations`, by name."""
    draw = pools(seed)
    theta, p = partial(draw, EXAMINED, size), partial(draw, PROBABILITIES, size)
    some = theta()
    pair = PairModel(theta(), theta(), p(), p(), p(), p())
    total = draw((0.0, 1e-30, 1.0, 1e30), size)
    values = {name: theta() for name in ("theta", "theta_i", "theta_j", "theta_minus_j", "examined", "examined_pair")}
    values |= {name: p() for name in ("beta", "beta_i", "beta_j", "gamma", "kappa", "plus", "minus", "previous")}
    values |= {name: draw((0.0, 1.0), size) > 0 for name in ("positive", "positive_j", "preferred")}
    values |= {name: draw(VAST_LABELS, size) for name in ("label_i", "label_j", "values")}
    values |= {"theta": some, "zeta": some * draw((0.0, 1e-6, 0.5, 1.0), size), "pair": pair}
    return {**values, "numerator": total * p(), "denominator": total, "cells": torch.arange(size) % 7, "size": 7}


def called(name: str, values: dict[str, Any]) -> list[Tensor]:
    values = {**values, "posterior": pair_posterior(values["pair"])}
    return tensors_in(POSTERIORS[name](**arguments_of(POSTERIORS[name], values)))


@effort
@pytest.mark.parametrize("name", POSTERIORS)
def test_posteriors_and_weights_are_as_in_double_precision(name, examples):
    def holds(seed: int) -> None:
        values = model_values(seed)
        for single, double in zip(called(name, values), called(name, in_double(values)), strict=True):
            assert single.dtype == torch.float32
            logarithm = name.endswith("log_likelihood")
            least = -85 if logarithm else -torch.inf  # impossible feedback has the log of the smallest number
            actual, expected = single.clamp(min=least), double.clamp(min=least)
            assert_near(f"bias.{name}", actual, expected, rtol=POSTERIOR, scale=float(logarithm))

    check_draws("posteriors", examples, seeds, holds)


@effort
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_states_of_a_pair_are_probabilities_that_sum_to_one(dtype, examples):
    def holds(seed: int) -> None:
        pair = model_values(seed)["pair"]
        cells = tensors_in(pair_posterior(in_double(pair) if dtype == torch.float64 else pair))
        for states in (cells[:3], cells[3:]):
            for state in states:
                assert ((state >= 0) & (state <= 1)).all()
            total = torch.stack(states).sum(0)
            off = torch.where(total > 0, (total - 1).abs(), 0.0).max().item()  # 0 where the feedback is impossible
            assert record(f"sum of states, {dtype}", off) <= 4 * torch.finfo(dtype).eps

    check_draws("states of a pair", examples, seeds, holds)


# --- Losses -------------------------------------------------------------------------------------------------------

LOSSES = {name: f for name, f in public_functions(ultr.methods.losses).items() if name.endswith("_loss")}


def loss_and_gradient(name: str, case: Ranked) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss, its gradient by the scores (and by `others`), and the total weight of its pairs or items."""
    scores, labels = case.scores, case.labels
    if name == "pointwise_loss":  # squares of 1e30 overflow single precision
        scores, labels = scores.clamp(-1e15, 1e15), labels.clamp(max=1e15)
    scores = scores.clone().requires_grad_()
    others = (scores.detach() * torch.where(labels > 0, 0.5, -0.5)).requires_grad_()
    pair_weights = lambdarank_weights(scores, labels, where=case.where)
    inputs = {"scores": scores, "logits": scores, "others": others, "labels": labels, "pair_weights": pair_weights}
    inputs |= {"item_weights": labels.clamp(max=20), "targets": labels.clamp(max=1)}
    function = LOSSES[name]
    arguments = arguments_of(function, {**inputs, "where": case.where, "weights": case.weights})
    loss = function(**arguments)
    leaves = [value for value in (scores, others) if any(value is argument for argument in arguments.values())]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])
    weight = arguments.get("pair_weights", arguments.get("item_weights", torch.ones_like(labels)))
    weight = torch.where(torch.isfinite(weight), weight, 0.0)
    return loss.detach(), gradient.view(len(leaves), *scores.shape), weight.detach().sum().double()


@effort
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_as_in_double_precision(name, examples):
    def holds(case: Ranked) -> None:
        single, double = loss_and_gradient(name, case), loss_and_gradient(name, in_double(case))
        largest = torch.where(case.where, case.scores, 0.0).abs().max().double()
        of_logits = largest if "logistic" in name else 0.0  # (1-t) x + log(1 + exp(-x)) of large x is a difference
        assert single[0].dtype == torch.float32
        assert_near(f"losses.{name}", single[0], double[0], rtol=LOSS, scale=of_logits)
        assert_near(f"gradient of losses.{name}", single[1], double[1], rtol=GRADIENT, scale=double[2])
        assert not single[1][:, ~case.where].any()

    check_draws("losses", examples, ranked(), holds)


@effort
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_in_padding_changes_no_loss_and_no_gradient(name, examples):
    def holds(case: Ranked) -> None:
        clean = replace(case, scores=torch.where(case.where, case.scores, 0.0), labels=case.labels * case.where)
        dirty, expected = case.with_garbage("scores", "labels"), loss_and_gradient(name, clean)
        actual = loss_and_gradient(name, dirty)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])

    check_draws("garbage in losses", examples, ranked(), holds)


@effort
@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_depend_on_the_order_of_slots(name, examples):
    def holds(case: Ranked) -> None:
        double = in_double(case)
        # Items with equal scores are ranked by slot, so that the weights of their pairs would depend on the order.
        distinct = double.scores + torch.arange(double.scores.shape[-1]) * (1 + double.scores.abs()) * 1e-9
        double = replace(double, scores=distinct)
        order = torch.randperm(distinct.shape[-1], generator=torch.Generator().manual_seed(case.seed))
        moved = Ranked(distinct[:, order], double.labels[:, order], double.where[:, order], double.weights, case.seed)
        loss, gradient, weight = loss_and_gradient(name, double)
        moved_loss, turned, _ = loss_and_gradient(name, moved)
        assert_near(f"order of {name}", moved_loss, loss, rtol=1e-9)
        assert_near(f"order of {name}", turned, gradient[..., order], rtol=1e-9, scale=weight)

    check_draws("order of losses", examples, ranked(), holds)


@pytest.mark.parametrize(("a", "b"), [(-2.0, -14.0), (-14.0, -2.0), (-8.0, -8.0), (3.0, -15.0), (20.0, 20.0)])
def test_the_slope_of_a_product_has_all_its_digits_where_the_product_is_small(a, b):
    p, q = (1 / (1 + np.exp(-x)) for x in (a, b))
    logits, others = torch.tensor([[a]], requires_grad=True), torch.tensor([[b]], requires_grad=True)
    loss = ultr.methods.losses.product_logistic_loss(logits, others, torch.zeros(1, 1), where=torch.ones(1, 1).bool())
    for actual, rest in zip(
        torch.autograd.grad(loss, (logits, others)), (1 / (1 + np.exp(a)), 1 / (1 + np.exp(b))), strict=True
    ):
        assert actual.item() == pytest.approx(p * q * rest / (1 - p * q), rel=LOSS)


# --- Metrics ------------------------------------------------------------------------------------------------------

GRADES = (0.0, 0.0, 1e-30, 1e-7, 0.5, 1.0, 3.0, 4.0)
BOUNDED = ("mrr", "ndcg", "precision")


def measured(name: str, case: Ranked, k: int | None, **options: Any) -> Tensor:
    if name == "reward":
        options |= {"user": User(dwell=None), "label": "click"}
    k = None if name == "arp" else k
    return METRICS[name](case.scores, case.labels, k=k, where=case.where, **options)


@effort
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_as_in_double_precision_and_ignore_padding(name, examples):
    def holds(drawn: tuple[Ranked, int | None]) -> None:
        case, k = drawn
        actual = measured(name, case, k)
        assert actual.dtype == torch.float32
        assert_near(f"metrics.{name}", actual, measured(name, in_double(case), k), rtol=METRIC)
        assert torch.equal(measured(name, case.with_garbage("scores", "labels"), k), actual)
        assert (actual >= 0).all()
        assert name not in BOUNDED or (actual <= 1).all()

    cut_offs = st.sampled_from([None, 1, 3, 1000])
    top = (*GRADES, MAX_GRADE) if name != "reward" else GRADES
    check_draws("metrics", examples, st.tuples(ranked(labels=top), cut_offs), holds)


@effort
@pytest.mark.parametrize("name", [name for name, f in METRICS.items() if "gain" in signature(f).parameters])
def test_metrics_of_continuous_labels_are_as_in_double_precision(name, examples):
    def holds(case: Ranked) -> None:
        actual = measured(name, case, 3, gain="linear")
        assert_near(f"metrics.{name}, linear", actual, measured(name, in_double(case), 3, gain="linear"), rtol=METRIC)

    check_draws("metrics of continuous labels", examples, ranked(), holds)


@pytest.mark.parametrize("size", [DENORMAL, 1e-30, 1e30])
def test_metrics_that_are_ratios_do_not_depend_on_the_size_of_labels(size):
    scores, labels = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0, 3.0]])
    for metric in (partial(METRICS["ndcg"], gain="linear"), METRICS["arp"]):
        torch.testing.assert_close(metric(scores, labels * size), metric(scores, labels), rtol=1e-4, atol=0)


# --- Methods ------------------------------------------------------------------------------------------------------


def taken(method: Method, lists: Lists) -> tuple[Tensor, Tensor]:
    """Take a step; return its loss and its gradients."""
    with torch.no_grad():
        method.update(lists)
    loss = method.loss(lists)
    return loss.detach(), gradients(method, loss)


@effort
@over_methods
def test_steps_are_finite_and_as_in_double_precision(name, options, examples):
    def holds(case: tuple[Lists, int, float]) -> None:
        lists, seed, size = case
        single, double = (extreme_method(name, options, seed, size=size, double=double) for double in (False, True))
        loss, gradient = taken(single, lists)
        for key, values in (*single.state_dict().items(), ("loss", loss), ("gradient", gradient)):
            assert torch.isfinite(values).all(), key
        if size > 1:  # rounding errors of such scores are larger than the width of a sigmoid
            return
        expected, direction = taken(double, in_double(lists))
        assert_near(f"loss of {name}", loss, expected, rtol=METHOD, scale=1e-3)
        largest = direction.abs().max().clamp(min=1e-2)  # the difference of two posteriors is smaller than both
        assert_near(f"gradient of {name}", gradient, direction, rtol=METHOD_GRADIENT, scale=largest)

    sizes = st.sampled_from([1.0, 1e4])
    check_draws("steps of methods", examples // 3, st.tuples(some_lists(), seeds, sizes), holds)


@effort
@over_methods
def test_garbage_in_padding_changes_nothing_that_is_learned(name, options, examples):
    def holds(case: tuple[Lists, int]) -> None:
        lists, seed = case
        clean, dirty = extreme_method(name, options, seed), extreme_method(name, options, seed)
        for actual, expected in zip(taken(dirty, with_garbage(lists, seed)), taken(clean, lists), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        for key, values in clean.state_dict().items():
            torch.testing.assert_close(dirty.state_dict()[key], values, msg=key)

    check_draws("garbage in methods", examples // 3, st.tuples(some_lists(), seeds), holds)


def feedback(requests: int = 64) -> Lists:
    log, _ = simulate_log(make_shown_log(requests, seed=1, features=FEATURES), User(), seed=1)
    return Lists.from_log(replace(log, actions={**log.actions, "length": np.full(log.rows, 20.0, np.float32)}))


@over_methods
def test_half_precision_stays_close_in_loss_and_gradient(name, options):
    lists = feedback()
    with torch.no_grad():
        method = extreme_method(name, options, 0)
        method.update(lists)
    results = []
    for chosen in ("float32", "bf16"):
        with precision(torch.device("cpu"), TrainingOptions(precision=chosen)):
            loss = method.loss(lists)
            results.append((loss.detach(), gradients(method, loss)))
    (loss, gradient), (rough, direction) = results
    assert rough.dtype == torch.float32
    assert record(f"bf16 loss of {name}", float(abs(rough / loss - 1))) < BF16_LOSS
    assert record(f"bf16 gradient of {name}", float((direction - gradient).norm() / gradient.norm())) < BF16_GRADIENT


@over_methods
def test_losses_of_scores_in_half_precision_are_computed_in_single_precision(name, options):
    """Eight bits cannot represent ranks beyond 256, or small gaps between scores."""
    lists, method = feedback(), extreme_method(name, options, 0, size=30)
    network = method.ranker.ranker if isinstance(method.ranker, Synthesised) else method.ranker
    results = []
    for taken_as in (torch.bfloat16, torch.float32):
        hook = network.register_forward_hook(lambda _, __, out, kind=taken_as: out.bfloat16().to(kind))
        results.append(method.loss(lists))
        hook.remove()
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


def test_pairwise_debiasing_keeps_its_ratios_where_the_first_position_has_no_pairs_whatever_the_power():
    method = extreme_method("pairwise-debias", {"regularisation": "200"}, 0)
    method.plus.copy_(torch.tensor([1.0, 0.5, 0.3, 0.05, 20.0]))
    before = method.plus.clone()
    lists = replace(feedback(), positions=torch.where(feedback().positions == 1, 2, feedback().positions))
    method.update(lists)
    assert torch.equal(method.plus, before)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_scale_of_an_action_is_right_if_its_squares_overflow_single_precision(size):
    log, _ = simulate_log(make_shown_log(40, features=FEATURES), User(), seed=1)
    actions = {"click": log.actions["click"], "dwell": np.full(log.rows, size, np.float32)}
    method = extreme_method("pal-click", {}, 0)
    method.estimate_bias(replace(log, actions={**actions, "length": actions["dwell"]}), user=None, sessions=1, seed=0)
    assert method.ranker.scale[1].item() == pytest.approx(max(size, 1e-6), rel=1e-6)


# --- Trees --------------------------------------------------------------------------------------------------------


def pair_case(seed: int, kind: Kind, *, by_metric: bool, clip: float) -> tuple[PairTerms, np.ndarray]:
    rng, draw = np.random.default_rng(seed), pools(seed)
    lengths = rng.integers(1, 7, 5)
    rows, places = int(lengths.sum()), 3
    row = {
        "value": draw(VAST_LABELS, rows), "above": draw((1.0, 100.0), rows), "below": draw((0.0, 1.0, 100.0), rows),
        "place": torch.from_numpy(rng.integers(0, places, rows)), "preference": draw(VAST_SCORES, rows),
        "beta": draw(PROBABILITIES, rows), "examined": draw(EXAMINED, rows),
        "plus": draw((0.01, 0.5, 0.99), places, places), "minus": draw((0.0, 0.01), places, places),
    }  # fmt: skip
    arrays = {name: values.numpy() for name, values in row.items()}
    offsets, weights = np.concatenate([[0], np.cumsum(lengths)]), rng.choice([1e-3, 1.0, 1e3], len(lengths))
    scores = draw(VAST_SCORES if seed % 2 else (0.0, 1.0, -150.0, 149.0), rows).numpy().astype(np.float64)
    return PairTerms(offsets, weights, kind=kind, by_metric=by_metric, clip=clip, **arrays), scores


@effort
@pytest.mark.parametrize("clip", [np.inf, 10.0])
@pytest.mark.parametrize("by_metric", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_derivatives_of_tree_objectives_are_finite_with_nonnegative_curvature(kind, by_metric, clip, examples):
    def holds(seed: int) -> None:
        terms, scores = pair_case(seed, kind, by_metric=by_metric, clip=clip)
        objective = PairwiseObjective(terms)
        gradient, curvature = objective.derivatives(scores)
        for values in (gradient, curvature, *objective(scores), objective.loss(scores)):
            assert np.isfinite(values).all()
        assert (curvature >= 0).all()
        assert objective.loss(scores) >= 0
        of_request = np.add.reduceat(gradient, terms.offsets[:-1])  # the gradients of the two items of a pair cancel
        size = np.add.reduceat(np.abs(gradient), terms.offsets[:-1])
        assert (np.abs(of_request) <= 1e-12 * size).all()

    check_draws("trees", examples, seeds, holds)


@effort
def test_derivatives_of_the_tree_objective_of_gaps_are_those_of_torch(examples):
    def holds(seed: int) -> None:
        terms, scores = pair_case(seed, Kind.GAP, by_metric=False, clip=np.inf)
        gradient, curvature = PairwiseObjective(terms).derivatives(scores)
        for q, (first, last) in enumerate(zip(terms.offsets[:-1], terms.offsets[1:], strict=True)):
            s, v = (torch.from_numpy(a[first:last])[None] for a in (scores, terms.value))
            s.requires_grad_()
            gaps = (v[..., :, None] - v[..., None, :]).clamp(min=0)
            (slope,) = torch.autograd.grad(terms.weights[q] * pairwise_loss(s, gaps), s, create_graph=True)
            bend = [torch.autograd.grad(slope[0, i], s, retain_graph=True)[0][0, i] for i in range(last - first)]
            size = terms.weights[q] * gaps.sum()
            assert_near("trees, gradient", torch.from_numpy(gradient[first:last]), slope[0].detach(), rtol=1e-13, scale=size)  # fmt: skip  # noqa: E501
            assert_near("trees, curvature", torch.from_numpy(curvature[first:last]), torch.stack(bend), rtol=1e-13, scale=size)  # fmt: skip  # noqa: E501

    check_draws("trees against torch", examples, seeds, holds)
