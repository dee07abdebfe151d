"""Gumbel noise: its distribution, and its independence of padding and of how a batch is divided."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kstest

from ultr.lists import Part
from ultr.rankers import DeviceMask, GivenMask, Gumbel, Masks
from ultr.utils.noise import Noise


def where(requests: int, length: int) -> torch.Tensor:
    return torch.ones(requests, length, dtype=torch.bool)


@pytest.mark.parametrize("source", ["torch", "parts", "key"])
def test_noise_in_training_has_the_gumbel_distribution_and_is_drawn_anew(source):
    noise = Gumbel(4).train()
    torch.manual_seed(0)
    if source == "parts":
        noise.masks = Masks([Part(0, 300, 10), Part(1, 200, 10)], [1, 2], where(500, 10))
    if source == "key":
        noise.masks = DeviceMask(lambda: Noise(torch.tensor(5), torch.arange(500), 10), 3)
    drawn = noise(where(500, 10))
    assert drawn.shape == (4, 500, 10)
    assert torch.isfinite(drawn).all()
    assert kstest(drawn.flatten().numpy(), "gumbel_r").pvalue > 1e-4
    assert len(drawn.unique()) > 0.99 * drawn.numel()


def test_there_is_no_noise_without_training():
    assert torch.equal(Gumbel(2).eval()(where(3, 4)), torch.zeros(2, 3, 4))


def test_noise_does_not_depend_on_padding_or_on_the_processes_of_a_batch():
    parts, seeds = [Part(0, 3, 4), Part(1, 2, 6)], [7, 8]
    noise = Gumbel(2).train()
    noise.masks = Masks(parts, seeds, where(5, 6))
    whole = noise(where(5, 6))
    noise.masks = Masks(parts[1:], seeds[1:], where(2, 6))
    assert torch.equal(noise(where(2, 6)), whole[:, 3:])
    noise.masks = Masks(parts[:1], seeds[:1], where(3, 9))
    assert torch.equal(noise(where(3, 9))[..., :4], whole[:, :3, :4])


def test_a_number_of_zero_gives_finite_noise():
    noise = Gumbel(2).train()
    noise.masks = GivenMask(torch.tensor([[[0.0, 1 - 2**-24]]]))
    assert torch.isfinite(noise(where(1, 1))).all()
