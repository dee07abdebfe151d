"""Posteriors against enumeration in rationals, EM against its likelihood, weights against the unbiased loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ultr.bias.equations import (
    PairModel,
    drawn_states,
    exact_above,
    exact_below,
    examined_though_zero,
    examined_zero_terms,
    item_log_likelihood,
    pair_examined,
    pair_log_likelihood,
    pair_posterior,
    pair_probability,
    pair_trust,
    paper_weights,
    preference_target,
    quotient,
    released_target,
    relevance_posterior,
    scoring_terms,
    sums_by_cell,
    trust_terms,
    updated,
)
from ultr.datasets.users import EYE_TRACKING

EITHER = (True, False)
Z99 = 2.576  # a 99% interval is the mean ± Z99 standard errors

inside = st.floats(1e-6, 1 - 1e-6)
probabilities = inside | st.sampled_from([0.0, 1e-12, 1 - 1e-12, 1.0])


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def uniform(rng: np.random.Generator, *size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, size))


# --- Posteriors by enumeration ------------------------------------------------------------------------------------

States = list[tuple[Fraction, tuple[bool, ...]]]


def states_of(*chances: Callable[..., float] | float) -> States:
    """List every state of binary variables; a probability may be a function of the variables before it."""
    states: States = [(Fraction(1), ())]
    for chance in chances:
        split = []
        for weight, state in states:
            p = Fraction(chance(*state) if callable(chance) else chance)
            split += [(weight * p, (*state, True)), (weight * (1 - p), (*state, False))]
        states = split
    return states


def chance_of(states: States, event: Callable[..., bool]) -> Fraction:
    return sum((weight for weight, state in states if event(*state)), Fraction(0))


def assert_conditional(
    value: Tensor, states: States, hidden: Callable[..., bool], seen: Callable[..., bool], *, within: float = 1e-15
) -> None:
    """Assert value = P(hidden | seen) to a relative 1e-9 or `within`, and that it is always a probability."""
    assert -1e-15 <= value.item() <= 1 + 1e-15
    total = chance_of(states, seen)
    if total:
        expected = chance_of(states, lambda *state: hidden(*state) and seen(*state)) / total
        assert value.item() == pytest.approx(float(expected), rel=1e-9, abs=within)


@given(probabilities, probabilities)
def test_the_posteriors_of_an_item_equal_enumeration(theta, beta):
    states = states_of(theta, beta)  # e, r > 0
    t, b = tensor(theta), tensor(beta)
    assert_conditional(examined_though_zero(t, b), states, lambda e, r: e, lambda e, r: not (e and r))
    for positive in EITHER:
        posterior = relevance_posterior(torch.tensor(positive), t, b)
        assert_conditional(posterior, states, lambda e, r: r, lambda e, r, seen=positive: (e and r) == seen)


@given(probabilities, probabilities, probabilities)
def test_the_relevance_posterior_under_trust_equals_enumeration(theta, beta, zeta):
    states = states_of(beta, lambda r: theta if r else zeta)  # r > 0, c > 0
    t, b, z = tensor(theta), tensor(beta), tensor(zeta)
    for positive in EITHER:
        posterior = relevance_posterior(torch.tensor(positive), t, b, z)
        assert_conditional(posterior, states, lambda r, c: r, lambda r, c, seen=positive: c == seen)
        chance = chance_of(states, lambda r, c, seen=positive: c == seen)
        if chance:
            log_likelihood = item_log_likelihood(torch.tensor(positive), t, b, z).item()
            assert log_likelihood == pytest.approx(np.log(float(chance)), rel=1e-9, abs=1e-15)


def pair_states(theta_i, theta_j, plus, minus, gamma, beta_i) -> States:
    """List the states of e_i, e_j, [r_i>r_j], [r_i>0] (independent, as in Eq. 13) and [c_i>c_j]."""

    def preferred(e_i, e_j, above, relevant):
        if e_i and e_j:
            return plus if above else minus
        return float(e_i and relevant)

    return states_of(theta_i, theta_j, gamma, beta_i, preferred)


@given(st.tuples(*[probabilities] * 6))
def test_the_posteriors_of_a_pair_equal_enumeration(parameters):
    states = pair_states(*parameters)
    pair = PairModel(*map(tensor, parameters))
    posterior = pair_posterior(pair)
    given_above = {
        "right": lambda e_i, e_j, above, relevant, c: e_i and e_j and above,
        "wrong": lambda e_i, e_j, above, relevant, c: e_i and e_j and not above,
        "alone": lambda e_i, e_j, above, relevant, c: e_i and not e_j and relevant,
    }
    given_below = {
        "agreed": lambda e_i, e_j, above, relevant, c: e_i and e_j and not above,
        "reversed_": lambda e_i, e_j, above, relevant, c: e_i and e_j and above,
        "lone_irrelevant": lambda e_i, e_j, above, relevant, c: e_i and not e_j and not relevant,
        "unexamined": lambda e_i, e_j, above, relevant, c: not e_i,
    }
    for name, hidden in given_above.items():
        assert_conditional(getattr(posterior, name), states, hidden, lambda *state: state[-1])
    for name, hidden in given_below.items():
        assert_conditional(getattr(posterior, name), states, hidden, lambda *state: not state[-1])


@given(st.tuples(*[probabilities] * 6))
def test_the_probability_of_a_pair_and_the_target_of_its_preference_equal_enumeration(parameters):
    states = pair_states(*parameters)
    pair = PairModel(*map(tensor, parameters))
    posterior = pair_posterior(pair)
    assert_conditional(pair_probability(pair), states, lambda *state: state[-1], lambda *state: True)
    for preferred in EITHER:
        observed = torch.tensor(preferred)
        target = preference_target(observed, pair.gamma, posterior)
        assert_conditional(
            target,
            states,
            lambda e_i, e_j, above, relevant, c: above,
            lambda *state, seen=preferred: state[-1] == seen,
        )
        chance = chance_of(states, lambda *state, seen=preferred: state[-1] == seen)
        if chance:
            log_likelihood = pair_log_likelihood(observed, pair).item()
            assert log_likelihood == pytest.approx(np.log(float(chance)), rel=1e-9, abs=1e-15)


@given(st.tuples(*[probabilities] * 5))
def test_pair_trust_and_pair_examined_equal_enumeration(parameters):
    examined, plus, minus, gamma, beta_i = parameters
    states = pair_states(1.0, *parameters)
    trust = pair_trust(tensor(plus), tensor(minus), tensor(gamma))
    both = pair_examined(*map(tensor, (examined, plus, minus, gamma, beta_i)))
    assert_conditional(both, states, lambda *state: state[1], lambda *state: state[-1])
    if examined:
        assert_conditional(trust, states, lambda *state: state[2], lambda *state: state[1] and state[-1])


def test_hidden_states_of_pairs_are_drawn_from_their_posteriors():
    generator = torch.Generator().manual_seed(0)
    n, rows = 5, 20_000
    values = [torch.rand(n, generator=generator).expand(rows, n) for _ in range(6)]
    posterior = pair_posterior(PairModel(*values))
    torch.manual_seed(0)
    drawn = drawn_states(posterior)
    for names in (("right", "wrong", "alone"), ("agreed", "reversed_", "lone_irrelevant", "unexamined")):
        states = torch.stack([getattr(drawn, name) for name in names])
        chances = torch.stack([getattr(posterior, name)[0] for name in names])
        assert (states.sum(0) == 1).all()
        assert set(states.unique().tolist()) == {0.0, 1.0}
        margin = 4 * (chances * (1 - chances) / rows).sqrt() + 1e-6
        assert ((states.mean(1) - chances).abs() < margin).all()


@given(st.tuples(*[probabilities] * 5))
def test_the_released_target_of_an_unexamined_pair_is_one_half(parameters):
    theta_minus, plus, minus, gamma, beta_i = parameters

    def preferred(e_j, above):
        return (plus if above else minus) if e_j else beta_i

    pair = PairModel(*map(tensor, (1.0, 1.0, plus, minus, gamma, beta_i)))
    for positive_j in EITHER:
        states = states_of(1.0 if positive_j else theta_minus, lambda e_j: gamma if e_j else 0.5, preferred)
        target = released_target(torch.tensor(positive_j), pair, tensor(theta_minus))
        assert_conditional(target, states, lambda e_j, above, c: above, lambda *state: state[-1])
        assert target <= 1


def exact_weights(positive_j: Tensor, theta_i: Tensor, theta_j: Tensor, beta_j: Tensor) -> Tensor:
    """Return the exact weight without trust, which does not depend on β_i."""
    return exact_above(theta_i, torch.full_like(theta_i, 0.3)) * exact_below(positive_j, theta_j, beta_j)


@given(st.tuples(inside, inside, probabilities), st.tuples(inside, inside, probabilities))
def test_exact_weights_of_trusting_clicks_have_the_mean_of_relevance(i, j):
    """Σ over clicks of P(clicks) [c_i>c_j] w_ij = β_i (1-β_j), if irrelevant items are clicked with probability ζ."""

    def rates(theta, beta, zeta):
        return theta * beta + zeta * (1 - beta), (1 - theta) * beta + (1 - zeta) * (1 - beta)

    i, j = ((theta, beta, share * theta) for theta, beta, share in (i, j))
    (clicked_i, _), (clicked_j, silent_j) = rates(*i), rates(*j)
    above, positive = exact_above(*map(tensor, i)), torch.tensor([True, False])
    given_click, given_silence = exact_below(positive, *map(tensor, j)).tolist()
    assert clicked_i * silent_j * float(above) * given_silence == pytest.approx(i[1] * (1 - j[1]), rel=1e-9, abs=1e-12)
    assert clicked_j * given_click == pytest.approx(j[1], rel=1e-9)


@given(inside, inside, probabilities, probabilities)
def test_the_exact_weight_is_the_posterior_of_examination_over_the_propensities(theta_i, theta_j, beta_j, examined):
    states = states_of(theta_j, beta_j)
    unseen = chance_of(states, lambda e, r: not (e and r))
    seen, zero = torch.tensor(True), torch.tensor(False)
    t_i, t_j = tensor(theta_i), tensor(theta_j)
    if unseen:
        expected = chance_of(states, lambda e, r: e and not r) / unseen / Fraction(theta_i) / Fraction(theta_j)
        weight = exact_weights(zero, t_i, t_j, tensor(beta_j)).item()
        assert weight == pytest.approx(float(expected), rel=1e-9)
        assert weight <= (1 + 1e-12) / theta_i
    propensity = theta_i * theta_j
    assert exact_weights(seen, t_i, t_j, tensor(beta_j)).item() == pytest.approx(1 / propensity, rel=1e-9)
    assert paper_weights(seen, t_i, t_j, tensor(examined)).item() == pytest.approx(1 / propensity, rel=1e-9)
    assert paper_weights(zero, t_i, t_j, tensor(examined)).item() == pytest.approx(examined / propensity, rel=1e-9)


# --- Edges --------------------------------------------------------------------------------------------------------


def grid(values: Iterable[float], parameters: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    edges = torch.tensor(list(values), dtype=torch.float64).to(dtype)
    return torch.cartesian_prod(*[edges] * parameters).unbind(-1)


EDGES = {
    torch.float64: (0.0, 1e-12, 0.3, 1 - 1e-12, 1.0),
    torch.float32: (0.0, 1e-45, 1e-30, 1e-12, 0.3, 1 - 2**-24, 1.0),
}


def assert_probabilities(*values: Tensor, slack: float = 0.0) -> None:
    for value in values:
        assert bool(((value >= 0) & (value <= 1 + slack)).all())  # nan is neither


@pytest.mark.parametrize("dtype", EDGES)
def test_every_posterior_is_a_probability_at_the_edges(dtype):
    ulp = torch.finfo(dtype).eps
    positive = torch.tensor([[True], [False]])
    theta, beta, zeta = grid(EDGES[dtype], 3, dtype)
    assert_probabilities(
        examined_though_zero(theta, beta),
        relevance_posterior(positive, theta, beta),
        relevance_posterior(positive, theta, beta, zeta),
        pair_trust(theta, beta, zeta),
        exact_weights(torch.tensor(False), torch.ones_like(theta), theta, beta),
        *examined_zero_terms(positive, theta, beta),
    )
    likelihood = item_log_likelihood(positive, theta, beta, zeta)
    assert bool((likelihood.isfinite() & (likelihood <= 2 * ulp)).all())
    assert all(bool((term.isfinite() & (term >= 0)).all()) for term in scoring_terms(positive, theta, beta))

    assert_probabilities(pair_examined(*grid(EDGES[dtype], 5, dtype)))

    pair = PairModel(*grid(EDGES[dtype], 6, dtype))
    posterior = pair_posterior(pair)
    assert_probabilities(*vars(posterior).values(), *trust_terms(positive, posterior))
    assert_probabilities(preference_target(positive, pair.gamma, posterior), pair_probability(pair), slack=2 * ulp)
    likelihood = pair_log_likelihood(positive, pair)
    assert bool((likelihood.isfinite() & (likelihood <= 4 * ulp)).all())


def test_the_cells_of_a_pair_sum_to_one_if_the_observation_is_possible():
    pair = PairModel(*grid(EDGES[torch.float64], 6, torch.float64))
    both, alone = (pair.theta_i > 0) & (pair.theta_j > 0), (pair.theta_i > 0) & (pair.theta_j < 1)
    right, wrong = (pair.plus > 0) & (pair.gamma > 0), (pair.minus > 0) & (pair.gamma < 1)
    reversed_, agreed = (pair.plus < 1) & (pair.gamma > 0), (pair.minus < 1) & (pair.gamma < 1)
    above = both & (right | wrong) | alone & (pair.beta_i > 0)
    below = (pair.theta_i < 1) | both & (reversed_ | agreed) | alone & (pair.beta_i < 1)
    p = pair_posterior(pair)
    torch.testing.assert_close(p.right + p.wrong + p.alone, above.double(), rtol=0, atol=1e-12)
    cells = p.agreed + p.reversed_ + p.lone_irrelevant + p.unexamined
    torch.testing.assert_close(cells, below.double(), rtol=0, atol=1e-12)


def test_the_cells_of_a_pair_sum_to_one_in_single_precision_unless_all_of_them_underflow():
    pair = PairModel(*grid(EDGES[torch.float32], 6, torch.float32))
    p = pair_posterior(pair)
    cells = p.right + p.wrong + p.alone
    torch.testing.assert_close(cells, (pair_probability(pair) > 0).float(), rtol=0, atol=1e-6)
    cells = p.agreed + p.reversed_ + p.lone_irrelevant + p.unexamined
    certain = pair_probability(pair) > 1 - 1e-6
    assert bool((((cells - 1).abs() < 1e-6) | (certain & (cells == 0))).all())


def test_single_and_double_precision_agree_if_an_item_is_almost_surely_seen_or_relevant():
    near = (1e-6, 0.3, 1 - 1e-5, 1 - 3.3e-6)
    theta, beta, zeta = grid(near, 3, torch.float32)
    positive = torch.tensor([[True], [False]])
    wide = [value.double() for value in (theta, beta, zeta)]
    narrow = examined_though_zero(theta, beta).double()
    torch.testing.assert_close(narrow, examined_though_zero(*wide[:2]), rtol=1e-6, atol=0)
    narrow = exact_weights(positive, zeta, theta, beta).double()
    torch.testing.assert_close(narrow, exact_weights(positive, wide[2], *wide[:2]), rtol=1e-6, atol=0)
    narrow = relevance_posterior(positive, theta, beta, zeta).double()
    torch.testing.assert_close(narrow, relevance_posterior(positive, *wide), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", EDGES)
def test_the_target_of_a_sure_preference_is_never_above_one_by_rounding(dtype):
    theta_i, theta_j, plus, minus, beta_i = uniform(np.random.default_rng(6), 5, 2000).to(dtype)
    pair = PairModel(theta_i, theta_j, plus, minus, torch.ones_like(plus), beta_i)
    for preferred in EITHER:
        target = preference_target(torch.tensor(preferred), pair.gamma, pair_posterior(pair))
        assert_probabilities(target)
        torch.testing.assert_close(target, torch.ones_like(target))


@given(st.floats(5e-324, 1.0), probabilities, inside, inside, st.booleans())
def test_without_trust_bias_bayes_ipw_is_ipw_to_the_last_bit(gamma, examined, theta_i, theta_j, positive_j):
    for dtype in EDGES:
        one, zero, g = torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype), torch.tensor(gamma, dtype=dtype)
        trust = pair_trust(one, zero, g)
        assert trust == (g > 0).to(dtype)
        t_i, t_j, h = (torch.tensor(value, dtype=dtype) for value in (theta_i, theta_j, examined))
        ipw = paper_weights(torch.tensor(positive_j), t_i, t_j, h)
        assert bool(torch.equal(ipw * trust, ipw) or g == 0)


# --- EM -----------------------------------------------------------------------------------------------------------


def never_falls(values: list[float]) -> bool:
    return all(after >= before - 1e-7 for before, after in pairwise(values))


@dataclass
class Pairs:
    """Draw pairs of `kinds` kinds, each with its own gamma, shown at any two of some positions."""

    preferred: Tensor
    theta: Tensor
    beta: Tensor
    i: Tensor
    j: Tensor
    kind: Tensor

    @property
    def cells(self) -> Tensor:
        return self.i * len(self.theta) + self.j

    def model(self, plus: Tensor, minus: Tensor, gamma: Tensor) -> PairModel:
        theta_i, theta_j = self.theta[self.i], self.theta[self.j]
        return PairModel(theta_i, theta_j, plus[self.cells], minus[self.cells], gamma[self.kind], self.beta[self.kind])


@st.composite
def pair_problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    positions, kinds, n = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 300))
    i, j = torch.from_numpy(rng.integers(0, positions, (2, n)))
    preferred = torch.from_numpy(rng.random(n) < rng.random())
    kind = torch.from_numpy(rng.integers(0, kinds, n))
    pairs = Pairs(preferred, uniform(rng, positions), uniform(rng, kinds), i, j, kind)
    return pairs, uniform(rng, positions**2), uniform(rng, positions**2), uniform(rng, kinds)


@settings(max_examples=25)
@given(pair_problems())
def test_em_of_trust_and_preference_never_lowers_the_likelihood_of_pairs(problem):
    pairs, plus, minus, gamma = problem
    likelihood = []
    for _ in range(50):
        model = pairs.model(plus, minus, gamma)
        likelihood.append(pair_log_likelihood(pairs.preferred, model).sum().item())
        posterior = pair_posterior(model)
        terms = trust_terms(pairs.preferred, posterior)
        target = preference_target(pairs.preferred, model.gamma, posterior)
        right, shown, wrong, shown_wrong = (sums_by_cell(term, pairs.cells, len(plus)) for term in terms)
        plus, minus = updated(right, shown, plus), updated(wrong, shown_wrong, minus)
        sums = [sums_by_cell(term, pairs.kind, len(gamma)) for term in (target, torch.ones_like(target))]
        gamma = updated(*sums, gamma)
    assert never_falls(likelihood)
    assert_probabilities(plus, minus, gamma, slack=1e-12)


@given(pair_problems())
def test_the_statistics_of_pairs_give_the_gradient_of_their_likelihood(problem):
    """Check Fisher's identity: d/dp of the log likelihood is N/p - (D-N)/(1-p), with N and D of the M-step."""
    pairs, *parameters = problem
    plus, minus, gamma = (p.mul(0.9).add(0.05).requires_grad_() for p in parameters)
    model = pairs.model(plus, minus, gamma)
    likelihood = pair_log_likelihood(pairs.preferred, model).sum()
    gradients = torch.autograd.grad(likelihood, (plus, minus, gamma))
    posterior = pair_posterior(model)
    target = preference_target(pairs.preferred, model.gamma, posterior)
    terms = (*trust_terms(pairs.preferred, posterior), target, torch.ones_like(target))
    sizes = [(pairs.cells, len(plus))] * 4 + [(pairs.kind, len(gamma))] * 2
    sums = [sums_by_cell(term, *size) for term, size in zip(terms, sizes, strict=True)]
    for p, gradient, count, total in zip((plus, minus, gamma), gradients, sums[::2], sums[1::2], strict=True):
        torch.testing.assert_close(count / p - (total - count) / (1 - p), gradient, rtol=1e-8, atol=1e-8)


