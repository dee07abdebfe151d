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
HIDDEN = (512, 256, 128)  # default units of the hidden layers


class MLPRanker(EncodedRanker):
    """A ranker of hidden layers with ELU, optionally layer normalisation and dropout, and linear outputs.

    If `separate` is true, each output has hidden layers of its own; if it is "first", only the first output has. With
    `skip`, a linear function of the inputs is added to the outputs; it is not trained, and zero until `start_at` sets
    it. There is no batch normalisation, because the score of an item must not depend on its batch.
    """

    @checked
    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        hidden: Sequence[int] = HIDDEN,
        dropout: float = 0.0,
        norm: Norm = "none",
        separate: bool | Literal["first"] = False,
        skip: bool = False,
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
        parts = [outputs]
        if separate and outputs > 1:
            parts = [1, outputs - 1] if separate == "first" else [1] * outputs
        networks = [_layers(sizes, part, dropout, norm) for part in parts]
        self.layers = networks[0] if len(networks) == 1 else _Parallel(networks)
        self.skip = nn.Linear(encoder.width, outputs, bias=False) if skip else None
        if self.skip is not None:
            nn.init.zeros_(self.skip.weight.requires_grad_(False))

    def first_layers(self) -> dict[str, nn.Linear]:
        parts = range(len(self.layers)) if isinstance(self.layers, _Parallel) else ()
        names = [f"layers.{part}.0" for part in parts] or ["layers.0"]
        names += ["skip"] if self.skip is not None else []
        return {name: self.get_submodule(name) for name in names}  # type: ignore[misc]

    @torch.no_grad()
    def start_at(self, slopes: Tensor, constants: Tensor) -> None:
        """Start at outputs that are linear in the standardised numbers: slopes [outputs, numbers] and constants."""
        if self.skip is None:
            raise ValueError("only a network with a skip can start at a linear function")
        self.skip.weight[:, : slopes.shape[1]] = slopes
        networks = self.layers if isinstance(self.layers, _Parallel) else [self.layers]
        lasts = [[layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1] for network in networks]
        first = 0
        for last in lasts:
            last.weight.zero_()
            last.bias.copy_(constants[first : first + last.out_features])
            first += last.out_features

    def anchor(self, features: Tensor) -> Tensor:
        """Return the linear function [..., outputs] that is added to the outputs; 0 without `skip`."""
        if self.skip is None:
            return features.new_zeros(*features.shape[:-1], 1)
        anchor: Tensor = self.skip(self.encoder(features))
        return anchor

    def forward(self, features: Tensor) -> Tensor:
        inputs = self.encoder(features)
        outputs: Tensor = self.layers(inputs)
        if self.skip is not None:
            outputs = outputs + self.skip(inputs)
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
    """Networks whose outputs stand next to each other."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([network(inputs) for network in self], dim=-1)
