"""A ranker that adds up the scores of other rankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

LINKS = ("identity", "log-sigmoid")


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a blend: weight · link(score + shift)."""

    ranker: nn.Module
    name: str  # of the kind of ranker: mlp, lightgbm, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of the ranker, if it is a network
    link: str = "identity"
    shift: float = 0.0
    weight: float = 1.0
    indicators: tuple[int, ...] | None = None  # features whose missing values a network recognises; None: takes none

    def __call__(self, features: Tensor) -> Tensor:
        score = self.ranker(features) + self.shift
        if self.link == "log-sigmoid":
            score = logsigmoid(score)
        return torch.as_tensor(self.weight * score)

    def to_json(self) -> dict[str, Any]:
        return {"ranker": self.name, "link": self.link, "shift": self.shift, "weight": self.weight}


class Blend(nn.Module):
    """A ranker whose score is the sum of its parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rankers = nn.ModuleList([part.ranker for part in parts])

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([part(features) for part in self.parts]).sum(0)
