from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from ultr.utils.noise import Noise, hash_places, uniform

WORD = (1 << 64) - 1


def splitmix64(key: int, place: int) -> int:
    z = (key + 0x9E3779B97F4A7C15 * place) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_the_stream_of_splitmix64_is_that_of_its_authors():
    """The first numbers of the seed 1234567, as published with the reference code."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, place) for place in range(1, 5)] == expected


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_places_are_hashed_by_splitmix64(key, places):
    found = hash_places(torch.tensor(key), torch.tensor(places))
    assert found.tolist() == [splitmix64(key & WORD, place) >> 32 for place in places]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31))
def test_uniform_numbers_are_above_0_and_below_1(cell, draw):
    number = float(uniform(torch.tensor(cell), torch.tensor(draw)))
    x = cell ^ (draw * 0x9E3779B9 % 2**32)
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    assert number == pytest.approx(((x ^ x >> 16) / 2**32), abs=2**-22)
    assert 0 < number < 1


@pytest.mark.parametrize("key", [0, 1, -1, 2**62 + 7])
def test_numbers_have_their_distribution_and_no_correlation(key):
    noise = Noise(torch.tensor(key), torch.arange(2000), 10)
    first, second, normal = noise.uniform(), noise.uniform(), noise.normal()
    for values in (first, second):
        assert kstest(values.flatten().numpy(), "uniform").pvalue > 1e-4
    assert kstest(normal.flatten().numpy(), "norm").pvalue > 1e-4
    limit = 5 / first.numel() ** 0.5
    pairs = [(first, second), (first, normal), (first[:, 1:], first[:, :-1]), (first[1:], first[:-1])]
    for a, b in pairs:
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < limit
    other = Noise(torch.tensor(key + 1), torch.arange(2000), 10).uniform()
    assert abs(np.corrcoef(first.flatten(), other.flatten())[0, 1]) < limit


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5), st.floats(0.05, 0.95))
def test_a_number_does_not_depend_on_padding_or_on_the_other_requests(requests, length, more, keep):
    rows, key = torch.arange(requests) * 3 + 5, torch.tensor(99)
    whole, some = Noise(key, rows, length + more), Noise(key, rows[::2], length)
    assert torch.equal(whole.uniform()[::2, :length], some.uniform())
    assert torch.equal(whole.kept(keep, 4, mask=2)[::2, :length], some.kept(keep, 4, mask=2))


def test_masks_differ_by_number_and_unit_and_keep_their_share():
    noise = Noise(torch.tensor(3), torch.arange(300), 10)
    masks = [noise.kept(0.7, 64, mask=mask) for mask in range(2)]
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert abs(float((mask > 0).float().mean()) - 0.7) < 5 * (0.21 / mask.numel()) ** 0.5
    same = (masks[0] == masks[1]).float().mean()
    assert abs(float(same) - (0.49 + 0.09)) < 0.01
    assert not torch.equal(masks[0][..., 0], masks[0][..., 1])
    assert torch.equal(noise.kept(0.7, 64, mask=1), masks[1])
    assert noise.kept(0.5, mask=0).shape == (300, 10)


def test_uniform_numbers_of_units_are_independent_of_each_other_and_of_padding():
    noise = Noise(torch.tensor(3), torch.arange(3000), 10)
    numbers = noise.uniforms(4, mask=1)
    assert numbers.shape == (3000, 10, 4)
    assert kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4
    correlations = np.corrcoef(numbers.view(-1, 4).T.numpy()) - np.eye(4)
    assert np.abs(correlations).max() < 5 / 30_000**0.5
    assert torch.equal(Noise(torch.tensor(3), torch.arange(3000), 7).uniforms(4, mask=1), numbers[:, :7])
    assert torch.equal(noise.kept(0.3, 4, mask=1) > 0, numbers < 0.3)  # the same numbers as a mask


def test_the_numbers_of_several_runs_are_those_of_each():
    rows = torch.arange(7)
    together = Noise(torch.tensor([5, 6, 7]), rows, 4)
    drawn, masks = together.uniform(), together.kept(0.5, 3, mask=1)
    for number, key in enumerate((5, 6, 7)):
        alone = Noise(torch.tensor(key), rows, 4)
        assert torch.equal(drawn[7 * number : 7 * number + 7], alone.uniform())
        assert torch.equal(masks[7 * number : 7 * number + 7], alone.kept(0.5, 3, mask=1))
