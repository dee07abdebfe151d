"""Metrics against scikit-learn and against every order of tied items, to 1e-9 in float64."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import dcg_score, ndcg_score

from ultr.dwell import Dwell
from ultr.errors import OptionError
from ultr.labels import Label
from ultr.metrics import (
    METRICS,
    arp_metric,
    dcg_metric,
    mrr_metric,
    ndcg_metric,
    parse_metric,
    precision_metric,
    ranks_of,
    reward_metric,
    sampled_reward_metric,
)
from ultr.simulate import CascadeUser, TrustUser, User

LABEL = Label()


@st.composite
def ranked_lists(draw, max_length: int = 6):
    """Scores with many ties, grades 0-4, and a cut-off."""
    length = draw(st.integers(1, max_length))
    scores = draw(st.lists(st.integers(-2, 1).map(float), min_size=length, max_size=length))
    grades = draw(st.lists(st.integers(0, 4).map(float), min_size=length, max_size=length))
    k = draw(st.none() | st.integers(1, length + 2))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(grades, dtype=torch.float64), k


def orders_of(scores: torch.Tensor) -> list[list[int]]:
    """Every order that sorts the scores, ties in any way."""
    falling = [list(p) for p in permutations(range(len(scores)))]
    return [p for p in falling if all(scores[a] >= scores[b] for a, b in pairwise(p))]


def by_hand(scores, grades, k, figure) -> float:
    """The mean of a figure of the ranked grades over every order of tied items."""
    values = [figure([float(grades[i]) for i in order], k or len(order)) for order in orders_of(scores)]
    return sum(values) / len(values)


def dcg_by_hand(ranked, k):
    return sum((2**y - 1) / np.log2(r + 2) for r, y in enumerate(ranked[:k]))


def ndcg_by_hand(ranked, k):
    ideal = dcg_by_hand(sorted(ranked, reverse=True), k)
    return dcg_by_hand(ranked, k) / ideal if ideal else 0.0


def mrr_by_hand(ranked, k):
    return next((1 / (r + 1) for r, y in enumerate(ranked[:k]) if y > 0), 0.0)


def precision_by_hand(ranked, k):
    return sum(y > 0 for y in ranked[:k]) / k


def arp_by_hand(ranked, _):
    weights = ranked if sum(ranked) else [1] * len(ranked)
    return sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)


BY_HAND = {
    "dcg": dcg_by_hand,
    "ndcg": ndcg_by_hand,
    "mrr": mrr_by_hand,
    "precision": precision_by_hand,
    "arp": arp_by_hand,
}


@pytest.mark.parametrize("name", BY_HAND)
@given(case=ranked_lists())
def test_a_metric_is_its_mean_over_every_order_of_tied_items(name, case):
    scores, grades, k = case
    k = None if name == "arp" else k
    expected = by_hand(scores, grades, k, BY_HAND[name])
    assert METRICS[name](scores[None], grades[None], k=k).item() == pytest.approx(expected, abs=1e-9)


@given(case=ranked_lists(max_length=30))
def test_dcg_and_ndcg_equal_scikit_learns(case):
    scores, grades, k = case
    if len(scores) < 2:
        return
    truth, predicted = (2 ** grades.numpy() - 1)[None], scores.numpy()[None]
    assert dcg_metric(scores, grades, k=k).item() == pytest.approx(dcg_score(truth, predicted, k=k), abs=1e-9)
    assert ndcg_metric(scores, grades, k=k).item() == pytest.approx(ndcg_score(truth, predicted, k=k), abs=1e-9)
    linear = ndcg_metric(scores, grades, k=k, gain="linear").item()
    assert linear == pytest.approx(ndcg_score(grades.numpy()[None], predicted, k=k), abs=1e-9)


USERS = {
    "pbm": User(),
    "severe": User(eta=2.0, dwell=Dwell(decay=0.5)),
    "trust": TrustUser(),
    "more actions": User(further={"like": (0.0, 0.1, 0.2, 0.5, 0.9)}),
}


@pytest.mark.parametrize("name", USERS)
@given(case=ranked_lists(max_length=5))
def test_reward_is_the_users_expectation_over_every_order_of_tied_items(name, case):
    scores, grades, k = case
    user = USERS[name]
    label = Label("click + dwell / exp(3) + like") if user.further else LABEL

    def reward(ranked, k):
        y = torch.tensor(ranked, dtype=torch.float64)
        return float(user.expected(y, torch.arange(1, len(ranked) + 1), label)[:k].sum())

    expected = by_hand(scores, grades, k, reward)
    assert reward_metric(scores[None], grades[None], user=user, label=label, k=k).item() == pytest.approx(
        expected, abs=1e-9
    )


def test_reward_of_the_position_based_user_is_theta_times_attraction_times_value():
    grades = torch.tensor([[4.0, 0.0, 2.0]], dtype=torch.float64)
    scores = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)  # shown: grade 0, then 2, then 4
    attraction = {0: 0.1, 2: 0.1 + 0.9 * 3 / 15, 4: 1.0}
    value = {y: 1 + np.exp(mu + sigma**2 / 2 - 3) for y, mu, sigma in [(0, 1.2, 0.9), (2, 3.0, 0.7), (4, 4.3, 0.5)]}
    expected = 0.68 * attraction[0] * value[0] + 0.61 * attraction[2] * value[2]
    assert reward_metric(scores, grades, user=User(), label=LABEL, k=2).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("user", [User(), TrustUser(), CascadeUser()], ids=["pbm", "trust", "cascade"])
def test_sampled_reward_converges_to_the_exact_one(user):
    generator = torch.Generator().manual_seed(1)
    n = 200_000
    grades = torch.randint(0, 5, (1, 8), generator=generator).double().expand(n, 8)
    scores = torch.rand((1, 8), generator=generator).double().expand(n, 8)
    where = torch.arange(8) < 7
    where = where.expand(n, 8)
    draws = sampled_reward_metric(scores, grades, user=user, label=LABEL, generator=generator, k=5, where=where)
    exact = reward_metric(scores[:1], grades[:1], user=user, label=LABEL, k=5, where=where[:1]).item()
    margin = 3.29 * float(draws.std()) / n**0.5  # 99.9%
    assert abs(float(draws.mean()) - exact) < margin


def test_tied_sampled_rewards_average_over_the_ties():
    generator = torch.Generator().manual_seed(2)
    n = 100_000
    grades = torch.tensor([[4.0, 0.0, 0.0]]).double().expand(n, 3)
    draws = sampled_reward_metric(
        torch.zeros(n, 3).double(), grades, user=User(), label="click", generator=generator, k=1
    )
    exact = 0.68 * (1 + 0.1 + 0.1) / 3
    assert abs(float(draws.mean()) - exact) < 3.29 * float(draws.std()) / n**0.5


@pytest.mark.parametrize("name", METRICS)
@given(case=ranked_lists(), padding=st.integers(0, 4), seed=st.integers(0, 9))
def test_padding_and_the_order_of_slots_change_nothing(name, case, padding, seed):
    scores, grades, k = case
    k = None if name == "arp" else k
    extra = {"user": User(), "label": LABEL} if name == "reward" else {}
    alone = METRICS[name](scores[None], grades[None], k=k, **extra).item()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(scores) + padding, generator=generator)
    junk = torch.full((padding,), 99.0, dtype=torch.float64)
    where = torch.cat([torch.ones_like(scores), torch.zeros_like(junk)]).bool()
    mixed = [torch.cat([values, junk])[order][None] for values in (scores, grades)]
    # The precision of a whole list is over its own length, with or without padding.
    assert METRICS[name](*mixed, k=k, where=where[order][None], **extra).item() == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_lists_that_are_all_padding_or_all_irrelevant_give_finite_figures(name):
    extra = {"user": User(), "label": LABEL} if name == "reward" else {}
    scores, grades = torch.zeros(2, 3), torch.zeros(2, 3)
    where = torch.tensor([[True, True, False], [False] * 3])
    assert torch.isfinite(METRICS[name](scores, grades, where=where, **extra)).all()


@pytest.mark.parametrize("name", METRICS)
def test_single_precision_is_close_to_double(name):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 20, (50, 40), generator=generator).double()
    grades = torch.randint(0, 5, (50, 40), generator=generator).double()
    extra = {"user": User(), "label": LABEL} if name == "reward" else {}
    double = METRICS[name](scores, grades, **extra)
    single = METRICS[name](scores.float(), grades.float(), **extra)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16])
def test_scores_of_other_types_count_as_numbers(name, dtype):
    scores, grades = torch.tensor([[3, 2, 0, 2]]), torch.tensor([[0.0, 3.5, 0.0, 1.0]])
    extra = {"user": User(), "label": LABEL} if name == "reward" else {}
    expected = METRICS[name](scores.double(), grades, **extra).item()
    assert METRICS[name](scores.to(dtype), grades, **extra).item() == pytest.approx(expected, rel=1e-6)


def test_single_precision_does_not_cancel_on_long_lists():
    grades = torch.zeros(1, 5000)
    grades[0, 4999] = 4.0
    scores = -torch.arange(5000.0)[None]
    expected = 15 / np.log2(5001)
    assert dcg_metric(scores, grades).item() == pytest.approx(expected, rel=1e-6)
    assert ndcg_metric(grades, grades, k=10).item() <= 1


def test_cascade_rewards_of_tied_items_average_over_orders_and_do_not_depend_on_the_batch():
    grades = torch.tensor([[4.0, 0.0, 0.0]])
    tied = torch.zeros(1, 3)
    user = CascadeUser()
    reward = [
        reward_metric(torch.tensor([list(map(float, p))]), grades, user=user, label=LABEL).item()
        for p in permutations(range(3))
    ]
    alone = reward_metric(tied, grades, user=user, label=LABEL).item()
    assert min(reward) < alone < max(reward)
    assert alone == pytest.approx(np.mean(reward), rel=0.15)
    both = reward_metric(torch.zeros(2, 3), torch.cat([grades.flip(-1), grades]), user=user, label=LABEL)
    assert both[1].item() == pytest.approx(alone)


@given(case=ranked_lists(), seed=st.integers(0, 3))
def test_ranks_sort_the_scores_and_leave_padding_last(case, seed):
    scores, _, _ = case
    scores = torch.cat([scores, torch.tensor([-torch.inf, 5.0])])
    where = torch.ones_like(scores).bool()
    where[-1] = False
    for generator in (None, torch.Generator().manual_seed(seed)):
        ranks = ranks_of(scores[None], where=where[None], generator=generator)[0]
        assert sorted(ranks.tolist()) == list(range(1, len(scores) + 1))
        assert ranks[-1] == len(scores)
        assert ranks[-2] == len(scores) - 1
        in_order = scores[ranks.argsort()][:-1]
        assert (in_order[:-1] >= in_order[1:]).all()


def test_a_worse_order_never_scores_better_for_the_perfect_ranking():
    grades = torch.tensor([[0.0, 3.0, 1.0, 4.0, 2.0]])
    assert ndcg_metric(grades, grades).item() == pytest.approx(1)
    assert ndcg_metric(-grades, grades).item() < 0.7
    assert arp_metric(grades, grades).item() < arp_metric(-grades, grades).item()
    assert mrr_metric(grades, grades).item() == 1
    assert precision_metric(grades, grades, k=4).item() == 1


def test_names_with_cut_offs_are_parsed_and_others_refused():
    assert parse_metric("ndcg@10") == ("ndcg", 10)
    assert parse_metric(" mrr ") == ("mrr", None)
    for text, message in [("ndgc@10", "did you mean 'ndcg'"), ("ndcg@0", "from 1"), ("ndcg@x", "for example ndcg@10")]:
        with pytest.raises(OptionError, match=message):
            parse_metric(text)
    with pytest.raises(OptionError, match="no cut-off"):
        arp_metric(torch.zeros(1, 2), torch.zeros(1, 2), k=3)
