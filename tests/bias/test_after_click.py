"""Trust after the click: the conditional estimate against closed forms, its errors, and the label that it corrects."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from ultr.bias import after_click
from ultr.bias.after_click import AfterClick, _curve, corrected, estimate_after_click, trust_of
from ultr.bias.counts import Counts
from ultr.bias.examination import Examination
from ultr.errors import DataError
from ultr.evaluation.comparing import compare_rankers
from ultr.evaluation.off_policy import off_policy_value
from ultr.log import Log, read_log
from ultr.log.labels import Label
from ultr.log.table import SHIFT, grid_ids
from worlds.actions import ActionWorld, actions

LABEL = "click + 5 * purchase + seconds / 30"
COLUMNS = {"item": "item", "randomised": "random", "actions": ["click", "purchase", "seconds"]}


def log_of(world: ActionWorld, **columns: object) -> Log:
    return read_log(world.log, **{**COLUMNS, "features": [], **columns})


def counts_of(strata: list[int], places: list[int], shown: list[list[float]], values: list[list[float]]) -> Counts:
    size = max(strata) + 1, max(places) + 1
    return Counts(np.array(strata), np.array(places), size, sparse.csr_matrix(shown), sparse.csr_matrix(values))


def test_one_item_at_two_positions_has_the_ratio_of_its_means_and_its_error():
    shown, values = [[4.0, 6.0, 5.0], [3.0, 2.0, 5.0]], [[2.0, 3.0, 4.0], [1.0, 0.0, 2.0]]
    curve = _curve(counts_of([0, 0], [0, 1], shown, values), 1.0)
    assert curve.log_tau[1] == pytest.approx(np.log((3 / 10) / (9 / 15)))
    n, a = np.array(shown), np.array(values)
    of_group = (a[1] - 3 / 10 * n[1]) / 3 - (a[0] - 9 / 15 * n[0]) / 9  # the derivative of the log ratio
    assert curve.covariance[1, 1] == pytest.approx((of_group**2).sum() * 3 / 2 * 25 / 24)  # 25 rows, one mean


def test_several_items_have_the_curve_with_the_largest_conditional_likelihood():
    rng = np.random.default_rng(0)
    strata, places = np.array([*itertools.product(range(5), range(3))]).T
    shown, values = rng.integers(1, 6, 15).astype(float), rng.integers(1, 9, 15).astype(float)

    def loss(log_tau: np.ndarray) -> float:
        expected = shown * np.exp(np.append(0, log_tau))[places]
        return -float(values @ np.log(expected / np.bincount(strata, expected)[strata]))

    best = optimize.minimize(loss, np.zeros(2), tol=1e-12).x
    columns = [np.column_stack([each, each]) for each in (shown, values)]
    np.testing.assert_allclose(
        _curve(Counts(strata, places, (5, 3), *map(sparse.csr_matrix, columns)), 1.0).log_tau[1:], best, atol=1e-5
    )


def test_the_error_of_amounts_is_their_spread_in_repeated_logs():
    rng, found, errors = np.random.default_rng(1), [], []
    strata, places = (each.ravel() for each in np.indices((150, 2)))
    for _ in range(150):
        groups = rng.integers(0, 50, (2, len(strata), 2))  # two clicked rows of each item at each position
        seconds = np.exp(rng.normal(size=(len(strata), 2)))
        shown, values = np.zeros((len(strata), 50)), np.zeros((len(strata), 50))
        for j in range(2):
            np.add.at(shown, (np.arange(len(strata)), groups[0, :, j]), 1.0)
            np.add.at(values, (np.arange(len(strata)), groups[0, :, j]), seconds[:, j])
        curve = _curve(Counts(strata, places, (150, 2), sparse.csr_matrix(shown), sparse.csr_matrix(values)), 1.0)
        found.append(curve.log_tau[1])
        errors.append(curve.covariance[1, 1])
    assert np.var(found) == pytest.approx(np.mean(errors), rel=0.3)
    assert np.mean(np.abs(found) < 1.96 * np.sqrt(errors)) > 0.88


def test_the_curves_of_actions_are_recovered_with_their_intervals():
    inside = []
    for seed in range(4):
        world = actions(8000, seed=seed)
        found = estimate_after_click(log_of(world), Label(LABEL))
        for name, true in world.tau.items():
            each = found[name]
            assert each.used
            assert each.tau[0] == 1
            assert np.abs(np.log(each.tau / true)).mean() < 0.3
            inside += ((np.array(each.low) <= true) & (true <= each.high))[1:].tolist()
    assert np.mean(inside) > 0.85


def test_without_trust_nothing_is_corrected():
    p = []
    for seed in range(10, 16):
        log = log_of(actions(3000, seed=seed, trust=0.0))
        found = estimate_after_click(log, Label(LABEL))
        assert {*found} == {"purchase", "seconds"}
        assert not any(each.used for each in found.values())
        assert trust_of(found, [1, 2]) == {}
        assert corrected(log, trust_of(found, [1, 2])) is log
        p += [each.p for each in found.values()]
    assert np.mean(p) > 0.25


def test_items_whose_purchases_depend_on_the_user_are_overruled_by_random_requests():
    world = actions(12_000, seed=1, trust=0.0, random_share=0.5)
    rng, log = np.random.default_rng(0), log_of(world)
    random = np.repeat(log.context["randomised"].to_numpy(zero_copy_only=False), 10)
    # In production's order, those who will buy an item see it first: it is bought more often there.
    lost = (rng.random(log.rows) > 1 / log.positions**0.5) & ~random
    bought = np.where(lost, 0, log.actions["purchase"])
    found = estimate_after_click(replace(log, actions={**log.actions, "purchase": bought}), Label(LABEL))["purchase"]
    assert found.evidence == "requests in random order"
    assert not found.used


@pytest.mark.parametrize(
    ("label", "follow"),
    [
        (LABEL, {"purchase", "seconds"}),
        ("seconds", {"seconds"}),
        ("click", set()),
        ("purchase", set()),  # it is positive where it is 1: its examination has its trust
        ("click * (1 + purchase)", {"purchase"}),
        ("click + 5 * purchase + (seconds > 30)", {"purchase"}),
        ("max(click, 3 * purchase)", set()),
        ("click + log1p(seconds)", set()),
        ("2 * click - purchase", set()),
    ],
)
def test_only_actions_in_which_the_label_is_linear_are_corrected(label, follow):
    log = log_of(actions(1500, seed=2))
    assert {*estimate_after_click(log, Label(label))} == follow


def test_logs_without_evidence_have_no_estimate(monkeypatch):
    world = actions(800, seed=3)
    label = Label(LABEL)
    assert estimate_after_click(log_of(world, item="", randomised=""), label) == {}
    assert estimate_after_click(replace(log_of(world), positions=None), label) == {}
    with monkeypatch.context() as context:
        context.setattr(after_click, "MOST_POSITIONS", 9)
        assert estimate_after_click(log_of(world), label) == {}
    silent = log_of(world)
    assert estimate_after_click(replace(silent, actions={n: 0 * v for n, v in silent.actions.items()}), label) == {}


def test_the_corrected_label_of_a_click_does_not_depend_on_its_position():
    world = actions(30_000, seed=4, random_share=1.0)
    log = log_of(world)
    trust = {name: dict(zip(range(1, 11), tau.tolist(), strict=True)) for name, tau in world.tau.items()}
    for each, equal in ((log, False), (corrected(log, trust), True)):
        label = np.asarray(Label(LABEL)(each.actions), float)
        means, errors = [], []
        for k in range(1, 11):
            values = label[(log.positions == k) & (log.actions["click"] > 0)]
            means.append(values.mean())
            errors.append(values.std() / np.sqrt(len(values)))
        z = (np.array(means) - np.average(means, weights=np.square(errors) ** -1.0)) / errors
        assert (np.abs(z).max() < 3.5) == equal


def test_segments_share_a_curve_and_positions_between_are_interpolated():
    each = AfterClick((1, 3), (1.0, 0.5), (1.0, 0.4), (1.0, 0.6), 0.0, used=True, evidence="items")
    assert each.at([1, 2, 3, 9, (1 << SHIFT) + 3]) == {1: 1.0, 2: 0.75, 3: 0.5, 9: 0.5, (1 << SHIFT) + 3: 0.5}


def test_in_a_grid_the_curve_is_that_of_the_reading_order_and_outputs_name_slots():
    log, label = log_of(actions(6000, seed=3)), Label(LABEL)
    in_list = estimate_after_click(log, label)["seconds"]
    positions = log.shown_positions("a test")
    in_grid = estimate_after_click(replace(log, positions=grid_ids((positions + 1) // 2, 2 - positions % 2)), label)
    found = in_grid["seconds"]
    assert (found.tau, found.low, found.high, found.used) == (in_list.tau, in_list.low, in_list.high, True)
    assert found.to_json()["positions"][:3] == ["r1c1", "r1c2", "r2c1"]
    assert "seconds after a click at position r" in found.sentence("seconds")
    assert AfterClick.of(found.to_json()) == found


def test_examination_keeps_the_curves_and_rejects_wrong_ones(tmp_path):
    each = AfterClick((1, 3), (1.0, 0.5), (1.0, 0.4), (1.0, 0.6), 0.01, used=False, evidence="items")
    examination = replace(Examination.known({1: 1.0, 3: 0.4}), actions={"purchase": each})
    examination.save(tmp_path / "examination.json")
    assert Examination.load(tmp_path / "examination.json").actions == {"purchase": each}
    broken = replace(examination, actions={"purchase": replace(each, tau=(1.0, 0.0))})
    broken.save(tmp_path / "examination.json")
    with pytest.raises(DataError, match="τ must have a number above 0"):
        Examination.load(tmp_path / "examination.json")


@pytest.mark.parametrize("estimator", ["ips", "dr", "snips"])
def test_the_value_of_a_new_order_has_the_trust_in_the_new_positions(estimator):
    theta, tau = {1: 1.0, 2: 0.6, 3: 0.3}, {1: 1.0, 2: 0.5, 3: 0.4}
    clicks, buys = np.array([0.2, 0.5, 0.8]), np.array([0.9, 0.1, 0.3])
    seen, trusted = (np.array([*each.values()]) for each in (theta, tau))
    expected = {"click": seen * clicks, "purchase": seen * trusted * clicks * buys}  # in place of drawn feedback
    log = read_log(pa.table({"request": [0, 0, 0], "position": [1, 2, 3], "f": [0.0, 0.0, 0.0], **expected}))
    options = {"theta": theta, "label": "click + 5 * purchase", "trust": {"purchase": tau}, "estimator": estimator}
    options |= {"direct": np.full(3, 2.0), "clip": 100.0, "k": 3}
    for scores in itertools.permutations([1.0, 2.0, 3.0]):
        order = np.argsort(-np.array(scores))
        truth = (seen * clicks[order] * (1 + 5 * trusted * buys[order])).sum()
        assert off_policy_value(log, np.array(scores), **options).value == pytest.approx(truth, rel=1e-5)


def test_rankers_are_compared_by_what_they_would_get_with_trust():
    world = actions(20_000, seed=8)
    log, label = log_of(world, features=["popular", "bargain"]), "10 * purchase + click"
    known = {str(k): float(theta) for k, theta in enumerate(world.theta, start=1)}
    scores = world.clicks * world.purchases
    test = np.arange(len(log)) % 2 == 0
    comparison = compare_rankers(log, {"new": scores}, ["off-policy-reward@10"], label=label, test=test, known=known)
    found = {name: values["off-policy-reward@10"].mean for name, values in comparison.rankers.items()}
    truth = world.expected(scores)
    assert found["new"].low < truth["click"] + 10 * truth["purchase"] < found["new"].high
    feedback = Label(label)(log.select(test).actions).sum() / test.sum()
    assert found["the logged ranking"].mean == pytest.approx(feedback, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.floats(0, 1), st.sampled_from([1.0, 1e-6, 1e9]))
def test_small_logs_have_finite_curves_or_none(seed, requests, random_share, unit):
    log = log_of(actions(requests, seed=seed, random_share=random_share))
    log = replace(log, actions={**log.actions, "seconds": unit * log.actions["seconds"]})
    for each in estimate_after_click(log, Label("click + purchase + seconds")).values():
        assert each.tau[0] == 1
        assert 0 <= each.p <= 1
        curves = np.array([each.low, each.tau, each.high])
        assert np.isfinite(curves).all()
        assert (curves > 0).all()
        assert (np.diff(curves, axis=0) >= 0).all()
