"""Equations of examination and trust: posteriors (E-step), statistics and updates (M-step), and weights of pairs.

Equation numbers are those of *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022), "the paper".
All functions are pure, on tensors that broadcast. Notation, for an item i at position k and a pair (i, j):

    e_i, r_i    examined, and the value to the user (both hidden)               c_i >= 0   the label (seen)
    θ_k         P(e=1 | k)                                 β_i    P(r_i > 0 | x_i)
    t_i         P(e_i=1 | x_i, k, c_i=0)                   γ_ij   P(r_i > r_j | x_i, x_j)
    ε⁺_ij       P(c_i>c_j | both examined, r_i >  r_j)
    ε⁻_ij       P(c_i>c_j | both examined, r_i <= r_j)

Denominators are sums of non-negative terms, so that no digits cancel if probabilities are near 0 or 1. A ratio 0/0
is 0, and a parameter without data keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# --- One item -----------------------------------------------------------------------------------------------------


def examined_though_zero(theta: Tensor, beta: Tensor) -> Tensor:
    """Return t, the probability that an item with label 0 was examined: P(e=1 | c=0) = θ(1-β) / (1-θβ)."""
    seen = theta * (1 - beta)
    return quotient(seen, (1 - theta) + seen)


def relevance_posterior(positive: Tensor, theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """Return P(r>0 | c), the relevance of an item with label c, where θ = P(c>0 | r>0, k) and ζ = P(c>0 | r<=0, k).

        c > 0:  θβ / (θβ + ζ(1-β))        c = 0:  (1-θ)β / ((1-θ)β + (1-ζ)(1-β))

    Without trust (ζ = 0) a positive label means relevance. The model of β is regressed on this probability.
    """
    given_positive = quotient(theta * beta, theta * beta + zeta * (1 - beta))
    missed = (1 - theta) * beta
    return torch.where(positive, given_positive, quotient(missed, missed + (1 - zeta) * (1 - beta)))


def item_log_likelihood(positive: Tensor, theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """Return the log-likelihood by item: log P(c>0) if the label is positive, else log P(c=0); P(c>0) = θβ + ζ(1-β)."""
    above = theta * beta + zeta * (1 - beta)
    below = (1 - theta) * beta + (1 - zeta) * (1 - beta)
    return torch.where(positive, above, below).clamp(min=torch.finfo(above.dtype).tiny).log()


# --- A pair, as in the paper (CIKM 2022) --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PairModel:
    """The parameters of pairs (i, j): examination θ_i and θ_j, trust ε⁺ and ε⁻, preference γ_ij, relevance β_i."""

    theta_i: Tensor
    theta_j: Tensor
    plus: Tensor
    minus: Tensor
    gamma: Tensor
    beta_i: Tensor


@dataclass(frozen=True, eq=False)
class PairPosterior:
    """The probability of each hidden state of a pair, given its labels (Figure 1 of the CIKM 2022 paper).

    Given c_i > c_j: `right` A1 = P(e=11, r_i>r_j), `wrong` A2 = P(e=11, r_i<=r_j), `alone` A3 = P(e=10, r_i>0).
    Given c_i <= c_j: `agreed` B1 = P(e=11, r_i<=r_j), `reversed_` B2 = P(e=11, r_i>r_j), `lone_irrelevant`
    B3 = P(e=10, r_i<=0), `unexamined` B4 = P(e_i=0).
    """

    right: Tensor
    wrong: Tensor
    alone: Tensor
    agreed: Tensor
    reversed_: Tensor
    lone_irrelevant: Tensor
    unexamined: Tensor


def _pair_terms(p: PairModel) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the terms whose sums are P(c_i>c_j) (Eq. 13) and P(c_i<=c_j), one for each hidden state."""
    both, alone = p.theta_i * p.theta_j, p.theta_i * (1 - p.theta_j)
    above = both * p.plus * p.gamma, both * p.minus * (1 - p.gamma), alone * p.beta_i
    below = (
        both * (1 - p.minus) * (1 - p.gamma),
        both * (1 - p.plus) * p.gamma,
        alone * (1 - p.beta_i),
        (1 - p.theta_i).expand_as(both),
    )
    return above, below


