"""Examination and trust: posteriors (E-step), statistics and updates (M-step), and the pair weights that follow.

Pure functions on tensors that broadcast. Notation, for an item i at position k and a pair (i, j):

    e_i, r_i    examined, and the value the user would find in it (hidden)      c_i >= 0   the label (seen)
    θ_k         P(e=1 | k)                                 β_i    P(r_i > 0 | x_i)
    t_i         P(e_i=1 | x_i, k, c_i=0)                   γ_ij   P(r_i > r_j | x_i, x_j)
    ε⁺_ij       P(c_i>c_j | both examined, r_i >  r_j)     κ_ij   P(r_i > r_j | both above zero)
    ε⁻_ij       P(c_i>c_j | both examined, r_i <= r_j)

Denominators are sums of their non-negative terms, so that nothing cancels where probabilities come near 0 or 1. What
has no support (0/0) comes out as 0, and a cell without data keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# --- One item -----------------------------------------------------------------------------------------------------


def examined_though_zero(theta: Tensor, beta: Tensor) -> Tensor:
    """The paper's t: P(e=1 | c=0) = θ(1-β) / (1-θβ)."""
    seen = theta * (1 - beta)
    return quotient(seen, (1 - theta) + seen)


def relevant_though_zero(theta: Tensor, beta: Tensor) -> Tensor:
    """P(r>0 | c=0) = P(e=0, r>0 | c=0) = (1-θ)β / (1-θβ) = (1-t)β."""
    return quotient((1 - theta) * beta, (1 - theta) + theta * (1 - beta))


