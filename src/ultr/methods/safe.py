"""Safe counterfactual learning: rankers that leave the logged ranking only as far as the feedback supports it.

Gupta, Oosterhuis and de Rijke bound the risk by the divergence of exposure (2023, "Safe deployment for counterfactual
learning to rank with exposure-based risk minimization"), or clip the gain of each item (2024, "Practical and robust
safety guarantees for advanced counterfactual learning to rank": PRPO). The logged ranking is the order of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import MethodInputs, at_least, whole
from ultr.methods.plackett_luce import PlackettLuce, PLRank, gains_at, mean_gain
from ultr.methods.position_model import LEAST_THETA, means_of_all

CLIP = 2.0  # default of ε⁺
DELTA = 0.05  # the bound holds with probability 1 - δ


def probability(text: str) -> float:
    """Parse the option `delta`: a number above 0 and below 1."""
    value = at_least("delta", 0)(text)
    if not 0 < value < 1:
        raise OptionError("'delta' must be above 0 and below 1", got=f"'{text}'")
    return value


class PRPO(PLRank):
    """Maximise E[Σ_i f(D(rank_i)/D⁰_i, D⁰_i c_i/θ_k)]: proximal ranking policy optimisation.

        f(x, r) = min(x, ε⁺) r  if r >= 0,  else max(x, ε⁻) r

    D⁰_i is the discount of item i in the logged ranking. ε⁺ is `clip`, and ε⁻ = 1/ε⁺. An item gains nothing more if its
    discount exceeds ε⁺ times the logged one, whatever its feedback. With `clip=1` no ranking is better than the logged
    one; a large `clip` gives `pl-rank`. An item that was logged below the cut-off never gains.

    The paper applies f to any estimate r; here it is that of IPW.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {**PLRank.OPTIONS, "clip": at_least("clip", 1)}

    def __init__(self, inputs: MethodInputs, *, clip: float = CLIP, **options: Any) -> None:
        super().__init__(inputs, **options)
        self.clip = clip

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        discounts, values = self.discounts(lists)[..., None, :], self.item_values(lists)[..., None]
        logged = self.logged_discounts(lists)[..., None]
        above, below = torch.minimum(discounts, self.clip * logged), torch.maximum(discounts, logged / self.clip)
        gains = torch.where(values >= 0, above, below) * values
        return gains, mean_gain(gains, ranks, lists)


class SafeIPW(PlackettLuce):
    """Maximise a lower bound of utility, which holds with probability 1 - δ if N requests were logged:

        Σ_i ω_i c_i/θ_k  -  sqrt(Z/N · (1-δ)/δ · d₂)         d₂ = Σ_i (ω_i/ω⁰_i)² ω⁰_i/Z,    Z = Σ_i ω⁰_i

    with means over requests of the first sum and of Z d₂. ω_i = E[D(rank_i)] is the exposure of item i by the learned
    policy, and ω⁰_i = D(logged rank) that of the logged ranking. d₂ is 1 if both are the same and larger otherwise.

    The bound is that of the paper if the discount D is θ (`discount=theta`). The default is that of DCG, for which the
    penalty is the same function of the exposure by DCG, without the guarantee. Each ω_i of a sample's gradient is the
    mean over the other samples, so that the gradient of d₂ is unbiased. N is the number of logged requests, or of
    simulated sessions; 1 before `estimate_bias`.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        **PlackettLuce.OPTIONS,
        "samples": whole("samples", 2),
        "delta": probability,
    }
    logged_requests: Tensor

    def __init__(self, inputs: MethodInputs, *, delta: float = DELTA, **options: Any) -> None:
        super().__init__(inputs, **options)
        self.delta = delta
        self.register_buffer("logged_requests", torch.ones(()))

    def estimate_bias(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        super().estimate_bias(log, user=user, sessions=sessions, seed=seed)
        logged = len(log) if log.weights is None else float(log.weights.sum())
        self.logged_requests.fill_(logged if user is None else sessions)

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        discounts, values = self.discounts(lists)[..., None, :], self.item_values(lists)
        logged = self.logged_discounts(lists).clamp(min=LEAST_THETA)
        exposure, samples = gains_at(discounts, ranks), len(ranks)
        exposure = torch.where(lists.where, exposure, 0.0)
        others = (exposure.sum(0) - exposure) / (samples - 1)
        spread = (exposure * others / logged).mean(0).sum(-1)  # Z d₂, unbiased because samples are independent
        weights = lists.weights
        (mean,) = means_of_all(((weights * spread).sum().view(1), weights))
        factor = (1 - self.delta) / (self.delta * self.logged_requests)
        mean = mean[0]
        slope = torch.sqrt(factor / mean.clamp(min=1e-9))
        gains = discounts * (values - slope * others / logged)[..., None]
        utility = mean_gain(discounts * values[..., None], ranks, lists)
        return gains, utility - torch.sqrt(factor * mean.clamp(min=0))