@st.composite
def item_problems(draw):
    """Draw clicks on items, each shown at any of some positions, and a start for theta, beta and zeta."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    positions, items, n = draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(st.integers(1, 300))
    positive = torch.from_numpy(rng.random(n) < rng.random())
    place, item = torch.from_numpy(rng.integers(0, positions, n)), torch.from_numpy(rng.integers(0, items, n))
    return positive, place, item, uniform(rng, positions), uniform(rng, items), uniform(rng, positions)


@settings(max_examples=25)
@given(item_problems())
def test_em_of_examination_and_relevance_never_lowers_the_likelihood_of_items(problem):
    positive, place, item, theta, beta, _ = problem
    likelihood = []
    for _ in range(50):
        here = theta[place], beta[item]
        likelihood.append(item_log_likelihood(positive, *here).sum().item())
        relevant, seen = relevance_posterior(positive, *here), torch.where(positive, 1.0, examined_though_zero(*here))
        shown = torch.ones_like(seen)
        theta = updated(sums_by_cell(seen, place, len(theta)), sums_by_cell(shown, place, len(theta)), theta)
        beta = updated(sums_by_cell(relevant, item, len(beta)), sums_by_cell(shown, item, len(beta)), beta)
    assert never_falls(likelihood)
    assert_probabilities(theta, beta)


@settings(max_examples=25)
@given(item_problems())
def test_em_with_clicks_from_trust_never_lowers_the_likelihood_of_items(problem):
    positive, place, item, theta, beta, zeta = problem
    likelihood = []
    for _ in range(50):
        here = theta[place], beta[item], zeta[place]
        likelihood.append(item_log_likelihood(positive, *here).sum().item())
        relevant = relevance_posterior(positive, *here)
        by_place = [
            sums_by_cell(term, place, len(theta))
            for term in (relevant * positive, relevant, (1 - relevant) * positive, 1 - relevant)
        ]
        theta, zeta = updated(*by_place[:2], theta), updated(*by_place[2:], zeta)
        by_item = [sums_by_cell(term, item, len(beta)) for term in (relevant, torch.ones_like(relevant))]
        beta = updated(*by_item, beta)
    assert never_falls(likelihood)
    assert_probabilities(theta, beta, zeta)


@given(item_problems())
def test_the_statistics_of_items_give_the_gradient_of_their_likelihood(problem):
    positive, place, item, *parameters = problem
    theta, beta = (p.mul(0.9).add(0.05).requires_grad_() for p in parameters[:2])
    here = theta[place], beta[item]
    gradients = torch.autograd.grad(item_log_likelihood(positive, *here).sum(), (theta, beta))
    for p, gradient, posterior, cells in (
        (theta, gradients[0], torch.where(positive, 1.0, examined_though_zero(*here)), place),
        (beta, gradients[1], relevance_posterior(positive, *here), item),
    ):
        count, total = (sums_by_cell(term, cells, len(p)) for term in (posterior, torch.ones_like(posterior)))
        torch.testing.assert_close(count / p - (total - count) / (1 - p), gradient, rtol=1e-8, atol=1e-8)


# --- Fisher's scoring ---------------------------------------------------------------------------------------------


def test_eight_steps_of_scoring_reach_what_em_reaches_in_three_thousand():
    rng = np.random.default_rng(0)
    positions, n = 24, 500
    beta = uniform(rng, positions, n, low=0.02, high=0.9)
    truth = torch.linspace(0.05, 0.9, positions, dtype=torch.float64)[:, None]
    positive = uniform(rng, positions, n) < truth * beta
    cells = torch.arange(positions)[:, None].expand(positions, n)
    start = torch.full((positions,), 0.5, dtype=torch.float64)

    def em(theta, steps):
        for _ in range(steps):
            theta = torch.where(positive, 1.0, examined_though_zero(theta[:, None], beta)).mean(1)
        return theta

    scored = start
    for _ in range(8):
        terms = scoring_terms(positive, scored[:, None], beta)
        scored = updated(*(sums_by_cell(term, cells, positions) for term in terms), scored).clamp(0, 1)
    torch.testing.assert_close(scored, em(start, 3000), rtol=0, atol=1e-6)
    assert (em(start, 8) - scored).abs().max() > 0.02


# --- Weights: the mean of the weighted loss and the full-information loss -----------------------------------------


@dataclass(frozen=True)
class World:
    """Lists of four in a position-based world: c = e R, R in 0..3, P(R>0) = beta, and losses L of some ranker."""

    theta: Tensor
    values: Tensor  # P(R = v), [lists, 4, v]
    losses: Tensor  # [lists, 4, 4], zero on the diagonal

    @property
    def beta(self) -> Tensor:
        return self.values[..., 1:].sum(-1)

    @property
    def gamma(self) -> Tensor:
        return sum(self.values[:, :, None, v] * self.values[:, None, :, w] for v in range(4) for w in range(v))

    @property
    def examined_zeros(self) -> Tensor:
        """theta-: the mean of t over the zeros at a position."""
        return (self.theta * (1 - self.beta)).sum(0) / (1 - self.theta * self.beta).sum(0)

    def target(self) -> Tensor:
        return (self.gamma * self.losses).mean(0)

    def weights(self, name: str, positive_j: Tensor) -> Tensor:
        theta_i, theta_j = self.theta[:, None], self.theta
        beta_i, beta_j = self.beta[:, :, None], self.beta[:, None, :]
        if name == "naive":
            return torch.ones_like(self.losses)
        if name == "exact":
            return exact_weights(positive_j, theta_i, theta_j, beta_j)
        examined = self.examined_zeros.expand_as(self.losses)
        if name == "equation 16":
            examined = pair_examined(examined, torch.ones(()).double(), torch.zeros(()).double(), self.gamma, beta_i)
        return paper_weights(positive_j, theta_i, theta_j, examined)

    def mean_loss(self, name: str) -> Tensor:
        """Return the contribution of each pair of positions [4, 4], by enumeration of e_i, R_i, e_j, R_j."""
        total = torch.zeros_like(self.losses)
        for e_i, e_j, v, w in product((0, 1), (0, 1), range(4), range(4)):
            if e_i * v > e_j * w:
                examined_i, examined_j = (self.theta if e else 1 - self.theta for e in (e_i, e_j))
                chance = (examined_i * self.values[..., v])[:, :, None] * (examined_j * self.values[..., w])[:, None, :]
                total += chance * self.weights(name, torch.tensor(e_j * w > 0)) * self.losses
        return total.mean(0)

    def drawn_losses(self, names: Iterable[str], n: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (n, *self.values.shape[:2])
        examined = torch.rand(shape, generator=generator, dtype=torch.float64) < self.theta
        edges = self.values.cumsum(-1)[..., :-1]
        value = (torch.rand((*shape, 1), generator=generator, dtype=torch.float64) > edges).sum(-1)
        c = examined * value
        preferred = c[..., :, None] > c[..., None, :]
        return {
            name: (preferred * self.weights(name, c[..., None, :] > 0) * self.losses).sum((-1, -2)).mean(-1)
            for name in names
        }


def make_world(rng: np.random.Generator, lists: int, pull: float = 2.0) -> World:
    """Make a world; `pull` is how much the scores of the ranker follow beta, and the rest is noise."""
    beta = rng.uniform(0.05, 0.95, (lists, 4))
    quality = rng.random((lists, 4))
    positive = [(1 - quality) ** 2, 2 * quality * (1 - quality), quality**2]
    values = np.stack([1 - beta, *(beta * p for p in positive)], axis=-1)
    scores = pull * beta + rng.normal(size=(lists, 4))
    losses = np.log1p(np.exp(scores[:, None, :] - scores[:, :, None])) * (1 - np.eye(4))
    theta = torch.tensor(EYE_TRACKING[:4], dtype=torch.float64)
    return World(theta, torch.from_numpy(values), torch.from_numpy(losses))


@cache
def one_world() -> World:
    return make_world(np.random.default_rng(0), lists=100)


@cache
def drawn() -> dict[str, Tensor]:
    return one_world().drawn_losses(["exact", "naive", "equation 16", "theta-"], n=4000, seed=1)


def covers(draws: Tensor, value: Tensor) -> bool:
    return bool((draws.mean() - value).abs() <= Z99 * draws.std() / len(draws) ** 0.5)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_exact_weights_are_unbiased_at_every_pair_of_positions(seed):
    world = make_world(np.random.default_rng(seed), lists=3)
    torch.testing.assert_close(world.mean_loss("exact"), world.target(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "blind", "fair", "good"),
    [("naive", 0.67, 0.70, 0.73), ("equation 16", 0.82, 0.87, 0.92), ("theta-", 0.99, 1.08, 1.16)],
)
def test_other_weights_are_biased_the_more_the_ranker_follows_relevance(name, blind, fair, good):
    for pull, ratio in ((0.0, blind), (2.0, fair), (4.0, good)):
        world = make_world(np.random.default_rng(0), lists=100, pull=pull)
        measured = world.mean_loss(name).sum() / world.target().sum()
        assert measured.item() == pytest.approx(ratio, abs=0.01)  # measured values of the bias of the printed weights
    world = one_world()
    assert covers(drawn()[name], world.mean_loss(name).sum())
    assert not covers(drawn()[name], world.target().sum())


def test_the_mean_of_losses_drawn_with_exact_weights_is_the_full_information_loss():
    assert covers(drawn()["exact"], one_world().target().sum())
    assert drawn()["exact"].std() / len(drawn()["exact"]) ** 0.5 < 0.005 * one_world().target().sum()


def test_no_scale_corrects_the_naive_loss():
    ratio = (one_world().mean_loss("naive") / one_world().target())[~torch.eye(4, dtype=torch.bool)]
    assert ratio.max() > 1.5 * ratio.min()


def test_theta_minus_is_the_share_of_zeros_that_were_examined():
    world, n = one_world(), 2000
    generator = torch.Generator().manual_seed(2)
    shape = (n, *world.beta.shape)
    examined = torch.rand(shape, generator=generator, dtype=torch.float64) < world.theta
    positive = examined & (torch.rand(shape, generator=generator, dtype=torch.float64) < world.beta)
    position = torch.arange(4).expand(shape)
    terms = examined_zero_terms(positive, world.theta.expand(shape), world.beta.expand(shape))
    counted, zeros = (sums_by_cell(term, position, 4) for term in terms)
    assert torch.equal(zeros, (~positive).sum((0, 1)).double())
    share = updated(counted, zeros, torch.zeros(4).double())
    frequency = (examined & ~positive).sum((0, 1)) / zeros
    margin = 3.02 * (share * (1 - share) / zeros).sqrt()  # 99% over four
    assert bool(((frequency - share).abs() < margin).all())
    torch.testing.assert_close(share, world.examined_zeros, rtol=0.005, atol=0)


def test_bayes_ipw_has_the_mean_of_plus_times_gamma_and_is_unbiased_once_divided_by_plus():
    rng = np.random.default_rng(3)
    pairs, n = 200, 8000
    theta_i, theta_j = uniform(rng, 2, pairs, low=0.3)
    gamma, losses = uniform(rng, pairs, low=0.1, high=0.9), uniform(rng, pairs, low=0.1, high=2.0)
    plus, minus = uniform(rng, pairs, low=0.6, high=0.95), uniform(rng, pairs, low=0.05, high=0.4)
    generator = torch.Generator().manual_seed(4)

    def happens(p):
        return torch.rand((n, pairs), generator=generator, dtype=torch.float64) < p

    above = happens(gamma)
    preferred = happens(theta_i) & happens(theta_j) & happens(torch.where(above, plus, minus))
    ipw = preferred * paper_weights(torch.tensor(True), theta_i, theta_j, torch.ones(()).double()) * losses
    bayes = ipw * pair_trust(plus, minus, gamma)
    printed, target = (plus * gamma * losses).sum(), (gamma * losses).sum()
    assert covers(bayes.sum(1), printed)
    assert covers((bayes / plus).sum(1), target)
    assert not covers(bayes.sum(1), target)
    assert not covers(ipw.sum(1), target)


# --- Sums, updates and shares -------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_sums_by_cell_equal_a_loop_in_any_shape(seed, size, shape):
    rng = np.random.default_rng(seed)
    values, cells = rng.normal(size=shape), rng.integers(0, size, shape)
    expected = np.zeros(size)
    for value, cell in zip(values.reshape(-1), cells.reshape(-1), strict=True):
        expected[cell] += value
    sums = sums_by_cell(torch.from_numpy(values), torch.from_numpy(cells), size)
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_an_update_divides_and_keeps_cells_without_data():
    value = updated(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([4.0, 2.0, 0.0]), torch.tensor([0.9, 0.9, 0.9]))
    torch.testing.assert_close(value, torch.tensor([1 / 4, 0.0, 0.9]))


@given(inside, st.floats(0, 1e6), probabilities)
def test_an_update_lies_between_its_bounds_and_does_not_depend_on_scale(share, total, previous):
    value = updated(tensor(share * total), tensor(total), tensor(previous))
    assert 0 <= value <= 1
    assert value.item() == pytest.approx(share if total else previous, rel=1e-9)
    assert quotient(tensor(share * total), tensor(total)).item() == pytest.approx(share if total else 0.0, rel=1e-9)


weights_of_pairs = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)
