"""Random numbers for training on a GPU: each depends only on a key and on its own place, not on numbers drawn before.

A generator that draws one number after another would have to be set to every step, and would give an item another
number if the batch is padded or divided differently. Here the number of an item is a hash of the key of the step, the
place of the item in the batch (SplitMix64, Steele 2014) and the number of the draw (a 32-bit mixer by C. Wellons).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # 32 bits
SLOTS, DRAWS = 1 << 20, 1 << 10  # most items of a list, and most draws of a `Noise`
FIRST_MASK = DRAWS // 2  # the first draws are for simulated users, the others for dropout
HASH_PLACES = """
template <typename T> T hash_places(T key, T place) {
    unsigned long long z = (unsigned long long)key + 0x9E3779B97F4A7C15ull * (unsigned long long)place;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (T)((z ^ (z >> 31)) >> 32);
}
"""
MIXED = """
template <typename T> T mixed(unsigned int cell, unsigned int draw) {
    unsigned int x = cell ^ (draw * 0x9E3779B9u);
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return ((float)(x >> 9) + 0.5f) * 1.1920928955078125e-07f;
}
"""  # cells and units of the next three are 32-bit words that are stored as floats, as a kernel has one type
UNIFORM = """
template <typename T> T uniform(T cell, T draw) {
    return mixed<T>(__float_as_uint(cell), (unsigned int)draw);
}
"""
UNIFORMS = """
template <typename T> T uniforms(T cell, T unit, T draw) {
    return mixed<T>(__float_as_uint(cell), __float_as_uint(unit) * 1024u + (unsigned int)draw);
}
"""
KEPT = """
template <typename T> T kept(T cell, T unit, T draw, T keep) {
    T number = mixed<T>(__float_as_uint(cell), __float_as_uint(unit) * 1024u + (unsigned int)draw);
    return number < keep ? 1.0f / keep : 0.0f;
}
"""


class Noise:
    """Random numbers for the items of a batch [requests, length].

    `key` is a tensor with a 64-bit seed. `rows` [requests] are the numbers of the requests in the whole batch. With
    keys [runs], the numbers [runs · requests, length] are those of several runs, one after another.
    """

    def __init__(self, key: Tensor, rows: Tensor, length: int) -> None:
        places = rows[:, None] * SLOTS + torch.arange(length, device=rows.device)
        if key.ndim:
            key = key[:, None].expand(len(key), len(rows)).reshape(-1, 1)
            places = places.repeat(len(key) // len(rows), 1)
        self._on_gpu, self._draws = rows.is_cuda, 0
        self._cells = _as_floats(_kernel(HASH_PLACES)(key, places)) if self._on_gpu else hash_places(key, places)

    def uniform(self) -> Tensor:
        """Draw uniform numbers [requests, length], above 0 and below 1, as float32."""
        self._draws += 1
        if self._on_gpu:
            return _kernel(MIXED + UNIFORM, draw=0.0)(self._cells, draw=self._draws)
        return uniform(self._cells, torch.tensor(self._draws))

    def normal(self) -> Tensor:
        """Draw standard normal numbers [requests, length]."""
        values: Tensor = torch.special.ndtri(self.uniform())
        return values

    def kept(self, keep: float, *units: int, mask: int) -> Tensor:
        """Draw the dropout mask number `mask` [requests, length, *units]: 1/keep with probability `keep`, else 0.

        There is at most one unit size.
        """
        draw, cells = FIRST_MASK + mask, self._cells[..., None] if units else self._cells
        numbers = _numbers(units[0] if units else 1, cells.device)
        if self._on_gpu:
            return _kernel(MIXED + KEPT, draw=0.0, keep=1.0)(cells, _as_floats(numbers), draw=draw, keep=keep)
        return torch.where(uniform(cells, numbers * DRAWS + draw) < keep, 1 / keep, 0.0)

    def uniforms(self, units: int, *, mask: int) -> Tensor:
        """Draw uniform numbers [requests, length, units], above 0 and below 1, in place of the dropout mask `mask`."""
        draw, cells, numbers = FIRST_MASK + mask, self._cells[..., None], _numbers(units, self._cells.device)
        if self._on_gpu:
            return _kernel(MIXED + UNIFORMS, draw=0.0)(cells, _as_floats(numbers), draw=draw)
        return uniform(cells, numbers * DRAWS + draw)


def uniform_like(like: Tensor, source: Noise | torch.Generator | None) -> Tensor:
    """Draw uniform numbers with the shape and type of a tensor; with None, from torch's default generator."""
    if isinstance(source, Noise):
        return source.uniform().to(like.dtype)
    return torch.rand(like.shape, generator=source, device=like.device, dtype=like.dtype)


def normal_like(like: Tensor, source: Noise | torch.Generator | None) -> Tensor:
    """Draw standard normal numbers with the shape and type of a tensor; with None, from torch's default generator."""
    if isinstance(source, Noise):
        return source.normal().to(like.dtype)
    return torch.randn(like.shape, generator=source, device=like.device, dtype=like.dtype)


def hash_places(key: Tensor, places: Tensor) -> Tensor:
    """Return the upper 32 bits of SplitMix64's number for each of the `places` in its stream that begins at `key`."""
    z = key + _signed(0x9E3779B97F4A7C15) * places
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(z ^ _shifted(z, 31), 32)


def uniform(cells: Tensor, draws: Tensor) -> Tensor:
    """Return a uniform float32 of each cell (a 32-bit word) and draw; neither 0 nor 1 occurs."""
    x = cells ^ (draws * 0x9E3779B9 & WORD)
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    x = x ^ x >> 16
    return ((x >> 9).to(torch.float32) + 0.5) * 2**-23


def _as_floats(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.float32)


def _signed(word: int) -> int:
    """Return the signed number with the bits of an unsigned 64-bit word; products wrap around in both."""
    return word - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=64)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@lru_cache(maxsize=8)
def _kernel(code: str, **numbers: float) -> Callable[..., Tensor]:
    """Return the last function of `code` as one kernel of the GPU, with names and defaults of its last arguments."""
    kernel: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(code, **numbers)
    return kernel
