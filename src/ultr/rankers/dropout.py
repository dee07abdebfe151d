"""Dropout and Gumbel noise that do not depend on how a batch is divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ultr.lists import Part
from ultr.utils.noise import Noise

LEVELS = 1 << 16  # 16 random bits decide whether a value is dropped
LEAST = 2.0**-25  # a uniform number of 0 is replaced by this one, because its logarithm must be finite


def _below(keep: float) -> int:
    """Return the number of the levels at which a value is kept."""
    return max(1, round(keep * LEVELS))


def _kept(generator: np.random.Generator, below: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.integers(0, LEVELS, shape, dtype=np.uint16) < below)


class Masks:
    """The dropout masks of one training step on the CPU: each part of a batch has its own NumPy generator and seed.

    NumPy's generators are several times as fast as torch's.
    """

    def __init__(self, parts: Sequence[Part], seeds: Sequence[int]) -> None:
        self._parts = parts
        self._generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seeds]

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length, ...]: 1/keep with probability `keep`, else 0; 0 for padding."""
        below = _below(keep)
        kept, first = torch.zeros(like.shape, dtype=torch.bool), 0
        for part, generator in zip(self._parts, self._generators, strict=True):
            of_part = _kept(generator, below, (part.requests, part.longest, *like.shape[2:]))
            kept[first : first + part.requests, : part.longest] = of_part
            first += part.requests
        return kept.to(like.dtype).mul_(LEVELS / below)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        """Draw uniform numbers [requests, length, units], at least 0 and below 1; 0.5 for padding."""
        numbers, first = torch.full((*where.shape, units), 0.5), 0
        for part, generator in zip(self._parts, self._generators, strict=True):
            drawn = generator.random((part.requests, part.longest, units), dtype=np.float32)
            numbers[first : first + part.requests, : part.longest] = torch.from_numpy(drawn)
            first += part.requests
        return numbers


class DeviceMask:
    """The dropout mask of one layer in one training step on a GPU; layers are numbered by `layer`."""

    def __init__(self, noise: Callable[[], Noise], layer: int) -> None:
        self._noise, self._layer = noise, layer

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values [requests, length] or [..., units]: 1/keep with probability `keep`, else 0."""
        return self._noise().kept(keep, *like.shape[2:], mask=self._layer).to(like.dtype)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        """Draw uniform numbers [requests, length, units] of this layer, above 0 and below 1."""
        return self._noise().uniforms(units, mask=self._layer)


class GivenMask:
    """A dropout mask, or uniform numbers in its place, that were drawn before."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def draw(self, like: Tensor, keep: float) -> Tensor:
        return self._mask.to(like.dtype)

    def uniform(self, where: Tensor, units: int) -> Tensor:
        return self._mask


class _Draws:
    """Dropout masks from a generator of NumPy."""

    def draw(self, like: Tensor, keep: float) -> Tensor:
        """Draw a mask for values of any shape: 1/keep with probability `keep`, else 0."""
        generator = np.random.Generator(np.random.SFC64(int(torch.randint(1 << 62, ()))))
        below = _below(keep)
        return _kept(generator, below, tuple(like.shape)).to(like.dtype).mul_(LEVELS / below)


class Dropout(nn.Dropout):
    """Dropout as in `torch.nn.Dropout`, but with the given `masks` in training if they are set.

    With masks, values are [requests, length, units], or [requests, length] if `units` is 0. Without masks on a CPU, a
    generator of NumPy draws them, with a seed from torch's.
    """

    def __init__(self, p: float = 0.5, units: int = 0) -> None:
        super().__init__(p)
        self.units = units

    masks: Masks | DeviceMask | GivenMask | None = None

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.p or (self.masks is None and values.device.type != "cpu"):
            return super().forward(values)
        masks = _Draws() if self.masks is None else self.masks
        return values * masks.draw(values, 1 - self.p)

    def drawn(self, noise: Noise, layer: int) -> Tensor:
        """Draw the mask of this layer, whose number is `layer`, as `forward` does on a GPU."""
        return noise.kept(1 - self.p, *((self.units,) if self.units else ()), mask=layer)


class Gumbel(Dropout):
    """Standard Gumbel noise for each item of a list, from the random numbers of dropout; zero if not in training.

    An order by score plus noise is a draw from the Plackett-Luce model of the scores.
    """

    def __init__(self, samples: int) -> None:
        super().__init__(units=samples)

    def forward(self, where: Tensor) -> Tensor:
        """Return noise [samples, requests, length] for lists with these items."""
        if not self.training:
            return torch.zeros((self.units, *where.shape), device=where.device)
        if self.masks is None:
            numbers = torch.rand((*where.shape, self.units), device=where.device)
        else:
            numbers = self.masks.uniform(where, self.units)
        return -torch.log(-torch.log(numbers.clamp(min=LEAST))).movedim(-1, 0)

    def drawn(self, noise: Noise, layer: int) -> Tensor:
        return noise.uniforms(self.units, mask=layer)
