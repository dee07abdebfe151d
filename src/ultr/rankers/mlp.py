"""A multi-layer perceptron; by default 512-256-128 with ELU, as in the paper of `pairwise-em` (CIKM 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ultr.errors import OptionError
from ultr.rankers.dropout import Dropout
from ultr.rankers.encoder import EncodedRanker, FeatureEncoder
from ultr.utils.arguments import checked

Norm = Literal["none", "layer"]


class MLPRanker(EncodedRanker):
    """A ranker of hidden layers with ELU, optionally layer normalisation and dropout, and linear outputs.

    With `separate`, each output has hidden layers of its own. There is no batch normalisation, because the score of an
    item must not depend on its batch.
    """

    @checked
    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        hidden: Sequence[int] = (512, 256, 128),
        dropout: float = 0.0,
        norm: Norm = "none",
        separate: bool = False,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        if not len(hidden) or min(hidden) < 1:
            raise OptionError("'hidden' must have at least one layer, each with at least one unit", got=tuple(hidden))
        if not 0 <= dropout < 1:
            raise OptionError("'dropout' must be at least 0 and below 1", got=dropout)
        self.encoder = encoder
        sizes = (encoder.width, *hidden)
        self.layers: nn.Module
        if separate and outputs > 1:
            self.layers = _Parallel(_layers(sizes, 1, dropout, norm) for _ in range(outputs))
        else:
            self.layers = _layers(sizes, outputs, dropout, norm)

    def first_layers(self) -> dict[str, nn.Linear]:
        parts = range(len(self.layers)) if isinstance(self.layers, _Parallel) else ()
        names = [f"layers.{part}.0" for part in parts] or ["layers.0"]
        return {name: self.get_submodule(name) for name in names}  # type: ignore[misc]

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(self.encoder(features))
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs


def _layers(sizes: Sequence[int], outputs: int, dropout: float, norm: Norm) -> nn.Module:
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        layers.append(nn.Linear(size_in, size_out))
        if norm == "layer":
            layers.append(nn.LayerNorm(size_out))
        layers.append(nn.ELU())
        if dropout:
            layers.append(Dropout(dropout, size_out))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class _Parallel(nn.ModuleList):
    """Networks whose outputs, one each, stand next to each other."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([network(inputs) for network in self], dim=-1)