def relevance_posterior(positive: Tensor, theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """P(r>0 | c), where θ = P(c>0 | r>0, k) and ζ = P(c>0 | r<=0, k) is clicks on trust alone.

        c > 0:  θβ / (θβ + ζ(1-β))        c = 0:  (1-θ)β / ((1-θ)β + (1-ζ)(1-β))

    Without trust (ζ = 0) a positive label means relevance, and this is the regression target of h.
    """
    given_positive = quotient(theta * beta, theta * beta + zeta * (1 - beta))
    missed = (1 - theta) * beta
    return torch.where(positive, given_positive, quotient(missed, missed + (1 - zeta) * (1 - beta)))


def item_log_likelihood(positive: Tensor, theta: Tensor, beta: Tensor, zeta: Tensor | float = 0.0) -> Tensor:
    """Log of P(c>0 or not), P(c>0) = θβ + ζ(1-β)."""
    above = theta * beta + zeta * (1 - beta)
    below = (1 - theta) * beta + (1 - zeta) * (1 - beta)
    return torch.where(positive, above, below).clamp(min=torch.finfo(above.dtype).tiny).log()


# --- A pair, as in the paper --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PairModel:
    """The parameters of a pair: θ_i, θ_j, ε⁺_ij, ε⁻_ij, γ_ij, β_i."""

    theta_i: Tensor
    theta_j: Tensor
    plus: Tensor
    minus: Tensor
    gamma: Tensor
    beta_i: Tensor


@dataclass(frozen=True, eq=False)
class PairPosterior:
    """What is hidden, given what was seen of a pair (the paper's Figure 1).

    Given c_i > c_j: `right` A1 = P(e=11, r_i>r_j), `wrong` A2 = P(e=11, r_i<=r_j), `alone` A3 = P(e=10, r_i>0).
    Given c_i <= c_j: `agreed` B1 = P(e=11, r_i<=r_j), `reversed_` B2 = P(e=11, r_i>r_j), B3 and B4 are the rest.
    """

    right: Tensor
    wrong: Tensor
    alone: Tensor
    agreed: Tensor
    reversed_: Tensor
    lone_irrelevant: Tensor
    unexamined: Tensor


def _pair_terms(p: PairModel) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The terms of P(c_i>c_j) (Eq. 13) and those of P(c_i<=c_j), each the joint probability of a hidden state."""
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
    """P⁺ = P(c_i>c_j) = θ_i θ_j (ε⁺ γ + ε⁻ (1-γ)) + θ_i (1-θ_j) β_i  (Eq. 13)."""
    above, _ = _pair_terms(pair)
    return above[0] + above[1] + above[2]


def pair_log_likelihood(preferred: Tensor, pair: PairModel) -> Tensor:
    """Log of P⁺ where c_i > c_j, else log(1 - P⁺)."""
    above, below = _pair_terms(pair)
    chosen = torch.where(preferred, above[0] + above[1] + above[2], below[0] + below[1] + below[2] + below[3])
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()


def pair_posterior(pair: PairModel) -> PairPosterior:
    """The E-step of a pair: each term over the sum of its kind."""
    above, below = _pair_terms(pair)
    total_above, total_below = above[0] + above[1] + above[2], below[0] + below[1] + below[2] + below[3]
    given_above = [quotient(term, total_above) for term in above]
    given_below = [quotient(term, total_below) for term in below]
    return PairPosterior(*given_above, *given_below)


def preference_target(preferred: Tensor, gamma: Tensor, posterior: PairPosterior) -> Tensor:
    """What g is regressed on: A1 + γ A3 where c_i > c_j, else B2 + γ (1 - B1 - B2)."""
    unseen = posterior.lone_irrelevant + posterior.unexamined
    target = torch.where(preferred, posterior.right + gamma * posterior.alone, posterior.reversed_ + gamma * unseen)
    return target.clamp(max=1)  # which rounding may pass


def released_target(positive_j: Tensor, pair: PairModel, theta_minus_j: Tensor) -> Tensor:
    """What the authors' released code regresses g on, for pairs with c_i > c_j.

    m_ij where c_j > 0, else (θ⁻_j ε⁺ γ + (1-θ⁻_j) β_i / 2) / (θ⁻_j q + (1-θ⁻_j) β_i),  q = ε⁺ γ + ε⁻ (1-γ)
    """
    right, wrong = pair.plus * pair.gamma, pair.minus * (1 - pair.gamma)
    alone = (1 - theta_minus_j) * pair.beta_i
    zero = quotient(theta_minus_j * right + 0.5 * alone, theta_minus_j * (right + wrong) + alone)
    return torch.where(positive_j, quotient(right, right + wrong), zero).clamp(max=1)


# --- A pair, coherently -------------------------------------------------------------------------------------------


def coherent_gamma(beta_i: Tensor, beta_j: Tensor, kappa: Tensor) -> Tensor:
    """γ_ij = β_i (1-β_j) + β_i β_j κ_ij: room for ties, and never above β_i."""
    return beta_i * ((1 - beta_j) + beta_j * kappa)


def coherent_preference(
    label_i: Tensor, label_j: Tensor, theta_i: Tensor, theta_j: Tensor, beta_i: Tensor, beta_j: Tensor, kappa: Tensor
) -> Tensor:
    """P(r_i > r_j | c_i, c_j) where c = e r: a positive label shows r, a zero hides it or is it.

    | c_i > 0, c_j > 0 | [c_i > c_j]                                |
    | c_i > 0, c_j = 0 | t_j + (1-t_j) γ_ij/β_i                     |
    | both 0           | (1-t_i) (t_j β_i + (1-t_j) γ_ij)           |
    | c_i = 0, c_j > 0 | (1-t_i) β_i κ_ij                           |
    """
    t_j = examined_though_zero(theta_j, beta_j)
    given_relevant = (1 - beta_j) + beta_j * kappa  # γ_ij / β_i
    i_only = t_j + (1 - t_j) * given_relevant
    hidden = relevant_though_zero(theta_i, beta_i)  # (1-t_i) β_i
    neither, j_only = hidden * i_only, hidden * kappa
    shown = (label_i > label_j).to(kappa.dtype)
    return torch.where(label_i > 0, torch.where(label_j > 0, shown, i_only), torch.where(label_j > 0, j_only, neither))


# --- Statistics and updates ---------------------------------------------------------------------------------------


def sums_by_cell(values: Tensor, cells: Tensor, size: int) -> Tensor:
    """The sums of values by the number of their cell, 0 to size - 1, for two tensors of one shape."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(
        0, cells.reshape(-1), values.reshape(-1)
    )