def pair_probability(pair: PairModel) -> Tensor:
    """Return P⁺ = P(c_i>c_j) = θ_i θ_j (ε⁺ γ + ε⁻ (1-γ)) + θ_i (1-θ_j) β_i  (Eq. 13)."""
    above, _ = _pair_terms(pair)
    return above[0] + above[1] + above[2]


def pair_log_likelihood(preferred: Tensor, pair: PairModel) -> Tensor:
    """Return the log-likelihood by pair: log P⁺ where c_i > c_j (`preferred`), else log(1 - P⁺)."""
    above, below = _pair_terms(pair)
    chosen = torch.where(preferred, above[0] + above[1] + above[2], below[0] + below[1] + below[2] + below[3])
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()


def pair_posterior(pair: PairModel) -> PairPosterior:
    """Return the probability of each hidden state given the labels (E-step): its term over the sum of the terms."""
    above, below = _pair_terms(pair)
    total_above, total_below = above[0] + above[1] + above[2], below[0] + below[1] + below[2] + below[3]
    given_above = [quotient(term, total_above) for term in above]
    given_below = [quotient(term, total_below) for term in below]
    return PairPosterior(*given_above, *given_below)


def drawn_states(posterior: PairPosterior) -> PairPosterior:
    """Draw the hidden state of each pair from its posterior; the drawn state is 1 and the others are 0."""
    u = torch.rand_like(posterior.right)

    def states(*chances: Tensor) -> list[Tensor]:
        ends = torch.stack(chances).cumsum(0)
        ends[-1] = 1  # rounding may not reach it
        starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return [*((starts <= u) & (u < ends)).to(u.dtype)]

    p = posterior
    above = states(p.right, p.wrong, p.alone)
    return PairPosterior(*above, *states(p.agreed, p.reversed_, p.lone_irrelevant, p.unexamined))


def preference_target(preferred: Tensor, gamma: Tensor, posterior: PairPosterior) -> Tensor:
    """Return P(r_i>r_j | labels), the target of the network g: A1 + γ A3 if c_i>c_j, else B2 + γ (1 - B1 - B2)."""
    unseen = posterior.lone_irrelevant + posterior.unexamined
    target = torch.where(preferred, posterior.right + gamma * posterior.alone, posterior.reversed_ + gamma * unseen)
    return target.clamp(max=1)  # rounding may exceed 1


def released_target(positive_j: Tensor, pair: PairModel, theta_minus_j: Tensor) -> Tensor:
    """Return the target of the network g in the code that the paper's authors released, for pairs with c_i > c_j.

    m_ij (Eq. 14) where c_j > 0, else (θ⁻_j ε⁺ γ + (1-θ⁻_j) β_i / 2) / (θ⁻_j q + (1-θ⁻_j) β_i),  q = ε⁺ γ + ε⁻ (1-γ)
    """
    right, wrong = pair.plus * pair.gamma, pair.minus * (1 - pair.gamma)
    alone = (1 - theta_minus_j) * pair.beta_i
    zero = quotient(theta_minus_j * right + 0.5 * alone, theta_minus_j * (right + wrong) + alone)
    return torch.where(positive_j, quotient(right, right + wrong), zero).clamp(max=1)


# --- Statistics and updates ---------------------------------------------------------------------------------------


def sums_by_cell(values: Tensor, cells: Tensor, size: int) -> Tensor:
    """Return sums [size] of values by the index of their cell, 0 to size - 1; `cells` has the shape of `values`."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(
        0, cells.reshape(-1), values.reshape(-1)
    )


def updated(numerator: Tensor, denominator: Tensor, previous: Tensor) -> Tensor:
    """Return the new values, numerator / denominator; a cell without data keeps its previous value."""
    return torch.where(denominator > 0, quotient(numerator, denominator), previous)


def examined_zero_terms(positive: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms, by item, of θ⁻_k = Σ [c=0] t / Σ [c=0]: the examined share of items with label 0 at k."""
    zero = (~positive).to(theta.dtype)
    return zero * examined_though_zero(theta, beta), zero


