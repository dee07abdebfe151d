"""Regression-based EM (Wang et al. 2018): examination by position and relevance by features explain the clicks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.bias.equations import relevance_posterior, updated
from ultr.bias.estimators import SCALE
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.methods.base import ClickMethod, MethodInputs, one_of
from ultr.methods.losses import logistic_loss
from ultr.methods.position_model import PositionModel, means_of_all, scale_option, sums_in_cells

ULTRA_STEP = 0.05  # share of a batch in θ


class RegressionEM(ClickMethod):
    """P(click) = θ_k sigmoid(s(x)). The score s is regressed on the posterior of relevance; θ follows by EM.

    The target is 1 for a click, else (1-θ_k)β / (1-θ_k β) with β = sigmoid(s): `targets=soft`, or a draw with this
    probability (`sampled`), as in Wang et al. Examination θ is known, or is estimated together with s, with its largest
    value at `scale` because clicks do not determine it.

    `variant=ultra` follows the toolbox ULTRA, so that published numbers can be compared: targets=sampled, θ starts at
    0.9 and is not scaled, and each batch moves θ_k by 0.05 towards the mean of P(examined | c) at position k.
    """

    LEARNS_ALONE = True
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "targets": one_of("targets", "soft", "sampled"),
        "scale": scale_option,
        "variant": one_of("variant", "standard", "ultra"),
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        targets: str | None = None,
        scale: float | str | None = None,
        variant: str = "standard",
    ) -> None:
        super().__init__(inputs)
        self.ultra = variant == "ultra"
        if self.ultra and scale is not None:
            hint = "remove one of them"
            raise OptionError(
                "scale cannot be used with variant=ultra, which does not scale theta", got=scale, hint=hint
            )
        self.sampled = (targets or ("sampled" if self.ultra else "soft")) == "sampled"
        scale = SCALE if scale is None else scale
        fixed = None if scale == "estimated" else float(scale)
        self.positions = PositionModel(inputs, scale=fixed, theta_from="em" if self.ultra else "regression")

    @property
    def draws(self) -> bool:
        return self.sampled

    @torch.no_grad()
    def update(self, lists: Lists) -> None:
        if self.positions.theta_from == "known":
            return
        with self.without_dropout():
            beta = self.score(lists.features).sigmoid()
        self.positions.updates += 1
        place, weights = self.positions.index(lists.shown_positions), lists.weights[:, None] * lists.where
        terms = self.positions.theta_terms(self.clicked(lists), place, beta)
        (means,) = means_of_all((sums_in_cells(terms, place, weights, len(self.positions.index)), weights))
        if self.ultra:
            shown, _, examined, _ = means
            theta = torch.lerp(self.positions.theta, updated(examined, shown, self.positions.theta), ULTRA_STEP)
            self.positions.moved.copy_((theta / self.positions.theta - 1).abs().max())
            self.positions.theta.copy_(theta)
        else:
            self.positions.regress(means)

    def loss(self, lists: Lists) -> Tensor:
        logits = self.score(lists.features)
        theta = self.positions.theta[self.positions.index(lists.shown_positions)]
        with torch.no_grad():
            targets = relevance_posterior(self.clicked(lists), theta, logits.sigmoid())
            targets = torch.bernoulli(targets) if self.sampled else targets
        return logistic_loss(logits, targets, where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self.positions.report()
