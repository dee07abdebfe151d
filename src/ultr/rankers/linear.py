"""The simplest ranker."""

from __future__ import annotations

from torch import Tensor, nn

from ultr.rankers.encoder import FeatureEncoder


class LinearRanker(nn.Module):
    """score = w · x + b of the encoded features."""

    def __init__(self, encoder: FeatureEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.output = nn.Linear(encoder.width, 1)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.output(self.encoder(features)).squeeze(-1)
        return scores
