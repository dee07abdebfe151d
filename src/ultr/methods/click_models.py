"""Click models as rankers: the network learns the attraction of items by the exact likelihood of the clicks of lists.

Cascade (Craswell et al. 2008), the user browsing model (Dupret & Piwowarski 2008), the dynamic Bayesian network and its
simplified form (Chapelle & Zhang 2009), the dependent click model and the click chain model (both Guo et al. 2009). In
these papers the attraction of each document of a query is a parameter, and all is fitted by EM. Here it is a function
of features, and all parameters are learned together by gradients of the likelihood. `ultr.bias.click_models` has the
equations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.bias.click_models import conditional_log_likelihood, log_examination, make_click_model
from ultr.lists import Lists
from ultr.methods.base import (
    ClickMethod,
    MethodInputs,
    PositionIndex,
    PositionTable,
    at_least_single,
    sortable_positions,
)
from ultr.methods.losses import reduced
from ultr.methods.position_model import numbers
from ultr.rankers import Product

LEAST_REPORTED = 1e-5  # examination in a report is at least this, as propensities are above zero


class ClickModelMethod(ClickMethod):
    """The loss is -log P(clicks of the list), with logits of items from the ranker.

    A model with attraction a and satisfaction s has a network with two outputs, and the score log(a s). A model with
    attraction alone has the score logit(a).
    """

    LEARNS_ALONE = True
    MODEL: ClassVar[str]

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__(inputs)
        self.index = PositionIndex(inputs.positions)
        self.model = make_click_model(self.MODEL, len(self.index))
        self.own = PositionTable(self.model.size) if self.model.size else None
        if self.model.OUTPUTS == 2:
            self.ranker = Product(inputs.make_ranker(outputs=2))

    def _logits(self, features: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.ranker, Product):
            return tuple(map(at_least_single, self.ranker.outputs(features)))
        return (self.score(features),)

    def _in_order(self, lists: Lists) -> dict[str, Any]:
        """Return the arguments of the model's functions, with items in the order of their positions, then padding."""
        order = sortable_positions(lists).argsort(dim=-1, stable=True)
        place, logits = self.index(lists.shown_positions), self._logits(lists.features)
        return {
            "logits": tuple(each.gather(-1, order) for each in logits),
            "where": lists.where.gather(-1, order),
            "place": place.gather(-1, order),
            "parameters": logits[0].new_zeros(0) if self.own is None else self.own.values,
            "clicked": self.clicked(lists).gather(-1, order),
        }

    def loss(self, lists: Lists) -> Tensor:
        return reduced(-conditional_log_likelihood(self.model, **self._in_order(lists)).sum(-1), lists.weights)

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        """Return the model's parameters, and θ_k: the mean of P(examined) at position k over the rows of `batches`."""
        total = torch.zeros(2, len(self.index), device=self.index.ids.device, dtype=torch.float64)
        with self.without_dropout():
            for lists in batches:
                given = self._in_order(lists)
                given.pop("clicked")
                examined = log_examination(self.model, **given).exp()
                weights = (lists.weights[:, None] * given["where"]).double()
                terms = torch.stack([weights * examined, weights]).flatten(1)
                total.index_add_(1, given["place"].flatten(), terms)
        theta = (total[0] / total[1]).clamp(min=LEAST_REPORTED)
        return {
            "positions": self.index.ids.tolist(),
            "theta": [None if math.isnan(value) else value for value in numbers(theta)],
            "theta_from": f"the click model {self.MODEL}, together with the ranker: means of P(examined) over lists",
            "theta_scale": self._scale(),
            **self._own_report(),
            "warnings": [],
        }

    def _scale(self) -> str:
        return "1 at the first item of a list, as the model assumes"

    def _own_report(self) -> dict[str, Any]:
        if self.own is None:
            return {}
        named = self.model.named(self.own.values).items()
        return {name: numbers(values) if values.ndim else round(float(values), 5) for name, values in named}


class Cascade(ClickModelMethod):
    """The user reads down to the first click: P(c_k = 1 | no click above) = a(x_k).

        log-likelihood = Σ over items up to and including the first click of log a or log(1 - a)

    The model has one click per list at most. In lists with several clicks, items after the first click are not used,
    as is usual.
    """

    MODEL = "cascade"


class UBM(ClickModelMethod):
    """P(c_k = 1 | clicks above) = γ[k, k'] a(x_k), where k' is the position of the last click above k (0: none).

    γ is a table of logits. All start at 0, so that γ at first does not depend on k'.
    """

    MODEL = "ubm"

    def _scale(self) -> str:
        return "as the likelihood finds it, with little certainty: clicks determine mainly ratios"

    def _own_report(self) -> dict[str, Any]:
        """Return γ as rows by position k, each with the values for no click above and for the positions k' < k."""
        assert self.own is not None  # noqa: S101 - made in the constructor
        gamma = self.model.named(self.own.values)["gamma"]
        return {"gamma": [numbers(row[: k + 1]) for k, row in enumerate(gamma)]}


class DCM(ClickModelMethod):
    """A user examines the next item after no click, and after a click at position k with probability λ_k.

    λ is a learned number for each position. The score is the attraction alone: satisfaction depends on position only.
    """

    MODEL = "dcm"


class SDBN(ClickModelMethod):
    """A user examines the next item after no click, and after a click with probability 1 - s(x): DBN with γ = 1.

    Items above and at the last click are examined for certain. The likelihood of no click below the last click sums
    over both cases of satisfaction.
    """

    MODEL = "sdbn"


class DBN(ClickModelMethod):
    """A user examines the next item with probability γ after no click, and with γ (1 - s(x)) after a click.

    γ is one learned number. Below the last click, examination is not observed: the likelihood sums over all positions
    at which the user may have left.
    """

    MODEL = "dbn"


class CCM(ClickModelMethod):
    """A user goes on with probability α_1 after no click, and with α_2 (1 - a(x)) + α_3 a(x) after a click.

    The relevance of the paper is a(x): it is the probability both of a click and of satisfaction. α_1 to α_3 are
    learned numbers. The paper has a posterior distribution of a; here it is a function of features.
    """

    MODEL = "ccm"
