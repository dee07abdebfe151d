"""Off-policy values: brute force on small logs, the truth of simulated users, and invariances."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultr.datasets import show
from ultr.datasets.users import EYE_TRACKING, TrustUser, User, simulate_log
from ultr.errors import DataError, LabelError, OptionError
from ultr.evaluation.off_policy import ESTIMATORS, KINDS, OffPolicy, compare_values, fit_direct, off_policy_value
from ultr.evaluation.scores import evaluate_scores, mean_with_interval, paired_test
from ultr.log import Log

THETA = dict(enumerate(EYE_TRACKING, 1))
GAPS = {2: 0.9, 3: 0.5, 5: 0.7, 8: 0.2, 9: 0.05}  # position ids that are not ranks, and not in the order of examination


def small_log(lengths: list[int], seed: int = 0, ids: tuple[int, ...] = tuple(GAPS), *, weighted: bool = False) -> Log:
    """Make a log of lists at some of the position ids, with random clicks and dwell times."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    positions = np.concatenate([np.sort(rng.choice(ids, n, replace=False)) for n in lengths])
    click = rng.random(rows) < 0.6
    return Log(
        features=rng.normal(size=(rows, 2)).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=("a", "b"),
        positions=positions,
        actions={"click": click.astype(np.float32), "dwell": (click * rng.exponential(9, rows)).astype(np.float32)},
        weights=rng.uniform(0.5, 3, len(lengths)).astype(np.float32) if weighted else None,
    )


def discount(kind, reward, dcg):
    return {"reward": reward, "dcg": dcg, "gain": np.minimum(reward, dcg)}[kind]


def brute_force(log, scores, theta, kind, k, estimator, clip, direct, zeta=None):
    """Compute the value by the formula, row by row; t of tied rows is the mean over every order of them."""
    labels = log.actions["click"] if zeta else log.actions["click"] + log.actions["dwell"]
    zeta = zeta or dict.fromkeys(theta, 0.0)
    slope = {i: theta[i] - zeta[i] for i in theta}
    largest = max(slope[i] for i in log.positions)
    weights = np.ones(len(log)) if log.weights is None else log.weights.astype(float)
    value, sums = 0.0, np.zeros((5, 3))
    for r in range(len(log)):
        mine = range(log.offsets[r], log.offsets[r + 1])
        ids = sorted(log.positions[i] for i in mine)
        orders = [o for o in permutations(mine) if all(scores[a] >= scores[b] for a, b in pairwise(o))]
        for i in mine:
            old, ranks = log.positions[i], [order.index(i) for order in orders]
            t = np.mean([(j < k) * discount(kind, slope[ids[j]], largest / np.log2(j + 2)) for j in ranks])
            w, c = t / slope[old], labels[i] - zeta[old]
            u = w if estimator == "ips" else min(w, clip)
            if kind == "reward":
                value += weights[r] * np.mean([(j < k) * zeta[ids[j]] for j in ranks])
            if estimator == "snips":
                sums[int(np.mean(ranks))] += weights[r] * np.array([u * c, t, u * slope[old]])
            else:
                value += weights[r] * (u * c + (w - u) * slope[old] * direct[i] * (estimator == "dr"))
    value += sum(c * t / seen for c, t, seen in sums if seen)
    return value / weights.sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "estimator"), list(product(KINDS, ESTIMATORS)))
def test_values_equal_the_formula(kind, estimator, tied, weighted):
    log = small_log([3, 5, 1, 4, 2], weighted=weighted)
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 3, log.rows) if tied else rng.normal(size=log.rows)
    direct = rng.uniform(0.2, 2, log.rows)
    for k, clip in product((1, 3, 10), (0.3, 1.5, 4.0)):
        found = off_policy_value(
            log,
            scores,
            theta=GAPS,
            label="click + dwell",
            kind=kind,
            k=k,
            estimator=estimator,
            clip=clip,
            direct=direct if estimator == "dr" else None,
        )
        expected = brute_force(log, scores, GAPS, kind, k, estimator, clip, direct)
        assert found.value == pytest.approx(expected, rel=1e-6)
        assert np.average(found.per_request, weights=log.weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "estimator"), list(product(KINDS, ESTIMATORS)))
