"""Compare gradients with finite differences: of every loss, every method in training, and all objectives of trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import ultr.methods.losses
from conftest import make_shown_log
from hardening.extremes import (
    FEATURES,
    VARIANTS,
    Ranked,
    arguments_of,
    check_draws,
    effort,
    extreme_method,
    in_double,
    public_functions,
    ranked,
    record,
    write_counts,
)
from ultr.bias.equations import item_log_likelihood
from ultr.bias.logging_policy import _order_loss
from ultr.datasets.users import User, simulate_log
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods import METHODS, Method
from ultr.methods.losses import lambdarank_weights
from ultr.rankers.tree_objective import Kind, PairTerms, PairwiseObjective

STEP = 1e-5  # a difference has an error of STEP² times the third derivative, and 1e-16 / STEP times the value
DIFFERENCE = 1e-6  # that error for sums of a few dozen terms
SECOND_STEP, SECOND_DIFFERENCE = 3e-4, 1e-5  # second differences have an error of 1e-16 / STEP² times the value
SCORES = (0.0, 1e-3, 1.0, -1.0, 5.0, -5.0, 30.0, -30.0)
GRADES = (0.0, 1e-6, 0.3, 1.0, 1.0, 4.0)
LOSSES = {name: f for name, f in public_functions(ultr.methods.losses).items() if name.endswith("_loss")}
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _counts() -> Iterator[None]:
    yield from write_counts("gradients")


def slopes(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = STEP) -> np.ndarray:
    """Return the gradient by central differences."""
    return np.array([(function(at + move) - function(at - move)) / (2 * step) for move in step * np.eye(len(at))])


def bends(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = SECOND_STEP) -> np.ndarray:
    """Return the second derivative by each variable."""
    here = function(at)
    moves = step * np.eye(len(at))
    return np.array([(function(at + move) - 2 * here + function(at - move)) / step**2 for move in moves])


def assert_slopes(what: str, actual: np.ndarray, expected: np.ndarray, within: float = DIFFERENCE) -> None:
    size = max(1.0, float(np.abs(expected).max(initial=0)))
    assert record(what, float(np.abs(actual - expected).max(initial=0)) / size) < within


# --- Losses -------------------------------------------------------------------------------------------------------


@effort
@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_the_gradients_and_the_curvatures_of_finite_differences(name, examples):
    def holds(drawn: Ranked) -> None:
        case, function = in_double(drawn.with_garbage("labels")), LOSSES[name]
        # Distinct scores, so that no step changes their order.
        scores = case.scores + 0.01 * torch.arange(case.scores.shape[-1])
        inputs = {"labels": case.labels, "item_weights": case.labels, "targets": case.labels.clamp(max=1)}
        inputs |= {"pair_weights": lambdarank_weights(scores, case.labels, where=case.where), "where": case.where}

        def loss(first: Tensor, second: Tensor) -> Tensor:
            values = {**inputs, "scores": first, "logits": first, "others": second, "weights": case.weights}
            value: Tensor = function(**arguments_of(function, values))
            return value + 0 * second.sum()

        leaves = scores.requires_grad_(), (0.5 * scores.detach() + 1).requires_grad_()
        assert gradcheck(loss, leaves)
        assert gradgradcheck(loss, leaves, atol=1e-4, fast_mode=True)

    check_draws("gradients of losses", examples // 2, ranked(SCORES, GRADES, longest=4), holds)


@effort
def test_the_likelihood_of_an_order_has_the_gradient_of_finite_differences(examples):
    def holds(drawn: Ranked) -> None:
        if drawn.where.any():
            assert gradcheck(lambda s: _order_loss(s, drawn.where), in_double(drawn).scores.requires_grad_())

    check_draws("gradients of an order", examples, ranked(SCORES, GRADES, longest=4), holds)


# --- Methods ------------------------------------------------------------------------------------------------------

# Methods that do not descend their loss: their weights or targets depend on the scores, but have no gradient.
EXCLUDED = {
    "dla": "see test_click_methods",
    "pl-rank": "see test_plackett_luce",
    "prpo": "see test_safe",
    "regression-em": "see below",
    "safe-ipw": "see test_safe",
    "upe": "see test_confounding",
}
CHECKED = [(name, options) for name in METHODS if name not in EXCLUDED for options in VARIANTS.get(name, [{}])]


def feedback(seed: int, requests: int = 5) -> Log:
    log, _ = simulate_log(make_shown_log(requests, seed=seed, features=FEATURES), User(eta=0.3), seed=seed)
    return replace(log, actions={**log.actions, "length": np.full(log.rows, 20.0, np.float32)})


FIXED = ("bias_model.", "positions.")  # of a bias model, which the gradients of the ranker's loss do not reach


def along(method: Method, lists: Lists, loss: Callable[[Method, Lists], Tensor], seed: int) -> tuple[float, float]:
    """Return the slope of a method's loss in a random direction of its parameters, and the difference of `loss`."""
    parameters = {name: p for name, p in method.named_parameters() if p.requires_grad and not name.startswith(FIXED)}
    torch.manual_seed(seed)
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}
    gradient = torch.autograd.grad(method.loss(lists), list(parameters.values()), allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction.values(), strict=True) if g is not None)

    def moved(by: float) -> float:
        with torch.no_grad():
            there = {name: p + by * direction[name] for name, p in parameters.items()}
            method.forward = lambda: loss(method, lists)  # functional_call calls this
            return float(functional_call(method, there, ()))

    return slope, (moved(STEP) - moved(-STEP)) / (2 * STEP)


