"""A multi-layer perceptron; by default 512-256-128 with ELU, as in the paper of `pairwise-em` (CIKM 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from ultr.errors import OptionError
from ultr.rankers.dropout import Dropout
from ultr.rankers.encoder import FeatureEncoder
from ultr.utils.arguments import checked

Norm = Literal["none", "layer"]


class MLPRanker(nn.Module):
    """A ranker of hidden layers with ELU, optionally layer normalisation and dropout, and linear outputs.

    There is no batch normalisation, because the score of an item must not depend on its batch.
    """

    @checked
    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        hidden: Sequence[int] = (512, 256, 128),
        dropout: float = 0.0,
        norm: Norm = "none",
        outputs: int = 1,
    ) -> None:
        super().__init__()
        if not len(hidden) or min(hidden) < 1:
            raise OptionError("'hidden' must have at least one layer, each with at least one unit", got=tuple(hidden))
        if not 0 <= dropout < 1:
            raise OptionError("'dropout' must be at least 0 and below 1", got=dropout)
        self.encoder = encoder
        layers: list[nn.Module] = []
        for size_in, size_out in zip((encoder.width, *hidden[:-1]), hidden, strict=True):
            layers.append(nn.Linear(size_in, size_out))
            if norm == "layer":
                layers.append(nn.LayerNorm(size_out))
            layers.append(nn.ELU())
            if dropout:
                layers.append(Dropout(dropout, size_out))
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(self.encoder(features))
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
