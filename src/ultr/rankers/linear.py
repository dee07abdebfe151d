"""A ranker whose score is linear in the encoded features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ultr.rankers.encoder import EncodedRanker, FeatureEncoder


class LinearRanker(EncodedRanker):
    """A ranker with score = w · x + b of the encoded features."""

    def __init__(self, encoder: FeatureEncoder, *, outputs: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        self.output = nn.Linear(encoder.width, outputs)

    def first_layers(self) -> dict[str, nn.Linear]:
        return {"output": self.output}

    @torch.no_grad()
    def start_at(self, slopes: Tensor, constants: Tensor) -> None:
        """Start at outputs that are linear in the standardised numbers: slopes [outputs, numbers] and constants."""
        self.output.weight.zero_()
        self.output.weight[:, : slopes.shape[1]] = slopes
        self.output.bias.copy_(constants)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.encoder(features))
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