def updated(numerator: Tensor, denominator: Tensor, previous: Tensor) -> Tensor:
    """The new values, numerator / denominator; a cell without data keeps what it had."""
    return torch.where(denominator > 0, quotient(numerator, denominator), previous)


def theta_terms(positive: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The M-step of examination (EM with e hidden): θ_k = Σ ([c>0] + [c=0] t) / Σ 1."""
    seen = torch.where(positive, 1.0, examined_though_zero(theta, beta))
    return seen, torch.ones_like(seen)


def examined_zero_terms(positive: Tensor, theta: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """θ⁻_k = Σ [c=0] t / Σ [c=0]: how many of the zeros at k were examined. A figure to report."""
    zero = (~positive).to(theta.dtype)
    return zero * examined_though_zero(theta, beta), zero


def trust_terms(preferred: Tensor, posterior: PairPosterior) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The M-step of trust, as numerator and denominator of ε⁺_ij, then of ε⁻_ij.

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
    """Fisher's scoring, which has EM's fixed point and gets there in a few steps: θ_k = Σ [c>0]/(1-θβ) / Σ β/(1-θβ)."""
    missed = ((1 - theta) + theta * (1 - beta)).clamp(min=1e-3)  # no row decides alone
    return positive.to(beta.dtype) / missed, beta / missed


# --- Weights of pairs ---------------------------------------------------------------------------------------------


def pair_trust(plus: Tensor, minus: Tensor, gamma: Tensor) -> Tensor:
    """m_ij = ε⁺ γ / (ε⁺ γ + ε⁻ (1-γ)): the share of pairs seen in this order that are in it (Eq. 14)."""
    return quotient(plus * gamma, plus * gamma + minus * (1 - gamma))


def pair_examined(examined: Tensor, plus: Tensor, minus: Tensor, gamma: Tensor, beta_i: Tensor) -> Tensor:
    """h_ij = θ⁻_j q / (θ⁻_j q + (1-θ⁻_j) β_i), q = ε⁺ γ + ε⁻ (1-γ): both examined though c_j = 0 (Eq. 16)."""
    both = examined * (plus * gamma + minus * (1 - gamma))
    return quotient(both, both + (1 - examined) * beta_i)


def paper_weights(positive_j: Tensor, theta_i: Tensor, theta_j: Tensor, examined_pair: Tensor) -> Tensor:
    """w_ij = [1 where c_j > 0, else h_ij] / (θ_i θ_j), for pairs with c_i > c_j (Eqs. 10, 17)."""
    return quotient(torch.where(positive_j, 1.0, examined_pair), theta_i * theta_j)


def exact_weights(positive_j: Tensor, theta_i: Tensor, theta_j: Tensor, beta_j: Tensor) -> Tensor:
    """w_ij = 1/(θ_i θ_j) where c_j > 0, else t_j/(θ_i θ_j) = (1-β_j) / (θ_i (1-θ_j β_j)) <= 1/θ_i.

    As c_j = 0 makes c_i > c_j mean c_i > 0, nothing of the pair but t_j tells whether j was examined. In a
    position-based world Σ over c_i>c_j of w_ij L_ij then has mean Σ γ_ij L_ij.
    """
    zero = quotient(1 - beta_j, (1 - theta_j) + theta_j * (1 - beta_j))
    return quotient(torch.where(positive_j, quotient(torch.ones_like(theta_j), theta_j), zero), theta_i)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Of two tensors, and 0 where both vanish."""
    return numerator / torch.where(denominator > 0, denominator, 1.0)