def test_trust_is_subtracted_from_clicks_and_added_at_the_new_place(kind, estimator):
    log = small_log([3, 5, 2, 4])
    zeta = {2: 0.3, 3: 0.2, 5: 0.0, 8: 0.1, 9: 0.02}
    direct = np.random.default_rng(1).uniform(0.2, 1, log.rows)
    scores = np.random.default_rng(2).integers(0, 4, log.rows)
    options = {"kind": kind, "k": 3, "estimator": estimator, "clip": 2.0, "zeta": zeta}
    given_direct = direct if estimator == "dr" else None
    found = off_policy_value(log, scores, theta=GAPS, label="click", direct=given_direct, **options)
    assert found.value == pytest.approx(brute_force(log, scores, GAPS, direct=direct, **options), rel=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_value_of_the_logged_ranking_is_its_feedback(estimator):
    log = small_log([5, 3, 4, 5, 1], weighted=True)
    direct = np.ones(log.rows) if estimator == "dr" else None
    shared = {"theta": GAPS, "label": "click + dwell", "estimator": estimator, "direct": direct}
    c = np.asarray(log.actions["click"] + log.actions["dwell"], dtype=np.float64)
    ranks = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths)
    for k in (1, 2, 10):
        found = off_policy_value(log, -log.positions, k=k, clip=1.0, **shared)
        got = np.add.reduceat(np.where(ranks < k, c, 0), log.offsets[:-1])
        mean = mean_with_interval(got, log.weights)
        assert found.value == pytest.approx(mean.mean)
        assert found.unclipped == pytest.approx(mean.mean)
        assert found.clipped == 0
        if estimator != "snips":
            np.testing.assert_allclose(found.per_request, got)
            assert (found.low, found.high) == pytest.approx((mean.low, mean.high))


@pytest.mark.parametrize("tied", [False, True])
def test_one_log_gives_the_values_of_many_scores(tied):
    log = small_log([3, 1, 4, 5], weighted=True)
    rng = np.random.default_rng(2)
    options = {"theta": GAPS, "label": "click", "direct": rng.random(log.rows)}
    estimator = OffPolicy(log, **options)
    for _ in range(3):
        scores = rng.integers(0, 3, log.rows).astype(float) if tied else rng.normal(size=log.rows)
        expected = off_policy_value(log, scores, **options)
        assert estimator(scores).value == expected.value
        assert float(estimator.mean(torch.from_numpy(scores))) == pytest.approx(expected.value, rel=1e-12)
    assert torch.isnan(estimator.mean(torch.full((log.rows,), torch.nan)))


def test_the_value_of_a_constant_score_is_the_mean_over_all_orders():
    log = small_log([3])
    orders = [np.array(order, dtype=float) for order in permutations(range(3))]
    shared = {"theta": GAPS, "label": "click + dwell", "estimator": "ips", "k": 2}
    each = [off_policy_value(log, order, **shared).value for order in orders]
    assert off_policy_value(log, np.zeros(3), **shared).value == pytest.approx(np.mean(each))


@pytest.mark.parametrize("kind", KINDS)
def test_ips_is_unbiased_over_all_feedback_of_position_based_users(kind):
    theta, attraction = {1: 0.8, 2: 0.5, 3: 0.2}, np.array([0.3, 0.9, 0.6])
    log, scores = small_log([3], ids=(1, 2, 3)), np.array([0.1, 2.0, 1.0])
    places = np.array([3, 1, 2])
    mean = 0.0
    for clicks in product((0, 1), repeat=3):
        chance = np.prod(
            [p if c else 1 - p for c, p in zip(clicks, np.array([0.8, 0.5, 0.2]) * attraction, strict=True)]
        )
        seen = replace(log, actions={"click": np.array(clicks, np.float32)})
        mean += (
            chance * off_policy_value(seen, scores, theta=theta, label="click", kind=kind, estimator="ips", k=2).value
        )
    gain = discount(kind, np.array([theta[p] for p in places]), 0.8 / np.log2(1 + places))
    assert mean == pytest.approx(((places <= 2) * gain * attraction).sum())


