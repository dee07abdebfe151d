"""A ranker that predicts whether there is feedback, and how much: its score is the product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST_LOG_VALUE = 10.0  # largest |log μ|


class Hurdle(nn.Module):
    """A ranker with score = β(x) μ(x), from a network with two outputs: the logit of β and the log of μ."""

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__()
        self.ranker = ranker

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logit of β and the log of μ of each item."""
        outputs: Tensor = self.ranker(features)
        return outputs[..., 0], outputs[..., 1].clamp(-LARGEST_LOG_VALUE, LARGEST_LOG_VALUE)

    def forward(self, features: Tensor) -> Tensor:
        logit, log_value = self.outputs(features)
        return torch.sigmoid(logit) * log_value.exp()
