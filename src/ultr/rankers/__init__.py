"""Rankers: modules from features [..., features] to scores [...]. They know nothing of positions and bias.

Asked for several `outputs`, they give [..., outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import OptionError, nearest
from ultr.rankers.boosters import BOOSTERS
from ultr.rankers.dropout import Dropout, Masks
from ultr.rankers.encoder import FeatureEncoder
from ultr.rankers.linear import LinearRanker
from ultr.rankers.mlp import MLPRanker
from ultr.rankers.synthesised import Synthesised

__all__ = [
    "RANKERS",
    "Dropout",
    "FeatureEncoder",
    "LinearRanker",
    "MLPRanker",
    "Masks",
    "Synthesised",
    "WithConstants",
    "make_ranker",
    "score_rows",
]

RANKERS: dict[str, Callable[..., nn.Module]] = {"linear": LinearRanker, "mlp": MLPRanker}


def make_ranker(name: str, encoder: FeatureEncoder, **options: Any) -> nn.Module:
    """A ranker by its name in the table `RANKERS`."""
    if name not in RANKERS:
        raise OptionError(f"no ranker '{name}'", mend=nearest(name, [*RANKERS, *BOOSTERS]))
    try:
        return RANKERS[name](encoder, **options)
    except TypeError as error:
        raise OptionError(f"ranker '{name}' does not take these options ({error})", got=", ".join(options)) from error


class WithConstants(nn.Module):
    """A ranker some of whose inputs are fixed when it serves."""

    constants: Tensor

    def __init__(self, ranker: nn.Module, constants: Tensor) -> None:
        super().__init__()
        self.ranker = ranker
        self.register_buffer("constants", constants)

    def forward(self, features: Tensor) -> Tensor:
        beside = self.constants.expand(*features.shape[:-1], len(self.constants))
        scores: Tensor = self.ranker(torch.cat([features, beside], dim=-1))
        return scores


@torch.no_grad()
def score_rows(
    score: Callable[[Tensor], Tensor], features: np.ndarray, *, device: torch.device | str = "cpu", block: int = 1 << 15
) -> np.ndarray:
    """Scores of rows, block by block; of several outputs each, if the ranker has them."""
    scores = []
    for first in range(0, max(1, len(features)), block):
        rows = torch.from_numpy(np.array(features[first : first + block])).to(device)
        scores.append(score(rows).float().cpu().numpy())
    return np.concatenate(scores)