@effort
@pytest.mark.parametrize(("name", "options"), CHECKED, ids=lambda v: "-".join(v.values()) if isinstance(v, dict) else v)
def test_methods_have_the_gradients_of_finite_differences(name, options, examples):
    def holds(seed: int) -> None:
        method = extreme_method(name, options, seed, double=True)
        lists = in_double(Lists.from_log(feedback(seed % 1000)))
        with torch.no_grad():
            method.update(lists)
        slope, difference = along(method, lists, lambda m, batch: m.loss(batch), seed)
        assert_slopes(f"gradient of {name}", np.array([slope]), np.array([difference]), 1e-5)

    check_draws("gradients of methods", examples // 4, seeds, holds)


@effort
def test_regression_em_climbs_the_likelihood_of_clicks(examples):
    def likelihood(method: Method, lists: Lists) -> Tensor:
        theta = method.positions.theta[method.positions.index(lists.shown_positions)]
        likelihoods = item_log_likelihood(method.clicked(lists), theta, method.score(lists.features).sigmoid())
        return -ultr.methods.losses.reduced(torch.where(lists.where, likelihoods, 0.0).sum(-1), lists.weights)

    def holds(seed: int) -> None:
        method = extreme_method("regression-em", {}, seed, double=True)
        method.positions.theta.clamp_(min=0.05)  # impossible clicks have no slope
        slope, difference = along(method, in_double(Lists.from_log(feedback(seed % 1000))), likelihood, seed)
        assert_slopes("gradient of regression-em", np.array([slope]), np.array([difference]), 1e-5)

    check_draws("gradients of methods", examples, seeds, holds)


# --- Trees --------------------------------------------------------------------------------------------------------


@effort
@pytest.mark.parametrize("clip", [np.inf, 2.0])
@pytest.mark.parametrize("by_metric", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_objectives_of_trees_have_the_derivatives_of_finite_differences(kind, by_metric, clip, examples):
    """Scores of a request that are more than 300 apart take another code path."""

    def holds(seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 5, 6)
        rows = int(lengths.sum())
        terms = PairTerms(
            np.concatenate([[0], np.cumsum(lengths)]), rng.choice([0.1, 1.0, 3.0], 6), rng.choice(GRADES, rows), kind,
            by_metric=by_metric, clip=clip, above=rng.uniform(1, 4, rows), below=rng.uniform(0, 3, rows),
            place=rng.integers(0, 2, rows), preference=rng.choice(SCORES, rows),
            beta=rng.choice([0.0, 0.3, 1.0], rows), examined=rng.choice([0.0, 0.3, 1.0], rows),
            plus=rng.uniform(0.5, 1, (2, 2)), minus=rng.uniform(0, 0.5, (2, 2)),
        )  # fmt: skip
        far = np.repeat([0.0, 0.0, 0.0, 0.0, 400.0, 400.0], lengths) * rng.integers(0, 2, rows)
        scores = rng.choice(SCORES[:6], rows) + far + 0.01 * rng.permutation(rows)
        gradient, curvature = PairwiseObjective(terms).derivatives(scores)
        steps = [step * np.eye(rows) for step in (STEP, -STEP, SECOND_STEP, -SECOND_STEP)]
        at = scores + np.concatenate([np.zeros((1, rows)), *steps])
        here, *moved = np.split(losses_at(terms, at), np.cumsum([1, rows, rows, rows]))
        slope, bend = (moved[0] - moved[1]) / (2 * STEP), (moved[2] - 2 * here + moved[3]) / SECOND_STEP**2
        size = max(1.0, here.item() / 100)  # rounding errors are relative to this size
        assert_slopes("trees, gradient", gradient / size, slope / size)
        assert_slopes("trees, curvature", curvature / size, bend / size, SECOND_DIFFERENCE)

    check_draws("gradients of trees", examples // 2, seeds, holds)


def losses_at(terms: PairTerms, scores: np.ndarray) -> np.ndarray:
    """Return the sum of losses at each row of scores, in one call with copies of the requests."""
    copies, rows = scores.shape
    offsets = (terms.offsets[:-1] + rows * np.arange(copies)[:, None]).ravel()
    repeated = {
        n: np.tile(v, copies) for n, v in vars(terms).items() if isinstance(v, np.ndarray) and v.shape == (rows,)
    }
    many = replace(
        terms, **{**repeated, "offsets": np.append(offsets, copies * rows), "weights": np.tile(terms.weights, copies)}
    )
    return PairwiseObjective(many)._computed(scores.ravel(), True)[2].reshape(copies, -1).sum(1)
