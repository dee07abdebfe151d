"""The likelihood of held-out clicks, compared with loops, and its maximum at the true examination."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from bias.worlds import THETA, seen_in, small_log, world
from ultr.bias import identification
from ultr.bias.identification import HeldOut

LOW = np.array([0.2, 0.9, 0.5, 1.0, 0.7])


def parts_of(seen) -> np.ndarray:
    """Return 0, 1 or 2 by row: requests that fit relevance, that choose the prior, that validate."""
    share = seen.of_rows(seen.group) / (seen.group.max() + 1)
    return (share >= 0.7).astype(int) + (share >= 0.8)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), weights=st.booleans())
def test_the_score_with_mean_relevance_is_a_sum_over_rows(seed, weights):
    seen = seen_in(small_log(seed, requests=30, weights=weights))
    theta, each, part = LOW[: len(seen.positions)], seen.row_weights, parts_of(seen)
    seen_by = (theta / theta.max())[seen.place]
    fitted, held_out = part < 2, part == 2
    mean = np.clip((each * seen.clicked)[fitted].sum() / (each * seen_by)[fitted].sum(), 1e-6, 1 - 1e-6)
    chance = mean * seen_by
    each_row = np.where(seen.clicked, np.log(chance), np.log(1 - chance))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identification, "STRENGTHS", (1e15,))
        found = HeldOut(seen, seen.items).score(theta)
    assert found == pytest.approx(np.average(each_row[held_out], weights=each[held_out]), rel=1e-6)


@pytest.mark.parametrize("strength", [0.5, 5.0])
def test_relevance_is_the_mode_of_its_posterior(strength, monkeypatch):
    monkeypatch.setattr(identification, "STRENGTHS", (strength,))
    monkeypatch.setattr(identification, "EM_STEPS", 3000)
    seen = seen_in(small_log(3, requests=60))
    theta, part = LOW, parts_of(seen)
    here = theta[seen.place]
    fitted = part < 2
    mean = seen.clicked[fitted].sum() / here[fitted].sum()

    def chance(item):
        own = fitted & (seen.items == item)

        def loss(beta):
            p = here[own] * beta
            prior = strength * (mean * np.log(beta) + (1 - mean) * np.log(1 - beta))
            return -prior - np.where(seen.clicked[own], np.log(p), np.log(1 - p)).sum()

        return minimize_scalar(loss, bounds=(1e-9, 1 - 1e-9), method="bounded", options={"xatol": 1e-12}).x

    betas = np.array([chance(item) for item in range(seen.items.max() + 1)])
    p = here * betas[seen.items]
    expected = np.where(seen.clicked, np.log(p), np.log(1 - p))[part == 2].mean()
    assert HeldOut(seen, seen.items).score(theta) == pytest.approx(expected, rel=1e-5)


def test_the_prior_maximises_the_likelihood_of_other_requests(monkeypatch):
    seen = seen_in(world("random", requests=1000))
    judge = HeldOut(seen, seen.items)
    first, second = judge.parts[:2]
    here = THETA[first.places] / THETA.max()
    chosen = max(identification.STRENGTHS, key=lambda s: identification._mean_likelihood(here, first, second, s))
    found = judge.score(THETA)
    monkeypatch.setattr(identification, "STRENGTHS", (chosen,))
    assert judge.score(THETA) == found


def test_true_examination_explains_clicks_best():
    seen = seen_in(world("rankers", requests=6000))
    judge = HeldOut(seen, seen.items)
    best = judge.score(THETA)
    assert best > judge.score(np.ones(5)) + 0.01
    assert best > judge.score(THETA[::-1].copy()) + 0.01
    for place in range(1, 5):
        for factor in (0.6, 1.6):
            other = THETA.copy()
            other[place] *= factor
            assert judge.score(other) < best


def test_the_scale_of_theta_does_not_matter():
    seen = seen_in(world("random", requests=500))
    judge = HeldOut(seen, seen.items)
    assert judge.score(THETA) == pytest.approx(judge.score(0.01 * THETA), rel=1e-12)


def test_positions_without_theta_are_left_out():
    log = world("random", requests=500)
    seen = seen_in(log)
    theta = THETA.copy()
    theta[3:] = np.nan
    top = log.regroup(np.flatnonzero(log.positions <= 3), np.arange(501) * 3)
    cut = seen_in(top)
    np.testing.assert_array_equal(seen.group, cut.group)
    found, expected = HeldOut(seen, seen.items).score(theta), HeldOut(cut, cut.items).score(THETA[:3])
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_large_log_is_validated_on_a_sample_of_its_items(monkeypatch):
    seen = seen_in(world("random", requests=2000))
    whole = HeldOut(seen, seen.items)
    shown_in_whole = sum(part.shown.sum() for part in whole.parts[2:])
    monkeypatch.setattr(identification, "ROWS", 4000)
    some = HeldOut(seen, seen.items)
    shown = sum(part.shown.sum() for part in some.parts[2:])
    assert 0.2 * shown_in_whole < shown < 0.6 * shown_in_whole
    assert some.score(THETA) == pytest.approx(whole.score(THETA), rel=0.1)
    taken = np.unique(some.parts[0].strata)
    assert shown == np.isin(seen.items, taken).sum()  # whole items


def test_a_log_that_is_too_small_has_no_likelihood():
    seen = seen_in(small_log(0, requests=3))
    assert np.isnan(HeldOut(seen, seen.items).score(np.ones(len(seen.positions))))
