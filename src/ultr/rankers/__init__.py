"""Rankers: modules from features [..., features] to scores [...]. They do not use positions or a bias model.

With several `outputs`, rankers return [..., outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import OptionError, nearest
from ultr.rankers.boosters import BOOSTERS
from ultr.rankers.feedback import Hurdle, Product, Synthesised
from ultr.rankers.networks import DeviceMask, Dropout, FeatureEncoder, GivenMask, Gumbel, LinearRanker, Masks, MLPRanker

__all__ = [
    "RANKERS",
    "DeviceMask",
    "Dropout",
    "FeatureEncoder",
    "GivenMask",
    "Gumbel",
    "Hurdle",
    "LinearRanker",
    "MLPRanker",
    "Masks",
    "Product",
    "Synthesised",
    "WithConstants",
    "fit_encoders",
    "make_ranker",
    "score_rows",
]

RANKERS: dict[str, Callable[..., nn.Module]] = {"linear": LinearRanker, "mlp": MLPRanker}


def make_ranker(name: str, encoder: FeatureEncoder, **options: Any) -> nn.Module:
    """Make the network ranker that has this name in the table `RANKERS`."""
    if name not in RANKERS:
        raise OptionError(f"no ranker '{name}'", hint=nearest(name, [*RANKERS, *BOOSTERS]))
    try:
        return RANKERS[name](encoder, **options)
    except TypeError as error:
        what = f"ranker '{name}' does not accept these options ({error})"
        raise OptionError(what, got=", ".join(options)) from error


def fit_encoders(module: nn.Module, features: np.ndarray) -> None:
    """Fit every feature encoder of a module to features [rows, features]."""
    fitted: dict[tuple[int, ...], FeatureEncoder] = {}  # by the features that they standardise
    for encoder in module.modules():
        if isinstance(encoder, FeatureEncoder):
            alike = fitted.setdefault(tuple(encoder.numeric.tolist()), encoder)
            if alike is encoder:
                encoder.fit(features)
            else:
                encoder.mean.copy_(alike.mean)
                encoder.inverse_deviation.copy_(alike.inverse_deviation)


class WithConstants(nn.Module):
    """A ranker whose last inputs are fixed to constants, so that serving needs only the features."""

    constants: Tensor

    def __init__(self, ranker: nn.Module, constants: Tensor) -> None:
        super().__init__()
        self.ranker = ranker
        self.register_buffer("constants", constants)

    def forward(self, features: Tensor) -> Tensor:
        constants = self.constants.expand(*features.shape[:-1], len(self.constants))
        scores: Tensor = self.ranker(torch.cat([features, constants], dim=-1))
        return scores


def score_rows(
    score: Callable[[Tensor], Tensor],
    features: np.ndarray | Tensor,
    *,
    device: torch.device | str = "cpu",
    block: int = 1 << 15,
) -> np.ndarray:
    """Return scores [rows] of features [rows, features], computed in blocks; [rows, outputs] with several outputs."""
    return scores_on_device(score, features, device=device, block=block).cpu().numpy()


@torch.no_grad()
def scores_on_device(
    score: Callable[[Tensor], Tensor],
    features: np.ndarray | Tensor,
    *,
    device: torch.device | str = "cpu",
    block: int = 1 << 15,
) -> Tensor:
    """Return the scores of `score_rows` as a tensor that stays on the device."""
    scores = []
    for first in range(0, max(1, len(features)), block):
        rows = features[first : first + block]
        rows = rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))
        scores.append(score(rows.to(device)).float())
    return torch.cat(scores)