def trust_terms(preferred: Tensor, posterior: PairPosterior) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the terms, by pair, of the M-step of trust: numerator and denominator of ε⁺_ij, then of ε⁻_ij.

    ε⁺ = Σ [c_i>c_j] A1 / (Σ [c_i>c_j] A1 + Σ [c_i<=c_j] B2)
    ε⁻ = Σ [c_i>c_j] A2 / (Σ [c_i>c_j] A2 + Σ [c_i<=c_j] B1)
    """
    right, wrong = torch.where(preferred, posterior.right, 0.0), torch.where(preferred, posterior.wrong, 0.0)
    return (
        right,
        right + torch.where(preferred, 0.0, posterior.reversed_),
        wrong,
        wrong + torch.where(preferred, 0.0, posterior.agreed),
    )


def scoring_terms(positive: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms, by item, of Fisher's scoring, which is faster than EM: θ_k = Σ [c>0]/(1-θβ) / Σ β/(1-θβ)."""
    missed = ((1 - theta) + theta * (1 - beta)).clamp(min=1e-3)  # so that no single row dominates
    return positive.to(beta.dtype) / missed, beta / missed


# --- Weights of pairs ---------------------------------------------------------------------------------------------


def pair_trust(plus: Tensor, minus: Tensor, gamma: Tensor) -> Tensor:
    """Return m_ij = ε⁺ γ / (ε⁺ γ + ε⁻ (1-γ)): of examined pairs with c_i > c_j, the share with r_i > r_j (Eq. 14)."""
    return quotient(plus * gamma, plus * gamma + minus * (1 - gamma))


def pair_examined(examined: Tensor, plus: Tensor, minus: Tensor, gamma: Tensor, beta_i: Tensor) -> Tensor:
    """Return h_ij = θ⁻_j q / (θ⁻_j q + (1-θ⁻_j) β_i), q = ε⁺ γ + ε⁻ (1-γ): P(both examined) if c_j = 0 (Eq. 16)."""
    both = examined * (plus * gamma + minus * (1 - gamma))
    return quotient(both, both + (1 - examined) * beta_i)


def paper_weights(positive_j: Tensor, theta_i: Tensor, theta_j: Tensor, examined_pair: Tensor) -> Tensor:
    """Return the weight w_ij = [1 where c_j > 0, else h_ij] / (θ_i θ_j) of pairs with c_i > c_j (Eqs. 10, 17)."""
    return quotient(torch.where(positive_j, 1.0, examined_pair), theta_i * theta_j)


def exact_above(theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """Return a = P(r>0 | c>0) / θ, the factor of the upper item of a pair: [c>0] a has mean β. Without trust it is 1/θ.

    With a_i and b_j of `exact_below`, Σ over c_i>c_j of a_i b_j L_ij has mean Σ γ_ij L_ij for any loss L_ij, if
    P(c>0) = θ β + ζ (1-β) and the size of a positive label does not depend on position or on whether r > 0.
    """
    return quotient(torch.ones_like(theta), theta + zeta * (1 - beta) / beta.clamp(min=1e-30))


def exact_below(positive: Tensor, theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """Return b, the factor of the lower item of a pair: a if c > 0, else P(r<=0 | c=0) / (1-ζ): [c=0] b has mean 1-β.

    Without trust it is (1-β) / (1-θβ) = t/θ <= 1 if c = 0: c_i > c_j then only means c_i > 0, and t is all that is
    known about the examination of j.
    """
    zero = quotient(1 - beta, (1 - theta) * beta + (1 - zeta) * (1 - beta))
    return torch.where(positive, exact_above(theta, beta, zeta), zero)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient of two tensors, and 0 where both are 0."""
    return numerator / torch.where(denominator > 0, denominator, 1.0)
