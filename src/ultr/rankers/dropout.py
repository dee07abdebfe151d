"""Dropout that does not depend on how a batch is divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ultr.lists import Part
from ultr.utils.noise import Noise

LEVELS = 1 << 16  # 16 random bits decide whether a value is dropped


class Masks:
    """The dropout masks of one training step on the CPU: each part of a batch has its own NumPy generator and seed.

    NumPy's generators are several times as fast as torch's.
    """

    def __init__(self, parts: Sequence[Part], seeds: Sequence[int]) -> None:
        self._parts = parts
        self._generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seeds]

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length, ...]: 1/keep with probability `keep`, else 0; 0 for padding."""
        below = max(1, round(keep * LEVELS))
        kept, first = torch.zeros(like.shape, dtype=torch.bool), 0
        for part, generator in zip(self._parts, self._generators, strict=True):
            levels = generator.integers(0, LEVELS, (part.requests, part.longest, *like.shape[2:]), dtype=np.uint16)
            kept[first : first + part.requests, : part.longest] = torch.from_numpy(levels < below)
            first += part.requests
        return kept.to(like.dtype).mul_(LEVELS / below)


class DeviceMask:
    """The dropout mask of one layer in one training step on a GPU; layers are numbered by `layer`."""

    def __init__(self, noise: Callable[[], Noise], layer: int) -> None:
        self._noise, self._layer = noise, layer

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length] or [..., units]: 1/keep with probability `keep`, else 0."""
        return self._noise().kept(keep, *like.shape[2:], mask=self._layer).to(like.dtype)


class GivenMask:
    """A dropout mask that was drawn before."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def draw(self, like: Tensor, keep: float) -> Tensor:
        return self._mask.to(like.dtype)


class Dropout(nn.Dropout):
    """Dropout as in `torch.nn.Dropout`, but with the given `masks` in training if they are set.

    Values are [requests, length, units], or [requests, length] if `units` is 0.
    """

    def __init__(self, p: float = 0.5, units: int = 0) -> None:
        super().__init__(p)
        self.units = units

    masks: Masks | DeviceMask | GivenMask | None = None

    def forward(self, values: Tensor) -> Tensor:
        if self.masks is None or not self.training or not self.p:
            return super().forward(values)
        return values * self.masks.draw(values, 1 - self.p)
