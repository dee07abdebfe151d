"""Dropout that does not depend on how a batch is divided among processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ultr.lists import Part

LEVELS = 1 << 16  # 16 random bits decide whether a value is dropped


class Masks:
    """The dropout masks of one training step: each part of a batch has its own random generator and seed.

    On the CPU these are NumPy's generators, which are several times as fast as torch's.
    """

    def __init__(self, parts: Sequence[Part], seeds: Sequence[int], device: torch.device) -> None:
        self._parts, self._seeds = parts, seeds
        self._on_cpu = [np.random.Generator(np.random.SFC64(s)) for s in seeds] if device.type == "cpu" else []
        self._on_device = [torch.Generator(device).manual_seed(s) for s in seeds] if device.type != "cpu" else []

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length, ...]: 1/keep with probability `keep`, else 0; 0 for padding."""
        below = max(1, round(keep * LEVELS))
        kept, first = torch.zeros(like.shape, dtype=torch.bool, device=like.device), 0
        for number, part in enumerate(self._parts):
            shape = part.requests, part.longest, *like.shape[2:]
            kept[first : first + part.requests, : part.longest] = self._are_below(below, number, shape)
            first += part.requests
        return kept.to(like.dtype).mul_(LEVELS / below)

    def _are_below(self, level: int, number: int, shape: tuple[int, ...]) -> Tensor:
        if self._on_cpu:
            return torch.from_numpy(self._on_cpu[number].integers(0, LEVELS, shape, dtype=np.uint16) < level)
        generator = self._on_device[number]
        return torch.randint(0, LEVELS, shape, dtype=torch.int32, generator=generator, device=generator.device) < level


class Dropout(nn.Dropout):
    """Dropout as in `torch.nn.Dropout`, but with the given `masks` in training if they are set."""

    masks: Masks | None = None

    def forward(self, values: Tensor) -> Tensor:
        if self.masks is None or not self.training or not self.p:
            return super().forward(values)
        return values * self.masks.draw(values, 1 - self.p)
