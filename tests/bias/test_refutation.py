"""Tests of the assumption about items fail where items are moved for a reason, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from bias.shop import SHOWN, THETA, error_of, shop
from bias.worlds import world
from ultr.bias.audit import BiasReport, audit
from ultr.bias.identification import CARE, CONDITIONAL, IDENTIFIED, NOT
from ultr.log import Log

REQUESTS, PRODUCTS = 6000, 40


def moved(reason: str, *, seed: int = 0, theta: np.ndarray = THETA) -> Log:
    """Make a log of products that are moved by `chance` alone, or also by the `taste` of the user.

    The log has the taste as a feature, and a feature `chance` that moves products without making them relevant.
    """
    rng = np.random.default_rng(seed)
    attribute, quality = rng.normal(size=(2, PRODUCTS))
    shown = np.argsort(rng.random((REQUESTS, PRODUCTS)), axis=1)[:, : 2 * SHOWN]
    taste, arm = 1.5 * rng.normal(size=(REQUESTS, 1)), rng.integers(0, 2, (REQUESTS, 1))
    wanted = quality[shown] + taste * attribute[shown] * (reason == "taste")
    order = wanted + rng.normal(size=shown.shape) + 1.5 * (arm - 0.5) * np.sign(attribute[shown]) * (reason == "arm")
    chosen = np.argsort(-order, axis=1)[:, :SHOWN]
    shown, wanted = (np.take_along_axis(values, chosen, axis=1) for values in (shown, wanted))
    clicked = rng.random(shown.shape) < theta / (1 + np.exp(1.5 - wanted))
    features = np.stack(np.broadcast_arrays(taste, arm), axis=-1).repeat(SHOWN, axis=1)
    return Log(
        features=features.reshape(-1, 2).astype(np.float32),
        offsets=SHOWN * np.arange(REQUESTS + 1),
        request_ids=pa.array(np.arange(REQUESTS)),
        feature_names=("taste", "arm"),
        positions=np.tile(np.arange(1, SHOWN + 1), REQUESTS),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array(shown.reshape(-1)),
    )


def audited(log: Log) -> BiasReport:
    return audit(log.without_features(), bootstrap=20)


def failed(report: BiasReport) -> list[str]:
    return [test.name for test in report.refutations if not test.passed]


def test_products_that_chance_moves_pass_all_tests():
    reports = [audited(moved("chance", seed=seed)) for seed in range(4)]
    assert sum(bool(failed(report)) for report in reports) <= 1
    assert [report.verdict.status for report in reports].count(CONDITIONAL) >= 3
    assert np.mean([error_of(report.anchor.theta) for report in reports]) < 0.08


@pytest.mark.parametrize("seed", range(3))
def test_a_taste_that_the_log_does_not_have_moves_the_other_items_too(seed):
    report = audited(moved("taste", seed=seed))
    assert error_of(report.anchor.theta) > 0.15
    assert "other items" in failed(report)
    assert report.verdict.status in (CARE, NOT)
    assert any("'other items' failed" in reason for reason in report.verdict.reasons)


def test_an_unseen_query_is_found_and_a_logged_one_passes():
    confounded = audited(shop(8000, columns=("item",), random_share=0))
    assert error_of(confounded.anchor.theta) > 0.2
    assert "other items" in failed(confounded)
    by_query = audited(shop(8000, columns=("item", "query"), random_share=0))
    assert not failed(by_query)
    assert by_query.verdict.status == CONDITIONAL


def given(log: Log):
    log = replace(log, context={"query": pa.array(np.zeros(len(log), np.int64))})  # so that items are comparable
    tests = {test.name: test for test in audit(log, bootstrap=20).refutations}
    return tests["position given the item"]


def test_a_feature_that_moves_items_and_makes_them_relevant_fails():
    test = given(moved("taste"))
    assert not test.passed
    assert test.value > 0.1
    assert "The feature 'taste' explains" in test.text


def test_a_feature_that_moves_items_for_no_reason_of_users_passes():
    test = given(moved("arm"))
    assert test.passed
    assert test.value > 0.1
    assert "The feature 'arm' explains" in test.text
    assert "does not change" in test.text


def test_a_segment_that_explains_positions_is_named():
    log = moved("arm")
    arm = log.features[::SHOWN, 1].astype(int).astype(str)
    report = audited(replace(log, context={"segment": pa.array(arm)}))
    test = next(test for test in report.refutations if test.name == "position given the item")
    assert test.text.startswith("The segment explains")
    assert test.passed


def test_another_examination_in_the_second_half_of_the_log_fails():
    first, second = moved("chance", theta=THETA), moved("chance", seed=1, theta=THETA**0.3)
    half = np.arange(REQUESTS // 2)
    rows = half.size * SHOWN
    clicks = np.concatenate([first.actions["click"][:rows], second.actions["click"][rows:]])
    ids = pa.concat_arrays([first.item_ids[:rows], pa.array(second.item_ids.to_numpy()[rows:] + PRODUCTS)])
    assert "halves of time" in failed(audited(replace(first, actions={"click": clicks}, item_ids=ids)))


def test_rare_items_with_another_curve_fail():
    log = moved("chance")
    rare = log.item_ids.to_numpy() % 2 == 1
    keep = np.random.default_rng(0).random(log.rows) < THETA[log.positions - 1]
    clicks = log.actions["click"] * (keep | ~rare)  # squared examination, and half as many requests
    ids = log.item_ids.to_numpy() + PRODUCTS * np.where(rare, np.arange(log.rows) % 3 + 1, 0)
    report = audited(replace(log, actions={"click": clicks.astype(np.float32)}, item_ids=pa.array(ids)))
    assert "halves of items" in failed(report)


def with_marks(log: Log, *, share: float = 0.3, shuffle: bool = True) -> Log:
    """Mark requests as random; with `shuffle`, they are: their rows change places, and are clicked again."""
    rng = np.random.default_rng(0)
    marked = rng.random(len(log)) < share
    items, clicks = (each.reshape(-1, SHOWN).copy() for each in (log.item_ids.to_numpy(), log.actions["click"]))
    if shuffle:
        items[marked] = rng.permuted(items[marked], axis=1)
        clicks[marked] = rng.random(items[marked].shape) < THETA * (0.1 + 0.3 * (items[marked] % 3))
    ids, actions = pa.array(items.reshape(-1)), {"click": clicks.reshape(-1)}
    return replace(log, item_ids=ids, actions=actions, context={"randomised": pa.array(marked)})


def test_requests_in_random_order_contradict_items_that_move_for_a_reason():
    report = audited(shop(12_000, columns=("item", "randomised"), random_share=0.3))
    assert {"random requests", "other items"} <= {*failed(report)}
    assert (report.verdict.anchor, report.verdict.status) == ("randomised", IDENTIFIED)
    assert error_of(report.anchor.theta) < 0.1


def test_a_random_order_that_is_only_declared_fails():
    declared = audited(with_marks(moved("chance"), shuffle=False))
    assert "random order" in failed(declared)
    assert declared.verdict.status == CARE
    assert "random order" not in failed(audited(with_marks(moved("chance"))))


def test_shuffled_lists_of_different_lengths_are_flat():
    """Short lists have more relevant items: without sets of positions, shuffled positions would have a curve."""
    log, rng = world("random", requests=6000), np.random.default_rng(0)
    short = rng.random(6000) < 0.5
    kept = (log.positions <= 2) | ~np.repeat(short, 5)
    clicks = np.maximum(log.actions["click"], np.repeat(short, 5) & (rng.random(log.rows) < 0.3)).astype(np.float32)
    lengths = np.where(short, 2, 5)
    log = replace(log, actions={"click": clicks})
    report = audited(log.regroup(np.flatnonzero(kept), np.concatenate([[0], np.cumsum(lengths)])))
    assert next(test for test in report.refutations if test.name == "shuffled").passed


def test_few_clicks_or_replicates_run_no_test():
    log = world("random", requests=3000)
    assert audit(log, bootstrap=5).refutations == ()
    few = audit(log.select(np.arange(60)), bootstrap=20)
    assert {test.name for test in few.refutations} <= {"position given the item"}


def test_long_logs_are_sampled(monkeypatch):
    log = world("random", requests=4000)
    whole = audited(log)
    monkeypatch.setattr("ultr.bias.refutation.ROWS", 5000)
    part = audited(log)
    assert part.estimates["items"].theta == pytest.approx(whole.estimates["items"].theta)
    assert [test.text for test in part.refutations] != [test.text for test in whole.refutations]


def test_weights_of_requests_count_and_missing_items_are_ignored():
    log = world("random", requests=2000)
    ids = pa.array([None if i % 7 == 0 else item for i, item in enumerate(log.item_ids.to_pylist())])
    log = replace(log, item_ids=ids, weights=np.full(2000, 0.01, np.float32))
    assert not failed(audited(log))