@pytest.fixture(scope="module")
def world():
    """Make lists of ten in the order of a poor ranker, and the scores of a good one."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20_000, 3)).astype(np.float32)
    grades = np.digitize(features[:, 0] + 0.5 * features[:, 1] + 0.5 * rng.normal(size=20_000), (0, 0.8, 1.6, 2.4))
    log = Log(
        features,
        np.arange(0, 20_001, 10),
        pa.array(np.arange(2000)),
        ("a", "b", "c"),
        relevance=grades.astype(np.float32),
    )
    log = show(log, features[:, 0] + 2 * rng.normal(size=20_000))
    return log, log.features[:, 0] + 0.5 * log.features[:, 1]


def two_halves(shown, scores, *, seed, sessions=8000):
    """Simulate users of randomly drawn lists twice, with the scores of the second time."""
    drawn = np.random.default_rng(seed).integers(len(shown), size=(2, sessions))
    first, second = (simulate_log(shown.select(d), User(), seed=seed + i)[0] for i, d in enumerate(drawn))
    return first, second, scores.reshape(-1, 10)[drawn[1]].ravel()


@pytest.mark.parametrize("label", ["click", "click + dwell / exp(3)"])
@pytest.mark.parametrize("estimator", ["ips", "snips", "dr"])
def test_values_agree_with_the_simulators_truth(world, estimator, label):
    shown, scores = world
    truth = evaluate_scores(shown, scores, "reward@5", user=User(), label=label)["reward@5"].mean()
    first, second, scores = two_halves(shown, scores, seed=1)
    direct = fit_direct(first, theta=THETA, label=label)
    found = off_policy_value(
        second,
        scores,
        theta=THETA,
        label=label,
        k=5,
        estimator=estimator,
        direct=direct(second) if estimator == "dr" else None,
    )
    assert found.low <= truth <= found.high
    assert found.value == pytest.approx(truth, rel=0.06)
    logged = off_policy_value(second, -second.positions, theta=THETA, label=label, k=5, estimator="ips")
    test = compare_values(found, logged)
    assert test.difference > 0
    assert test.significant


def test_reusing_labels_at_new_places_would_favour_the_logging_ranker(world):
    shown, scores = world
    log, _ = simulate_log(shown, User(), seed=3)
    shared = {"label": "click", "k": 3, "estimator": "ips"}
    flat, right = (
        off_policy_value(log, scores, theta=theta, **shared).value
        / off_policy_value(log, -log.positions, theta=theta, **shared).value
        for theta in (dict.fromkeys(THETA, 1.0), THETA)
    )
    assert flat < 1 < right


def test_values_of_trusting_users_are_right_only_if_trust_is_known(world):
    shown, scores = world
    user = TrustUser()
    k = torch.arange(1.0, 11, dtype=torch.float64)
    examined = user.theta(k.long(), torch.float64)
    theta, zeta = (dict(enumerate((examined * believed).tolist(), 1)) for believed in (user.trust(k), user.mistrust(k)))
    truth = evaluate_scores(shown, scores, "reward@5", user=user, label="click")["reward@5"].mean()
    found = []
    for seed in range(4):
        first, second = (simulate_log(shown, user, seed=2 * seed + s)[0] for s in (0, 1))
        direct = fit_direct(first, theta=theta, zeta=zeta, label="click")(second)
        shared = {"label": "click", "k": 5, "clip": 3.0, "direct": direct, "theta": theta}
        found.append([off_policy_value(second, scores, **shared, zeta=z).value for z in (zeta, None)])
    known, unknown = np.mean(found, axis=0)
    assert known == pytest.approx(truth, rel=0.03)
    assert abs(unknown / truth - 1) > 0.06


def test_gain_tells_orders_apart_that_have_the_same_reward():
    """Users who look at all places alike give every order the same reward."""
    log, flat = small_log([3] * 50, ids=(1, 2, 3)), dict.fromkeys((1, 2, 3), 0.6)
    good, bad = log.actions["click"], -log.actions["click"]
    shared = {"theta": flat, "label": "click", "estimator": "ips"}
    values = [off_policy_value(log, scores, kind=kind, **shared) for kind in KINDS for scores in (good, bad)]
    reward, dcg, gain = ((values[i].value, values[i + 1].value) for i in (0, 2, 4))
    assert reward[0] == pytest.approx(reward[1])
    assert gain == dcg
    assert gain[0] > 1.05 * gain[1]


def test_gain_is_reward_if_examination_falls_faster_than_dcg():
    log = small_log([3] * 9, ids=(1, 2, 3))
    scores = np.random.default_rng(0).normal(size=log.rows)
    shared = {"theta": {1: 0.9, 2: 0.5, 3: 0.2}, "label": "click", "estimator": "ips"}
    reward, gain = (off_policy_value(log, scores, kind=kind, **shared) for kind in ("reward", "gain"))
    np.testing.assert_allclose(gain.per_request, reward.per_request)


def test_dr_is_ips_if_nothing_is_clipped():
    log = small_log([5, 4, 3], weighted=True)
    scores, direct = np.random.default_rng(3).normal(size=(2, log.rows))
    shared = {"theta": GAPS, "label": "click + dwell"}
    for kind in KINDS:
        ips = off_policy_value(log, scores, kind=kind, estimator="ips", **shared)
        for name in ("dr", "snips"):
            found = off_policy_value(
                log, scores, kind=kind, estimator=name, clip=np.inf, direct=np.abs(direct), **shared
            )
            np.testing.assert_allclose(found.per_request, ips.per_request)
            assert (found.low, found.high, found.clipped) == pytest.approx((ips.low, ips.high, 0))


def test_self_normalisation_corrects_the_clip_for_items_of_equal_value():
    """With labels θ m and one m for all, the value of a new rank is θ m, whatever is clipped."""
    log = small_log([5] * 20)
    theta = np.array([GAPS[i] for i in log.positions])
    scores = np.random.default_rng(4).normal(size=log.rows)
    equal = replace(log, actions={"click": 0.5 * theta})
    value = 0.5 * sum(GAPS.values())
    shared = {"theta": GAPS, "label": "click", "clip": 0.8}
    assert off_policy_value(equal, scores, estimator="clipped", **shared).value < 0.8 * value
    assert off_policy_value(equal, scores, estimator="snips", **shared).value == pytest.approx(value)
    worth = np.random.default_rng(5).uniform(0.1, 1, log.rows)
    uneven = replace(log, actions={"click": worth * theta})
    ips = off_policy_value(uneven, scores, estimator="ips", theta=GAPS, label="click").value
    for name, direct in (("dr", worth), ("snips", 7 * worth)):
        assert off_policy_value(uneven, scores, estimator=name, direct=direct, **shared).value == pytest.approx(ips)


def test_the_interval_of_a_self_normalised_value_is_that_of_a_jackknife():
    log = small_log([5] * 150)
    scores = np.random.default_rng(9).normal(size=log.rows)
    shared = {"theta": GAPS, "label": "click + dwell", "estimator": "snips", "clip": 1.0, "k": 3}
    found = off_policy_value(log, scores, **shared)
    without = np.array(
        [
            off_policy_value(log.select(kept := np.arange(150) != i), scores[np.repeat(kept, 5)], **shared).value
            for i in range(150)
        ]
    )
    jackknife = np.sqrt(149 / 150 * np.square(without - without.mean()).sum())
    assert found.per_request.std(ddof=1) / np.sqrt(150) == pytest.approx(jackknife, rel=0.05)


def test_effective_clicks_clipped_places_and_coverage_are_counted():
    log = replace(small_log([2, 2], ids=(1, 2)), actions={"click": np.array([1, 1, 0, 1], np.float32)})
    shared = {"theta": {1: 0.8, 2: 0.2}, "label": "click", "k": 4}
    swapped = np.array([0.0, 1, 0, 1])
    weights = np.array([0.25, 4, 4])  # of the clicked rows
    found = off_policy_value(log, swapped, estimator="ips", **shared)
    assert found.effective_clicks == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
    assert (found.clipped, found.coverage) == (0, 0.5)
    found = off_policy_value(log, swapped, estimator="clipped", clip=3, **shared)
    assert found.effective_clicks == pytest.approx(6.25**2 / (0.25**2 + 18))
    assert (found.clipped, found.coverage) == (0.5, 0.5)
    nothing = replace(log, actions={"click": np.zeros(4, np.float32)})
    assert off_policy_value(nothing, swapped, estimator="snips", **shared).effective_clicks == 0


def test_intervals_include_the_clip_and_replicates_of_theta():
    log = small_log([5] * 50)
    scores = np.random.default_rng(6).normal(size=log.rows)
    rng = np.random.default_rng(7)
    others = [{i: t * s for (i, t), s in zip(GAPS.items(), rng.lognormal(0, 0.4, 5), strict=True)} for _ in range(30)]
    shared = {"theta": GAPS, "label": "click", "estimator": "clipped", "clip": 15.0}
    found, other = (off_policy_value(log, s, **shared, replicates=others) for s in (scores, -scores))
    each = np.array([off_policy_value(log, scores, **{**shared, "theta": one}).value for one in others])
    np.testing.assert_allclose(found.replicates, each)
    mean = mean_with_interval(found.per_request)
    changed, moved = (found.value - found.unclipped) ** 2, np.mean((each - found.value) ** 2)
    of_requests = (mean.high - mean.mean) ** 2
    assert min(changed, moved) > 0.01 * of_requests
    assert (found.high - found.value) ** 2 == pytest.approx(of_requests + 1.959964**2 * (changed + moved))
    test, plain = compare_values(found, other), paired_test(found.per_request, other.per_request)
    changed = test.difference - (found.unclipped - other.unclipped)
    moved = np.mean((found.replicates - other.replicates - test.difference) ** 2)
    of_requests = (plain.high - plain.difference) ** 2
    assert (test.high - test.difference) ** 2 == pytest.approx(of_requests + 1.959964**2 * (changed**2 + moved))
    assert test.difference == pytest.approx(found.value - other.value)
    assert test.significant == (test.low > 0 or test.high < 0)
    same = compare_values(found, found)
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_replicates_of_theta_share_the_expected_labels_of_the_direct_model():
    log = small_log([5] * 10)
    scores, direct = np.random.default_rng(6).normal(size=log.rows), np.random.default_rng(7).random(log.rows)
    other = {i: t**1.5 for i, t in GAPS.items()}
    shared = {"label": "click", "clip": 1.5}
    found = off_policy_value(log, scores, theta=GAPS, direct=direct, replicates=[other], **shared)
    moved = direct * np.array([GAPS[i] / other[i] for i in log.positions])
    expected = off_policy_value(log, scores, theta=other, direct=moved, **shared).value
    assert found.replicates == pytest.approx([expected])


def test_comparisons_without_clip_and_replicates_are_paired_t_tests():
    log = small_log([5] * 400, weighted=True)
    rng = np.random.default_rng(8)
    a, b = (off_policy_value(log, rng.normal(size=log.rows), theta=GAPS, label="click", estimator="ips") for _ in "ab")
    test, plain = compare_values(a, b), paired_test(a.per_request, b.per_request, log.weights)
    assert (test.low, test.high) == pytest.approx((plain.low, plain.high))
    assert test.p == pytest.approx(plain.p, abs=2e-3)


def test_the_direct_model_predicts_the_label_of_examined_items(world):
    shown, _ = world
    log, _ = simulate_log(shown, User(), seed=9, sessions=8000)
    label = "click + dwell / exp(3)"
    theta = {i: 2 * t for i, t in THETA.items()}
    half = {i: t / 2 for i, t in theta.items()}
    model = fit_direct(log, theta=theta, label=label)
    worth = model(shown)
    truth = (
        User().expected(torch.from_numpy(shown.relevance), torch.ones(shown.rows, dtype=torch.int64), label) / theta[1]
    )
    assert worth.mean() == pytest.approx(float(truth.mean()), rel=0.05)
    assert np.corrcoef(worth, truth)[0, 1] > 0.6
    np.testing.assert_allclose(fit_direct(log, theta=half, label=label)(shown), 2 * worth, rtol=0.02)
    in_minutes = replace(log, actions={name: 60 * values for name, values in log.actions.items()})
    np.testing.assert_allclose(fit_direct(in_minutes, theta=theta, label=label)(shown), 60 * worth, rtol=0.02)
    assert model(replace(shown, features=1e3 * shown.features)).max() <= np.exp(model.highest) * 1.001


def test_the_direct_model_of_a_large_log_uses_a_sample_of_its_requests(world, monkeypatch):
    shown, _ = world
    log, _ = simulate_log(shown, User(), seed=9)
    whole = fit_direct(log, theta=THETA, label="click")(shown)
    monkeypatch.setattr("ultr.evaluation.off_policy.FITTED_NUMBERS", 20_000)
    part = fit_direct(log, theta=THETA, label="click")(shown)
    assert not np.allclose(whole, part)
    assert part.mean() == pytest.approx(whole.mean(), rel=0.3)


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    kind=st.sampled_from(KINDS),
    estimator=st.sampled_from(ESTIMATORS),
    k=st.integers(1, 6),
    clip=st.floats(0.1, 100),
    tied=st.booleans(),
)
def test_values_are_finite_and_independent_of_the_scale_of_theta_and_the_order_of_requests(
    seed, lengths, kind, estimator, k, clip, tied
):
    log = small_log(lengths, seed, weighted=bool(seed % 2))
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, log.rows) if tied else rng.normal(size=log.rows)
    direct = rng.uniform(0, 2, log.rows) if estimator in ("dr", "snips") else None
    options = {"label": "click + dwell", "kind": kind, "estimator": estimator, "k": k, "clip": clip}
    found = off_policy_value(log, scores, theta=GAPS, direct=direct, **options)
    assert np.isfinite([found.value, found.unclipped, found.effective_clicks]).all()
    assert np.isfinite(found.per_request).all()
    assert found.value >= -1e-9
    assert found.low <= found.value <= found.high
    assert 0 <= found.clipped <= 1
    assert 0 < found.coverage <= 1
    assert found.effective_clicks <= (log.actions["click"] > 0).sum() + 1e-6

    scaled = {i: 3.7 * t for i, t in GAPS.items()}
    again = off_policy_value(log, scores, theta=scaled, direct=None if direct is None else direct / 3.7, **options)
    np.testing.assert_allclose(again.per_request, found.per_request, rtol=1e-9, atol=1e-9)

    order = rng.permutation(len(log))
    rows = np.concatenate([np.arange(log.offsets[i], log.offsets[i + 1]) for i in order])
    moved = off_policy_value(
        log.select(order), scores[rows], theta=GAPS, direct=None if direct is None else direct[rows], **options
    )
    np.testing.assert_allclose(moved.per_request, found.per_request[order], rtol=1e-9, atol=1e-9)
    assert moved.value == pytest.approx(found.value)

    inside = np.concatenate([rng.permutation(np.arange(a, b)) for a, b in pairwise(log.offsets)])
    mixed = off_policy_value(
        log.regroup(inside, log.offsets),
        scores[inside],
        theta=GAPS,
        direct=None if direct is None else direct[inside],
        **options,
    )
    np.testing.assert_allclose(mixed.per_request, found.per_request, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "rewards"}, OptionError, "did you mean 'reward'"),
        ({"estimator": "snip"}, OptionError, "did you mean 'snips'"),
        ({"estimator": "dr"}, OptionError, "dr needs a direct model.*fit_direct"),
        ({"k": 0}, OptionError, "k must be at least 1.*k=0"),
        ({"clip": 0.0}, OptionError, "clip must be above 0.*clip=0.0"),
        ({"clip": float("nan")}, OptionError, "clip must be above 0"),
        ({"theta": {2: 0.5}}, DataError, "position 3 has no θ; add a value"),
        ({"theta": {**GAPS, 5: 0.0}}, DataError, "finite and above 0.*got θ = 0 at position 5"),
        ({"theta": {**GAPS, 5: float("nan")}}, DataError, "finite and above 0"),
        ({"replicates": [GAPS, {}]}, DataError, "position . has no θ"),
        ({"zeta": {2: 0.1}, "label": "click"}, DataError, "position . has no ζ"),
        ({"zeta": dict.fromkeys(GAPS, 0.06), "label": "click"}, DataError, "above ζ.*got θ = 0.05 at position 9"),
        ({"zeta": dict.fromkeys(GAPS, 0.01)}, OptionError, "labels must be 0 or 1"),
        ({"direct": np.ones(3)}, DataError, "8 values.*got shape .3."),
        ({"direct": np.full(8, np.nan)}, DataError, "8 values"),
        ({"scores": np.ones(7)}, DataError, "scores must be numbers"),
        ({"label": "like"}, LabelError, "needs the action 'like'"),
    ],
)
def test_errors_say_what_is_wrong(options, error, words):
    log = small_log([5, 3])
    options = {"scores": np.ones(8), "theta": GAPS, "label": "click + dwell", "estimator": "snips", **options}
    with pytest.raises(error, match=words):
        off_policy_value(log, **options)


def test_logs_without_positions_requests_or_clicks_are_rejected():
    log = small_log([5, 3])
    shared = {"theta": GAPS, "label": "click"}
    with pytest.raises(DataError, match="needs positions"):
        off_policy_value(replace(log, positions=None), np.ones(8), estimator="ips", **shared)
    with pytest.raises(DataError, match="needs requests"):
        off_policy_value(log.select([]), np.ones(0), estimator="ips", **shared)
    with pytest.raises(DataError, match="needs positions"):
        fit_direct(replace(log, positions=None), **shared)
    with pytest.raises(DataError, match="needs positive labels"):
        fit_direct(replace(log, actions={"click": np.zeros(8, np.float32)}), **shared)
    a, b = (off_policy_value(log, np.ones(8), estimator="ips", k=k, **shared) for k in (1, 2))
    with pytest.raises(DataError, match="only if kind, k, requests"):
        compare_values(a, b)
