"""A bias model that knows simulated users, for experiments: what a method would gain from perfect estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.methods.base import MethodInputs
from ultr.methods.bias_model import BiasModel

MARGIN = 10.0  # difference of g between neighbouring grades, so that γ is nearly 0 or 1


def with_known_theta(inputs: MethodInputs, option: str) -> MethodInputs:
    """Return the inputs of a method with the true θ of simulated users as known propensities."""
    if inputs.user is None:
        raise OptionError(f"{option} needs simulated users", hint="pass --users pbm, or another value")
    theta = inputs.user.theta(torch.tensor(inputs.positions)).tolist()
    return replace(inputs, propensities=dict(zip(inputs.positions, theta, strict=True)))


class OracleModel(BiasModel):
    """The true θ by position, and the true β and μ by grade. ε⁺, ε⁻ and θ⁻ are estimated from these, as by EM."""

    by_grade: Tensor

    def __init__(self, inputs: MethodInputs, **options: Any) -> None:
        known = with_known_theta(inputs, "em=oracle")
        super().__init__(known, **options)
        assert known.user is not None  # noqa: S101 - checked by with_known_theta
        user = known.user
        self.network = nn.Identity()
        grades = torch.arange(user.max_grade + 1.0)
        value = user.value_of_click(grades, torch.ones_like(grades, dtype=torch.int64), inputs.label)
        outputs = user.attracted(grades).logit(), value.clamp(min=1e-6).log(), MARGIN * grades
        self.register_buffer("by_grade", torch.stack(outputs, -1))

    def of_lists(self, lists: Lists) -> tuple[Tensor, Tensor, Tensor]:
        logit, log_value, preference = self.by_grade[lists.true_relevance.long()].unbind(-1)
        return logit, log_value, preference

    def loss(self, lists: Lists) -> Tensor:
        return torch.zeros((), device=lists.features.device)  # there is nothing to learn by gradients
