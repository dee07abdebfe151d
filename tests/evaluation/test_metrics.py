"""Metrics, compared with scikit-learn and with every order of tied items, to 1e-9 in float64."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import dcg_score, ndcg_score

from ultr.datasets.users import LAST_POSITION, CascadeUser, Dwell, TrustUser, User
from ultr.errors import DataError, OptionError
from ultr.evaluation.metrics import (
    METRICS,
    arp_metric,
    batch_innermost,
    dcg_metric,
    mrr_metric,
    ndcg_metric,
    parse_metric,
    precision_metric,
    ranks_of,
    reward_metric,
    sampled_reward_metric,
)
from ultr.log.labels import Label

LABEL = Label()


@st.composite
def ranked_lists(draw, max_length: int = 6):
    """Draw scores with many ties, grades 0-4, and a cut-off."""
    length = draw(st.integers(1, max_length))
    scores = draw(st.lists(st.integers(-2, 1).map(float), min_size=length, max_size=length))
    grades = draw(st.lists(st.integers(0, 4).map(float), min_size=length, max_size=length))
    k = draw(st.none() | st.integers(1, length + 2))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(grades, dtype=torch.float64), k


def orders_of(scores: torch.Tensor) -> list[list[int]]:
    """Yield every order that sorts the scores, with ties in any order."""
    falling = [list(p) for p in permutations(range(len(scores)))]
    return [p for p in falling if all(scores[a] >= scores[b] for a, b in pairwise(p))]


def by_hand(scores, grades, k, figure) -> float:
    """Return the mean of a function of the ranked grades over every order of tied items."""
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
@settings(max_examples=20)  # each of up to 120 orders
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
def test_lists_that_are_all_padding_or_all_irrelevant_give_finite_values(name):
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
    user = User(epsilon=0.0, examination=[0.7], eta=0.25)
    reward = reward_metric(scores, grades, user=user, label="click").item()
    assert reward == pytest.approx((0.7 / LAST_POSITION) ** 0.25, rel=1e-6)


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


def test_names_with_cut_offs_are_parsed_and_others_rejected():
    assert parse_metric("ndcg@10") == ("ndcg", 10)
    assert parse_metric(" mrr ") == ("mrr", None)
    for text, message in [("ndgc@10", "did you mean 'ndcg'"), ("ndcg@0", "from 1"), ("ndcg@x", "for example ndcg@10")]:
        with pytest.raises(OptionError, match=message):
            parse_metric(text)
    with pytest.raises(OptionError, match="no cut-off"):
        arp_metric(torch.zeros(1, 2), torch.zeros(1, 2), k=3)


EXTRAS = {"reward": {"user": User(), "label": LABEL}}
CASES = [(name, EXTRAS.get(name, {})) for name in METRICS] + [("reward", {"user": CascadeUser(), "label": LABEL})]


def figures(name: str, scores, grades, where, **options) -> torch.Tensor:
    return METRICS[name](scores, grades, where=where, **options)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("k", [None, 2])
def test_the_last_dimension_is_the_list_however_many_come_before(name, options, k):
    generator = torch.Generator().manual_seed(6)
    scores, grades = torch.randint(0, 4, (2, 2, 3, 5), generator=generator).double()
    where = torch.rand((2, 3, 5), generator=generator) < 0.8
    where[1, 2] = False
    cut = {} if name == "arp" else {"k": k}
    nested = figures(name, scores, grades, where, **options, **cut)
    assert nested.shape == (2, 3)
    for index in np.ndindex(2, 3):
        alone = figures(name, scores[index], grades[index], where[index], **options, **cut)
        torch.testing.assert_close(nested[index], alone, msg=name)
    assert nested[1, 2] == 0  # no items


@pytest.mark.parametrize(("name", "options"), CASES)
def test_items_scored_minus_infinity_are_last_but_before_padding(name, options):
    grades = torch.tensor([[1.0, 3.0, 2.0, 4.0]]).double()
    scores = torch.tensor([[0.0, -torch.inf, 1.0, torch.inf]]).double()
    where = torch.tensor([[True, True, True, False]])
    expected = figures(name, torch.tensor([[0.0, -1.0, 1.0]]).double(), grades[:, :3], None, **options)
    torch.testing.assert_close(figures(name, scores, grades, where, **options), expected)


@pytest.mark.parametrize("k", [None, 1, 3, 9])
def test_cascade_reward_without_ties_is_the_users_expectation_of_the_ranked_list(k):
    user = CascadeUser()
    grades, scores = (
        torch.tensor([[2.0, 9.0, 4.0, 0.0, 1.0]]).double(),
        torch.tensor([[1.0, 9.0, 3.0, 2.0, 4.0]]).double(),
    )
    where = torch.tensor([[True, False, True, True, True]])
    ranked = torch.tensor([[1.0, 4.0, 0.0, 2.0]]).double()
    expected = user.expected(ranked, torch.arange(1, 5)[None], LABEL)[:, :k].sum(-1)
    torch.testing.assert_close(reward_metric(scores, grades, user=user, label=LABEL, k=k, where=where), expected)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_a_sampled_reward_is_of_the_whole_list_unless_cut_and_never_of_padding(shape):
    clicks_on_all = User(eta=0.0)
    where = (torch.arange(6) < 4).expand(shape)  # the highest scores are of padding
    scores = torch.arange(6.0).expand(shape)
    grades = torch.where(where, 4.0, torch.nan)
    for options, shown in [({}, 6), ({"k": 5}, 5), ({"where": where}, 4), ({"where": where, "k": 3}, 3)]:
        found = sampled_reward_metric(
            scores,
            grades if "where" in options else torch.full_like(scores, 4.0),
            user=clicks_on_all,
            label="click",
            generator=torch.Generator().manual_seed(7),
            **options,
        )
        assert torch.equal(found, torch.full(shape[:-1], float(shown)))


def test_ties_break_by_slot_or_uniformly_with_a_generator():
    tied = torch.zeros(2, 3000, 3)
    assert torch.equal(ranks_of(tied), torch.arange(1, 4).expand(2, 3000, 3))
    assert torch.equal(ranks_of(torch.zeros(500)), torch.arange(1, 501))  # long lists are sorted in another way
    drawn, again = (ranks_of(tied, generator=torch.Generator().manual_seed(8)) for _ in range(2))
    assert torch.equal(drawn, again)
    for order in permutations((1, 2, 3)):
        count = int((drawn == torch.tensor(order)).all(-1).sum())
        assert abs(count - 1000) < 3.89 * (6000 * 1 / 6 * 5 / 6) ** 0.5  # 99.99%
    scored = torch.tensor([0.0, 2.0, 2.0, 1.0]).expand(50, 4)
    drawn = ranks_of(scored, generator=torch.Generator().manual_seed(9))
    assert drawn[:, [0, 3]].unique(dim=0).tolist() == [[4, 3]]
    assert drawn[:, 1:3].unique(dim=0).tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [4.0, 0.01])
def test_a_perfect_ranking_is_one_and_never_above_by_rounding(dtype, largest):
    grades = torch.rand((2000, 12), generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    grades = grades.mul(largest).to(dtype)
    found = ndcg_metric(grades, grades)
    assert (found <= 1).all()
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float64])
def test_values_have_the_precision_of_the_scores(name, options, kind):
    scores, grades = torch.tensor([[3.0, 2.0, 0.0, 2.0]]), torch.tensor([[0.0, 3.0, 1.0, 1.0]])
    found = METRICS[name](scores, grades.to(kind), **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, METRICS[name](scores, grades, **options))


@given(case=ranked_lists(), unit=st.sampled_from([0.01, 0.3, 50.0]))
def test_the_average_relevance_position_does_not_depend_on_the_unit_of_relevance(case, unit):
    scores, grades, _ = case
    assert arp_metric(scores, unit * grades).item() == pytest.approx(arp_metric(scores, grades).item())


def test_gains_of_fractions_of_a_grade_do_not_cancel():
    grades = torch.tensor([[1e-6], [0.5], [1.0], [1.5], [60.0]])
    expected = np.expm1(grades[:, 0].double().numpy() * np.log(2))
    np.testing.assert_allclose(dcg_metric(torch.zeros(5, 1), grades).numpy(), expected, rtol=1e-6)
    assert dcg_metric(torch.zeros(5, 1), grades, gain="linear").tolist() == grades[:, 0].tolist()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_memory_layout_of_scores_does_not_matter(name, options):
    scores, grades = torch.arange(12.0).remainder(5).view(4, 3).T, torch.arange(12.0).remainder(4).view(4, 3).T
    expected = METRICS[name](scores.contiguous(), grades.contiguous(), **options)
    torch.testing.assert_close(METRICS[name](scores, grades, **options), expected)


def test_gains_of_whole_grades_are_exact():
    grades = torch.arange(53.0, dtype=torch.float64)[:, None]
    assert dcg_metric(torch.zeros_like(grades), grades).tolist() == [2**y - 1 for y in range(53)]


def test_large_whole_numbers_stay_different_and_half_precision_becomes_single():
    scores, grades = torch.tensor([[2**24, 2**24 + 1]]), torch.tensor([[0.0, 1.0]])
    assert mrr_metric(scores, grades).tolist() == [1]
    assert mrr_metric(scores, grades).dtype == torch.float64
    assert mrr_metric(torch.zeros(1, 2, dtype=torch.float16), grades).dtype == torch.float32


def test_the_first_dimension_becomes_contiguous_and_values_stay():
    for shape in [(3,), (3, 5), (3, 4, 5)]:
        values = torch.arange(float(np.prod(shape))).view(shape)
        laid_out = batch_innermost(values)
        assert torch.equal(laid_out, values)
        assert laid_out.stride(0) == 1


NUMBERS, TRUE = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("scores", "labels", "options", "message"),
    [
        (NUMBERS, NUMBERS[:1], {}, r"have the same shape .*'labels': \[1, 3\]"),
        (NUMBERS, NUMBERS, {"where": TRUE[:, :2]}, r"have the same shape .*'where': \[2, 2\]"),
        (NUMBERS[0, 0], NUMBERS[0, 0], {}, "at least one item"),
        (NUMBERS[:, :0], NUMBERS[:, :0], {}, "at least one item"),
        (NUMBERS.to(torch.complex64), NUMBERS, {}, "must be real"),
        (NUMBERS, NUMBERS.to(torch.complex64), {}, "must be real"),
        (NUMBERS, NUMBERS, {"where": NUMBERS}, "type bool"),
        (NUMBERS, NUMBERS, {"k": 0}, "from 1"),
        (NUMBERS, NUMBERS, {"gain": "linaer"}, "did you mean 'linear'"),
        (NUMBERS, NUMBERS + 60.5, {}, "labels up to 60"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(scores, labels, options, message):
    with pytest.raises((DataError, OptionError), match=message):
        ndcg_metric(scores, labels, **options)


def test_arguments_at_the_limits_are_accepted():
    assert dcg_metric(NUMBERS[:0], NUMBERS[:0]).shape == (0,)
    assert precision_metric(NUMBERS, NUMBERS + 1, k=1, where=TRUE).tolist() == [1, 1]
    assert precision_metric(NUMBERS[:, :1], NUMBERS[:, :1] + 1).tolist() == [1, 1]
    assert dcg_metric(NUMBERS, NUMBERS + 61, gain="linear", k=1).tolist() == [61, 61]
    assert parse_metric("dcg@1") == ("dcg", 1)
    assert parse_metric("dcg@999999") == ("dcg", 999_999)
    for text in ("dcg@", "dcg@-1", "dcg@1000000", "dcg@1.5"):
        with pytest.raises(OptionError, match="from 1"):
            parse_metric(text)


def test_the_reciprocal_rank_is_cut_off_within_ties_too():
    scores = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0]])
    grades = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]])
    # Of three tied items two are relevant: the first relevant one has rank 3 in 2 of 3 orders, else rank 4.
    for k, expected in {2: 0.0, 3: 2 / 3 / 3, 4: 2 / 3 / 3 + 1 / 3 / 4, 5: 2 / 3 / 3 + 1 / 3 / 4}.items():
        assert mrr_metric(scores, grades, k=k).item() == pytest.approx(expected)
