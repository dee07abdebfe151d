"""A ranker that predicts several actions and scores by what the label makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ultr.labels import Label


class Synthesised(nn.Module):
    """score = Φ(predicted actions), with Φ the expression of the label.

    `ranker` has an output for each action of the label: the logit of one that is 0 or 1 (`binary`), otherwise the value
    in units of `scale`, through a softplus as actions are not negative.
    """

    scale: Tensor
    is_binary: Tensor

    def __init__(self, ranker: nn.Module, label: Label, binary: Sequence[str]) -> None:
        super().__init__()
        self.ranker, self.label = ranker, label
        self.binary = tuple(name for name in label.actions if name in binary)
        self.register_buffer("scale", torch.ones(len(label.actions)))
        is_binary = torch.tensor([name in self.binary for name in label.actions])
        self.register_buffer("is_binary", is_binary, persistent=False)

    def outputs(self, features: Tensor) -> Tensor:
        """What the network gives for each action: [..., actions]."""
        found: Tensor = self.ranker(features)
        return found if len(self.scale) > 1 else found[..., None]

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.outputs(features)
        predicted = torch.where(self.is_binary, outputs.sigmoid(), self.scale * softplus(outputs))
        scores: Tensor = self.label(dict(zip(self.label.actions, predicted.unbind(-1), strict=True)), check=False)
        return scores
